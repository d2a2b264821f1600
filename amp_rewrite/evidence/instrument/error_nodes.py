"""Nodes that measure errors of values inside a model against their reference: a few numbers per pair.

The nodes reduce each pair of values to one row of numbers right after they are computed, so no activation leaves the
runtime, and none lives longer than its own readers need it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.builder import NodeBuilder
from amp_rewrite.ir.versions import FIRST_WHERE

_WIDEST = 2.0**64  # its square is the first power of two that no float32 holds


@dataclass(frozen=True, slots=True)
class ErrorStats:
    """Error of values against their reference, over all batches.

    max_abs: the largest |value - reference|; noise: sum (value - reference)^2, over elements finite in both. absmax:
    the largest |reference|; signal: sum reference^2 without masks (`ErrorNodes.row`), over elements finite there.
    lost: the number of elements finite only in the reference.
    """

    max_abs: float = 0.0
    absmax: float = 0.0
    noise: float = 0.0
    signal: float = 0.0
    lost: int = 0

    def merge(self, other: ErrorStats) -> ErrorStats:
        """Return the statistics of both together."""
        return ErrorStats(
            max(self.max_abs, other.max_abs),
            max(self.absmax, other.absmax),
            self.noise + other.noise,
            self.signal + other.signal,
            self.lost + other.lost,
        )

    def error(self, floor: float) -> float:
        """Return sqrt(noise / signal), the inverse signal-to-noise ratio of amplitudes; inf if elements are lost.

        `floor`: lower bound on sqrt(signal).
        """
        if self.lost:
            return math.inf
        noise, signal = math.sqrt(self.noise), math.sqrt(self.signal)
        return noise / max(signal, floor) if noise else 0.0


class ErrorNodes(NodeBuilder):
    """Builder of nodes that measure pairs of values, each pair to one row. All its names begin with `prefix`."""

    def __init__(self, prefix: str, low: DType) -> None:
        """`low`: references below its smallest normal number count as that number."""
        super().__init__(set(), opset=FIRST_WHERE, region=prefix)
        self._flat = self.ints([-1])
        self._zero, self._infinity, self._least = map(self._number, (0.0, math.inf, low.tiny))
        self._bounds = [(self._number(-bound), self._number(bound)) for bound in (_WIDEST, min(low.max, _WIDEST))]

    def _number(self, value: float) -> str:
        return self.constant(np.array([value], np.float32))

    def row(self, value: str, reference: str, *, is_low: bool) -> str:
        """Add nodes for the row of two float32 tensors of one shape; return the row.

        Elements beyond the range of the value's type (`is_low`: the low one), or whose square overflows float32, count
        as masks: they are clamped to the bound, and excluded from the size of the reference.
        """
        lowest, highest = self._bounds[is_low]
        v, r = (self.op("Reshape", x, self._flat) for x in (value, reference))
        v_finite, r_finite = (self.op("Less", self.op("Abs", x), self._infinity) for x in (v, r))
        finite = self.op("And", v_finite, r_finite)
        # From here on all elements are finite; those not finite in both differ by 0.
        r = self.op("Where", r_finite, r, self._zero)
        v = self.op("Where", finite, v, r)
        error = self.op("Abs", self.op("Sub", *(self.op("Max", self.op("Min", x, highest), lowest) for x in (v, r))))
        size = self.op("Abs", r)
        unmasked = self.op("Where", self.op("Less", size, highest), size, self._zero)
        largest, scale, absmax = (self.op("ReduceMax", x, keepdims=1) for x in (error, unmasked, size))
        # Squares of large values must not overflow, those of small ones not vanish; the maximum of no element is -inf.
        unit = self.op("Max", scale, largest, self._least)
        noise, signal = (self.op("ReduceSumSquare", self.op("Div", x, unit), keepdims=1) for x in (error, unmasked))
        lost = self.op("ReduceSum", self.cast(self.op("Xor", r_finite, finite), DType.FLOAT), keepdims=1)
        return self.op("Concat", largest, absmax, noise, signal, lost, unit, axis=0)


def read(packed: NDArray[np.float32]) -> list[ErrorStats]:
    """Return the statistics of the rows in an output."""
    return [
        ErrorStats(max(0.0, error), max(0.0, size), noise * unit**2, signal * unit**2, int(lost))
        for error, size, noise, signal, lost, unit in packed.astype(np.float64).reshape(-1, 6).tolist()
    ]
