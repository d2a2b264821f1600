"""Casts between floating types: rounded once, and finite values stay finite."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from amp_rewrite.dtypes import DType
from amp_rewrite.files.float16 import BLOCK, to_float16

Array = NDArray[Any]

_LARGE = 1 << 12  # elements from which it pays to convert in whole arrays
_NORMAL = 126  # powers of two up to this one are normal numbers of float32
# The bit pattern of infinity; the one below it is the largest finite value.
_INFINITY: dict[DType, tuple[type[np.unsignedinteger[Any]], int]] = {
    DType.FLOAT16: (np.uint16, 0x7C00),
    DType.BFLOAT16: (np.uint16, 0x7F80),
    DType.FLOAT: (np.uint32, 0x7F800000),
}


def cast(values: Array, to: DType, memory: Array | None = None) -> Array:
    """Cast floating values to another floating type, rounding once, to nearest even.

    Finite values out of range become the largest value of the type, with their sign; infinity and NaN stay.
    `memory`: bytes that may hold the result.
    """
    if to is DType.FLOAT16 and values.dtype == np.float32 and values.size >= _LARGE:
        return _cast_in_blocks(values, memory)
    return _cast_whole(values, to)


def scaled(values: Array, exponent: int) -> Array:
    """Return floating values times 2⁻ᵉ, in float32 or wider; the array itself may be overwritten.

    Exact but for subnormal numbers and those beyond the type.
    """
    if values.dtype.itemsize < 4:
        values = values.astype(np.float32)
    with np.errstate(all="ignore"):
        if abs(exponent) <= _NORMAL:
            np.multiply(values, values.dtype.type(2.0**-exponent), out=values)
        else:
            np.ldexp(values, -exponent, out=values)
    return values


def _cast_in_blocks(values: Array, memory: Array | None) -> Array:
    flat = np.ascontiguousarray(values).reshape(-1)
    low: Array = np.empty(flat.size, np.float16) if memory is None else memory[: 2 * flat.size].view(np.float16)
    for at in range(0, flat.size, BLOCK):
        block, rounded = flat[at : at + BLOCK], low[at : at + BLOCK]
        if not to_float16(block, rounded):
            rounded[:] = _cast_whole(block, DType.FLOAT16)
    return low.reshape(values.shape)


def _cast_whole(values: Array, to: DType) -> Array:
    if values.dtype == np.float64 and to is DType.BFLOAT16:
        values = _rounded_to_odd(values)
    with np.errstate(all="ignore"):
        low: Array = values.astype(to.numpy)
    if to in _INFINITY:
        unsigned, infinity = _INFINITY[to]
        bits = low.view(unsigned)
        over = bits & (np.iinfo(unsigned).max >> 1) == infinity
        if over.any():
            bits[over & np.isfinite(values)] -= 1
    return low


def _rounded_to_odd(values: Array) -> Array:
    """Cast float64 to float32 by rounding to odd, so that a second rounding to at most 22 bits equals a single one.

    Boldo and Melquiond, Emulation of FMA and correctly rounded sums: proved algorithms using rounding to
    odd, IEEE Transactions on Computers 57(4), 2008.
    """
    with np.errstate(all="ignore"):
        near = values.astype(np.float32)
    back = near.astype(np.float64)
    inexact = np.isfinite(values) & (back != values)
    bits = near.view(np.uint32)
    bits[inexact & (np.abs(back) > np.abs(values))] -= 1
    bits[inexact] |= 1
    return near
