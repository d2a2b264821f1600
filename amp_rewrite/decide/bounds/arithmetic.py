"""Roundings of a run, as factors on bounds: of each result, of sums, and of the float64 analysis itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from amp_rewrite.decide.bounds.state import Ball, State
from amp_rewrite.dtypes import DType

LONGEST = 1 << 20
"""The length that a sum over an axis of unknown length is taken to have at most."""
_SLACK = 2.0**-40
"""More than the relative error of the float64 computation of any bound."""
_UNIT32 = 2.0**-24
_LIBRARY = 16 * _UNIT32
"""The relative error of a function of a math library, 8 units in the last place."""


@dataclass(frozen=True, slots=True)
class RoundingModel:
    """Rounding of results: at most `unit` relative and `least` absolute, whether a type is low or float32.

    Results of sums and products are accumulated in float32, as the kernels of both providers do.
    """

    unit: float
    least: float

    @classmethod
    def of(cls, to: DType, *others: DType | None, exponent: int = 0) -> RoundingModel:
        """Return the roundings of values that have one of these types, or float32, times 2⁻ᵉ at most."""
        types = [to, DType.FLOAT, *(t for t in others if t is not None and t.floating)]
        unit = max(t.eps for t in types) / 2
        least = max(max(t.smallest_subnormal for t in types) / 2, DType.FLOAT.tiny)
        return cls(unit + _LIBRARY + _SLACK, math.ldexp(least, exponent))

    def settle(self, state: State, terms: int | None = None) -> State:
        """Return the state of a value after it was rounded; `terms`: how many numbers its total sums."""
        lo, hi = state.lo, state.hi
        with np.errstate(invalid="ignore"):
            lo = lo - self.unit * np.abs(lo) - self.least * (lo != 0)
            hi = hi + self.unit * np.abs(hi) + self.least * (hi != 0)
        total = state.total * (1 + self.unit) + self.least * (LONGEST if terms is None else terms)
        return replace(state, lo=lo, hi=hi, total=total, ball=self._ball(state.ball))

    def _ball(self, ball: Ball | None) -> Ball | None:
        if ball is None:
            return None
        scale = np.ones(()) if ball.scale is None else ball.scale
        more = self.least * ball.norm(1 / scale)
        if ball.center is not None:
            more = more + self.unit * ball.norm(ball.center / scale)
        blocks = None if ball.blocks is None else ball.blocks * (1 + self.unit) + np.max(more)
        return replace(ball, radius=ball.radius * (1 + self.unit) + more, blocks=blocks)


def gamma(terms: int | None) -> float:
    """Return γₙ of a float32 sum of n products, in any order: n·u / (1 − n·u)."""
    steps = ((LONGEST if terms is None else min(terms, LONGEST * 8)) + 4) * _UNIT32
    return steps / (1 - steps) + _SLACK if steps < 1 else math.inf
