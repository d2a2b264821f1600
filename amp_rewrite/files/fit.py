"""Effects of rounding the values of a tensor to a lower floating type."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from amp_rewrite.dtypes import DType


@dataclass(frozen=True, slots=True)
class Fit:
    """Counts of the effects of rounding to nearest even.

    count: all values; nonfinite: infinities and NaN; overflow: finite values that round to infinity; flushed: nonzero
    values that round to zero; subnormal: values that round to a subnormal. absmax and absmin: magnitudes of finite,
    nonzero values; 0.0 without any.
    """

    count: int = 0
    nonfinite: int = 0
    absmax: float = 0.0
    absmin: float = 0.0
    overflow: int = 0
    flushed: int = 0
    subnormal: int = 0

    def merge(self, other: Fit) -> Self:
        """Return the fit of both sets of values together."""
        least = [fit.absmin for fit in (self, other) if fit.absmin]
        return type(self)(
            count=self.count + other.count,
            nonfinite=self.nonfinite + other.nonfinite,
            absmax=max(self.absmax, other.absmax),
            absmin=min(least, default=0.0),
            overflow=self.overflow + other.overflow,
            flushed=self.flushed + other.flushed,
            subnormal=self.subnormal + other.subnormal,
        )

    @classmethod
    def of(cls, chunks: Iterable[NDArray[Any]], to: DType, *, ours: bool = False) -> Fit:
        """Return the fit of flat floating arrays to the type `to`. O(values). `ours`: the arrays may be overwritten."""
        fit = cls()
        for chunk in chunks:
            values = chunk
            if values.dtype not in (np.float32, np.float64):
                with np.errstate(invalid="ignore"):  # signalling NaN
                    values = values.astype(np.float32)  # exact: lower types are subsets
            fit = fit.merge(_of_sizes(np.abs(values, out=values if ours else None), to))
        return fit


def _of_sizes(sizes: NDArray[Any], to: DType) -> Fit:
    count = sizes.size
    if not count:
        return Fit()
    absmax = sizes.max()
    if not np.isfinite(absmax):
        sizes = sizes[np.isfinite(sizes)]
        if not sizes.size:
            return Fit(count=count, nonfinite=count)
        absmax = sizes.max()
    nonfinite = count - sizes.size
    limit, half, normal = thresholds(to, sizes.dtype)
    absmin = sizes.min()
    if not absmin:
        sizes = sizes[sizes != 0]
        absmin = sizes.min(initial=np.inf)
    few = int(np.count_nonzero(sizes < normal)) if absmin < normal else 0
    flushed = int(np.count_nonzero(sizes <= half)) if absmin <= half else 0
    return Fit(
        count=count,
        nonfinite=nonfinite,
        absmax=float(absmax),
        absmin=float(absmin) if sizes.size else 0.0,
        overflow=int(np.count_nonzero(sizes >= limit)) if absmax >= limit else 0,
        flushed=flushed,
        subnormal=few - flushed,
    )


@cache
def thresholds(to: DType, dtype: np.dtype[Any]) -> tuple[Any, Any, Any]:
    """Return the least size that rounds to infinity, the largest to zero, the bound of subnormals (ties to even)."""
    half = to.smallest_subnormal / 2
    last = to.max / (2 - to.eps) * to.eps  # the distance between the two largest finite values
    with np.errstate(all="ignore"):
        limit, zero, normal = np.array([to.max + last / 2, half, to.tiny - half]).astype(dtype)
    return limit, zero, normal
