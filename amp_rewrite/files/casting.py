"""Saturating casts between floating-point types, and statistics of the effects of rounding.

Casting float32 to float16 uses integer arithmetic on whole arrays and reaches 2.8 GB/s for all weights. NumPy converts
one number at a time and raises a processor flag for each subnormal result, so it reaches 2 GB/s for most weights, but
only 0.4 GB/s for small ones.
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

_MIN_SIZE = 1 << 12  # elements; numpy casts smaller arrays
# The bit pattern of infinity, one above that of the largest finite value.
_INFINITY: dict[DType, tuple[type[np.unsignedinteger[Any]], int]] = {
    DType.FLOAT16: (np.uint16, 0x7C00),
    DType.BFLOAT16: (np.uint16, 0x7F80),
    DType.FLOAT: (np.uint32, 0x7F800000),
}

BLOCK = 1 << 16  # elements; a block and its result stay in the processor's cache

_MAGNITUDE, _EXPONENT = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
_OVERFLOW = 0x477FF000  # 65520, the smallest number that rounds to infinity
# The exponent of the smallest normal float16 and of all subnormal ones, repeated to fill a block: numpy's maximum is
# twice as fast on two arrays as on an array and a scalar.
_MIN_EXPONENT = np.full(BLOCK, (127 - 14) << 23, np.uint32)
_DROPPED = np.uint32(23 - 10)  # bits of the significand
# Raises the exponent by 13. The significand bits convert float32's exponent bias to float16's, modulo 2¹⁶, since only
# the low 16 bits are kept.
_RAISED = np.uint32(((23 - 10) << 23) + (-((127 - 1) << 10) & 0xFFFF))


def cast(values: Array, to: DType) -> Array:
    """Cast floating-point values to another floating-point type, rounding to nearest even.

    Finite values out of range saturate at the largest finite value; infinities and NaNs are preserved.
    """
    if to is not DType.FLOAT16 or values.dtype != np.float32 or values.size < _MIN_SIZE:
        return _cast_whole(values, to)
    flat = np.ascontiguousarray(values).reshape(-1)
    low: Array = np.empty(flat.size, np.float16)
    for at in range(0, flat.size, BLOCK):
        block, rounded = flat[at : at + BLOCK], low[at : at + BLOCK]
        if not to_float16(block, rounded):
            rounded[:] = _cast_whole(block, to)
    return low.reshape(values.shape)


def scaled(values: Array, exponent: int) -> Array:
    """Return floating-point values times 2⁻ᵉ, in float32 or wider. The input array may be overwritten.

    The result is exact unless it is subnormal or overflows.
    """
    if values.dtype.itemsize < 4:
        values = values.astype(np.float32)
    with np.errstate(all="ignore"):
        np.multiply(values, values.dtype.type(2.0**-exponent), out=values)
    return values


def to_float16(values: NDArray[Any], low: NDArray[Any]) -> bool:
    """Round at most `BLOCK` float32 values to nearest even into `low`; return False if any result would not be finite.

    `low`: a flat float16 array of the same size, left untouched if a value is NaN or rounds to infinity. Subnormal
    results are kept. O(values).

    Adding to each number the power of two whose exponent is 13 higher (for subnormal results, 13 higher than that of
    the smallest normal float16) rounds it as float16 does. The lowest bits of the sum are the significand; adding them
    to the exponent bits may carry into these.
    """
    bits = values.view(np.uint32)
    magnitude = bits & _MAGNITUDE
    if magnitude.max(initial=0) >= _OVERFLOW:
        return False
    power = magnitude & _EXPONENT
    np.maximum(power, _MIN_EXPONENT[: power.size], out=power)
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
    """Statistics of rounding to nearest even.

    Counts: `count` of all values, `nonfinite` of infinities and NaNs, `overflow` of finite values that round to
    infinity, `flushed` of nonzero values that round to zero, and `subnormal` of values that round to a subnormal.
    `absmax` and `absmin` are the largest and the smallest magnitude of the finite, nonzero values, or 0.0 if there are
    none.
    """

    count: int = 0
    nonfinite: int = 0
    absmax: float = 0.0
    absmin: float = 0.0
    overflow: int = 0
    flushed: int = 0
    subnormal: int = 0

    def merge(self, other: Fit) -> Self:
        counts = ("count", "nonfinite", "overflow", "flushed", "subnormal")
        return type(self)(
            absmax=max(self.absmax, other.absmax),
            absmin=min(filter(None, (self.absmin, other.absmin)), default=0.0),
            **{name: getattr(self, name) + getattr(other, name) for name in counts},
        )

    @classmethod
    def of(cls, chunks: Iterable[NDArray[Any]], to: DType, *, owned: bool = False) -> Fit:
        """Measure how one-dimensional floating-point arrays round to `to`. O(values). `owned`: overwrite the arrays."""
        fit = cls()
        for chunk in chunks:
            values = chunk
            if values.dtype not in (np.float32, np.float64):
                with np.errstate(invalid="ignore"):  # signalling NaN
                    values = values.astype(np.float32)  # exact, since narrower types are subsets
            fit = fit.merge(_fit_of_magnitudes(np.abs(values, out=values if owned else None), to))
        return fit


def _fit_of_magnitudes(magnitudes: NDArray[Any], to: DType) -> Fit:
    count, absmax = magnitudes.size, magnitudes.max(initial=0)
    if not np.isfinite(absmax):
        magnitudes = magnitudes[np.isfinite(magnitudes)]
        absmax = magnitudes.max(initial=0)
    nonfinite = count - magnitudes.size
    limit, half, normal = thresholds(to, magnitudes.dtype)
    absmin = magnitudes.min(initial=np.inf)
    if not absmin:
        magnitudes = magnitudes[magnitudes != 0]
        absmin = magnitudes.min(initial=np.inf)
    below_normal = int(np.count_nonzero(magnitudes < normal)) if absmin < normal else 0
    flushed = int(np.count_nonzero(magnitudes <= half)) if absmin <= half else 0
    return Fit(
        count=count,
        nonfinite=nonfinite,
        absmax=float(absmax),
        absmin=float(absmin) if magnitudes.size else 0.0,
        overflow=int(np.count_nonzero(magnitudes >= limit)) if absmax >= limit else 0,
        flushed=flushed,
        subnormal=below_normal - flushed,
    )


@cache
def thresholds(to: DType, dtype: np.dtype[Any]) -> tuple[Any, Any, Any]:
    """Return the thresholds for rounding to another type.

    These are the smallest magnitude that rounds to infinity, the largest that rounds to zero, and the one below which
    results are subnormal.
    """
    half = to.smallest_subnormal / 2
    top_spacing = to.max / (2 - to.eps) * to.eps  # between the two largest finite values
    with np.errstate(all="ignore"):
        limit, zero, normal = np.array([to.max + top_spacing / 2, half, to.tiny - half]).astype(dtype)
    return limit, zero, normal
