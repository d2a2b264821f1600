"""Products of rows x with a constant matrix W.

Of x in a ball about c, |x·w − c·w| ≤ r·‖s·w‖ (Cauchy–Schwarz); of x in a box, |x·w − m·w| ≤ d·|w| (interval
arithmetic, m the middle and d half the width). Both hold, so the tighter end counts. The norm of a whole result is at
most r times the spectral norm of s·W, which is bounded by √(‖W‖₁·‖W‖∞) and by the spectral norms of blocks of columns,
these by the largest eigenvalue of their products with themselves, which are small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from amp_rewrite.decide.bounds.arithmetic import RoundingModel, gamma
from amp_rewrite.decide.bounds.state import Ball, State, box, floored, reduced
from amp_rewrite.decide.bounds.weights import BLOCK, Part
from amp_rewrite.files.casting import Array

_NARROW = 1e-2


class RowBounds(NamedTuple):
    """The bounds of all rows of a value together: a box, and a ball about `center` in the scale `scale`."""

    lo: Array
    hi: Array
    center: Array
    scale: Array
    radius: float

    @property
    def narrow(self) -> bool:
        """True if the box is little more than one row of numbers."""
        return float((self.hi - self.lo).sum()) <= _NARROW * float(np.maximum(-self.lo, self.hi).sum())

    @classmethod
    def of(cls, state: State, length: int) -> RowBounds | None:
        """Return the bounds of rows along the last axis; None if they are open."""
        lo, hi = _row(state.lo, length, np.min), _row(state.hi, length, np.max)
        if lo is None or hi is None or state.fills:
            return None
        ball = state.ball
        if ball is not None and -1 in ball.axes:
            center = np.zeros(length) if ball.center is None else _same(ball.center, length)
            if ball.axes != (-1,) or center is None:
                ball, center = ball.zeroed(), np.zeros(length)
            scale = np.ones(length) if ball.scale is None else _row(ball.scale, length, np.max)
            radius = float(np.max(ball.radius))
            if math.isfinite(radius) and scale is not None:
                lo, hi = np.maximum(lo, center - radius * scale), np.minimum(hi, center + radius * scale)
                return cls(lo, hi, center, scale, radius)
        if not (np.isfinite(lo).all() and np.isfinite(hi).all()):
            return None
        return cls(lo, hi, (lo + hi) / 2, floored((hi - lo) / 2), math.sqrt(length))


def _row(array: Array, length: int, by: object) -> Array | None:
    row = reduced(array, range(-array.ndim, -1), by).reshape(-1)
    return np.broadcast_to(row, length) if row.size in (1, length) else None


def _same(array: Array, length: int) -> Array | None:
    """Return the numbers along the last axis, if they are the same for all rows."""
    return np.broadcast_to(array.reshape(-1), length) if array.size in (1, *array.shape[-1:]) else None


@dataclass(slots=True)
class _Sums:
    """Sums over the parts of a matrix that were read: products with W, with |W|, and of squares."""

    x: RowBounds
    exact: Array
    sizes: Array
    squares: Array
    line: dict[int, Array] = field(default_factory=dict)
    grams: dict[int, Array] = field(default_factory=dict)

    @classmethod
    def of(cls, x: RowBounds, columns: int) -> _Sums:
        return cls(x, np.zeros((2, columns)), np.zeros((4, columns)), np.zeros(columns))

    def add(self, part: Part, blocks: bool) -> None:
        x, w = self.x, part.values
        rows, columns = w.shape
        at, to = slice(part.row, part.row + rows), slice(part.column, part.column + columns)
        lo, hi, center, scale = x.lo[at], x.hi[at], x.center[at], x.scale[at]
        self.exact[:, to] += np.stack([(lo + hi) / 2, center]) @ w
        size = np.abs(w)
        self.sizes[:, to] += np.stack([(hi - lo) / 2, np.maximum(-lo, hi), np.abs(center), scale]) @ size
        self.line[part.row] = self.line.get(part.row, 0.0) + scale * size.sum(axis=1)
        scaled = np.multiply(w, scale[:, None], out=size)
        self.squares[to] += np.einsum("ij,ij->j", scaled, scaled)
        count = columns // BLOCK * BLOCK
        if blocks and count:
            with np.errstate(over="ignore", invalid="ignore"):
                low = scaled[:, :count].astype(np.float32).reshape(rows, -1, BLOCK).transpose(1, 0, 2)
                gram = np.matmul(low.transpose(0, 2, 1), low).astype(np.float64)
            self.grams[part.column] = self.grams.get(part.column, 0.0) + gram


def product(x: RowBounds, matrix: Iterable[Part], columns: int, arithmetic: RoundingModel, *, blocks: bool) -> State:
    """Return the state of x·W. `blocks`: also bound the norms of blocks of columns, where a reader needs norms."""
    sums = _Sums.of(x, columns)
    for part in matrix:
        sums.add(part, blocks)
    terms = x.lo.size
    (middle, center), (half, most, about, column) = sums.exact, sums.sizes
    reach = x.radius * np.sqrt(sums.squares)
    slack = gamma(terms) + arithmetic.unit
    error = slack * np.minimum(about + reach, most) + arithmetic.least * float(np.maximum(-x.lo, x.hi).sum())
    lo = np.maximum(center - reach, middle - half) - error
    hi = np.minimum(center + reach, middle + half) + error
    if not (np.isfinite(lo).all() and np.isfinite(hi).all()):
        return box(lo, hi)
    away = np.maximum(hi - center, center - lo)
    line = max((float(np.max(part, initial=0.0)) for part in sums.line.values()), default=0.0)
    whole = x.radius * math.sqrt(float(np.max(column, initial=0.0)) * line) * (1 + 2.0**-30) + _length(error)
    radii = _radii(x.radius, sums, away, error) if blocks else None
    radius = min(whole, _length(away), math.inf if radii is None else _length(radii))
    ball = Ball((-1,), (columns,), np.full((1,), radius), center if center.any() else None)
    if radii is not None and columns % BLOCK == 0:
        ball = Ball(ball.axes, ball.sizes, ball.radius, ball.center, None, radii)
    return box(lo, hi, ball=ball)


def by_size(x: RowBounds, largest: float, columns: int, arithmetic: RoundingModel) -> State:
    """Return the state of x·W for a W whose numbers are at most `largest`."""
    terms = x.lo.size
    sizes = float(np.maximum(-x.lo, x.hi).sum())
    norm = x.radius * float(np.sqrt(np.square(x.scale).sum())) + float(np.abs(x.center).sum())
    most = largest * min(sizes, norm) * (1 + gamma(terms) + arithmetic.unit) + arithmetic.least * sizes
    return box(np.full(columns, -most), np.full(columns, most))


def _length(numbers: Array) -> float:
    return float(np.sqrt(np.square(numbers).sum())) * (1 + 2.0**-30)


def _radii(radius: float, sums: _Sums, away: Array, error: Array) -> Array:
    """Return the radius of each block of columns, the last one perhaps shorter."""
    starts = range(0, away.size, BLOCK)
    bounds = np.array([_length(away[at : at + BLOCK]) for at in starts])
    frobenius = np.array([sums.squares[at : at + BLOCK].sum() for at in starts])
    # A float32 product of n terms is off by γₙ·‖W‖², casts included; eigenvalues of 64 × 64 by far less.
    slack = 2 * gamma(sums.x.lo.size) * frobenius
    for column, gram in sums.grams.items():
        if not np.isfinite(gram).all():
            continue
        first = column // BLOCK
        largest = np.linalg.eigvalsh(gram)[:, -1] * (1 + 2.0**-30)
        at = slice(first, first + len(largest))
        spectral = np.sqrt(np.maximum(largest, 0.0) + slack[at]) * radius
        wrong = np.array([_length(error[i * BLOCK : (i + 1) * BLOCK]) for i in range(at.start, at.stop)])
        bounds[at] = np.minimum(bounds[at], spectral + wrong)
    return bounds
