"""Rounding errors before and after a shift: whether float16 still has the digits.

Powers of two change no digit of a normal number. What a shift costs are the numbers that become subnormal or zero.
"""

from __future__ import annotations

import math

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array
from amp_rewrite.files.rounding import Fit

MOST_ADDED_ERROR = 1.1
"""Largest ratio of the rounding errors after and before a shift."""
_SAMPLE = 1 << 18
"""Elements of a constant whose rounding is compared: more do not change the root of their mean square."""


def scaled(array: Array, exponent: int) -> Array | None:
    """Return an array times 2⁻ᵉ; None if that is not exact in its type."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        shifted = np.ldexp(array, -exponent).astype(array.dtype)
        back = np.ldexp(shifted, exponent).astype(array.dtype)
    exact = np.array_equal(back, array, equal_nan=True) and not (np.isinf(shifted) & ~np.isinf(array)).any()
    return shifted if exact else None


def constant_keeps(array: Array, exponent: int, to: DType, *, flush: bool) -> bool:
    """True if a constant times 2⁻ᵉ rounds to the low type with at most 10 % more error, and does not overflow."""
    flat = array.reshape(-1)
    if flat.size > _SAMPLE:
        step = -(-flat.size // _SAMPLE)
        flat = np.concatenate([flat[::step], flat[[int(np.abs(flat).argmax())]]])
    exact = flat.astype(np.float64)
    factor = math.ldexp(1.0, -exponent)
    largest = float(np.abs(exact).max(initial=0.0))
    if largest * factor > to.max >= largest:
        return False
    return _error(exact * factor, to, flush) / factor <= MOST_ADDED_ERROR * _error(exact, to, flush=False)


def _error(exact: Array, to: DType, flush: bool) -> float:
    """Return the root of the summed squares of rounding errors."""
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = exact.astype(np.float32).astype(to.numpy).astype(np.float64)
    if flush:
        rounded = np.where(np.abs(rounded) < to.tiny, 0.0, rounded)
    return float(np.linalg.norm(rounded - exact))


def value_keeps(fit: Fit, exponent: int, to: DType, *, flush: bool) -> bool:
    """True if a measured value times 2⁻ᵉ still rounds with at most 10 % more error, as far as its counts tell.

    The counts give one point of the distribution: the share of elements below the smallest normal number. Sizes are
    taken to be spread evenly near zero, as those of most tensors are: the share below a bound grows with the bound.
    """
    if exponent <= 0 or not fit.count or not fit.absmax:
        return True
    if fit.absmin and math.ldexp(fit.absmin, -exponent) >= to.tiny:
        return True
    share = max(fit.subnormal + fit.flushed, 1) / fit.count
    median = min(to.tiny / (2 * share), fit.absmax)
    size = max(median**2 / 2, fit.absmax**2 / fit.count)
    usual = math.sqrt(size) * to.eps / math.sqrt(12) / 2
    below = min(1.0, math.ldexp(share, exponent))
    step = to.tiny / math.sqrt(3) if flush else to.smallest_subnormal / math.sqrt(12)
    added = math.ldexp(step * math.sqrt(below), exponent)
    return math.hypot(usual, added) <= MOST_ADDED_ERROR * usual
