"""Casts between floating types, with finite values kept finite; and the effects of rounding.

float32 becomes float16 by integer arithmetic on whole arrays: numpy's own conversion handles one number at a time and
raises a processor flag for each subnormal result: 2 GB/s for most weights, 0.4 GB/s for small ones. This one reaches
2.8 GB/s for all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from amp_rewrite.dtypes import DType

Array = NDArray[Any]

_LARGE = 1 << 12  # elements from which it pays to convert in whole arrays
# The bit pattern of infinity; the one below it is the largest finite value.
_INFINITY: dict[DType, tuple[type[np.unsignedinteger[Any]], int]] = {
    DType.FLOAT16: (np.uint16, 0x7C00),
    DType.BFLOAT16: (np.uint16, 0x7F80),
    DType.FLOAT: (np.uint32, 0x7F800000),
}

BLOCK = 1 << 16  # elements; a block and its result stay in the processor's cache

_MAGNITUDE, _EXPONENT = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
_OVERFLOW = 0x477FF000  # 65520, from which numbers round to infinity
# The exponent of the smallest normal float16, and of all subnormal ones. A block of it, as numpy's maximum is twice as
# fast for two arrays as for an array and a number.
_LEAST = np.full(BLOCK, (127 - 14) << 23, np.uint32)
_DROPPED = np.uint32(23 - 10)  # bits of the significand
# 13 exponents more, and in the significand what takes the bias of float32 to that of float16, modulo the 16 bits kept.
_RAISED = np.uint32(((23 - 10) << 23) + (-((127 - 1) << 10) & 0xFFFF))


def cast(values: Array, to: DType) -> Array:
    """Cast floating values to another floating type, to nearest even.

    Finite values out of range become the largest value of the type, with their sign; infinity and NaN stay.
    """
    if to is not DType.FLOAT16 or values.dtype != np.float32 or values.size < _LARGE:
        return _cast_whole(values, to)
    flat = np.ascontiguousarray(values).reshape(-1)
    low: Array = np.empty(flat.size, np.float16)
    for at in range(0, flat.size, BLOCK):
        block, rounded = flat[at : at + BLOCK], low[at : at + BLOCK]
        if not to_float16(block, rounded):
            rounded[:] = _cast_whole(block, to)
    return low.reshape(values.shape)


def scaled(values: Array, exponent: int) -> Array:
    """Return floating values times 2⁻ᵉ, in float32 or wider; the array itself may be overwritten.

    Exact but for subnormal numbers and those beyond the type.
    """
    if values.dtype.itemsize < 4:
        values = values.astype(np.float32)
    with np.errstate(all="ignore"):
        np.multiply(values, values.dtype.type(2.0**-exponent), out=values)
    return values


def to_float16(values: NDArray[Any], low: NDArray[Any]) -> bool:
    """Round flat float32 values, at most a `BLOCK`, to nearest even into `low`; return False if a value is not finite.

    `low`: a float16 array of the same size. Subnormal numbers are kept. It is left untouched if a value is NaN or
    rounds to infinity. O(values).

    Adding a power of two, 13 exponents above that of each number (above that of the smallest normal float16 for
    subnormal results), rounds as float16 does. The lowest bits of the sum are the significand; they are added to the
    exponent, into which they carry.
    """
    bits = values.view(np.uint32)
    magnitude = bits & _MAGNITUDE
    if magnitude.max(initial=0) >= _OVERFLOW:
        return False
    power = magnitude & _EXPONENT
    np.maximum(power, _LEAST[: power.size], out=power)
    power += _RAISED
    rounded = magnitude.view(np.float32)
    rounded += power.view(np.float32)
    wide = np.right_shift(magnitude, _DROPPED, out=power)
    wide += magnitude
    sign = np.right_shift(bits, 16, out=magnitude)
    sign &= np.uint32(0x8000)
    wide += sign
    low.view(np.uint16)[:] = wide
    return True


def _cast_whole(values: Array, to: DType) -> Array:
    with np.errstate(all="ignore"):
        low: Array = values.astype(to.numpy)
    if to in _INFINITY:
        unsigned, infinity = _INFINITY[to]
        bits = low.view(unsigned)
        over = bits & (np.iinfo(unsigned).max >> 1) == infinity
        if over.any():
            bits[over & np.isfinite(values)] -= 1
    return low


# -- effects of rounding ------------------------------------------------------------------------------


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
        counts = ("count", "nonfinite", "overflow", "flushed", "subnormal")
        return type(self)(
            absmax=max(self.absmax, other.absmax),
            absmin=min(filter(None, (self.absmin, other.absmin)), default=0.0),
            **{name: getattr(self, name) + getattr(other, name) for name in counts},
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
    count, absmax = sizes.size, sizes.max(initial=0)
    if not np.isfinite(absmax):
        sizes = sizes[np.isfinite(sizes)]
        absmax = sizes.max(initial=0)
    nonfinite = count - sizes.size
    limit, half, normal = thresholds(to, sizes.dtype)
    absmin = sizes.min(initial=np.inf)
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
    """Return the least size rounded to infinity, the largest to zero, the bound of subnormals (ties to even)."""
    half = to.smallest_subnormal / 2
    last = to.max / (2 - to.eps) * to.eps  # the distance between the two largest finite values
    with np.errstate(all="ignore"):
        limit, zero, normal = np.array([to.max + last / 2, half, to.tiny - half]).astype(dtype)
    return limit, zero, normal
