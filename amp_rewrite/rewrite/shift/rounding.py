"""Rounding errors before and after a shift: whether float16 still has the digits.

Powers of two change no digit of a normal number. A shift costs digits only of numbers that become subnormal or zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array
from amp_rewrite.files.fit import Fit

MOST_ADDED_ERROR = 1.1
"""Largest ratio of the rounding errors after and before a shift."""
_SAMPLE = 1 << 18
"""Elements of a constant whose rounding is compared: more do not change the root of their mean square."""


def is_exact(fit: Fit, chunks: Iterable[Array], exponent: int) -> bool:
    """True if float32 numbers times 2⁻ᵉ are float32 numbers. The chunks are read only if some may be subnormal."""
    if math.ldexp(fit.absmax, -exponent) > DType.FLOAT.max:
        return False
    if not fit.absmin or min(fit.absmin, math.ldexp(fit.absmin, -exponent)) >= DType.FLOAT.tiny:
        return True
    return all(_is_exact(chunk, exponent) for chunk in chunks)


def _is_exact(values: Array, exponent: int) -> bool:
    with np.errstate(all="ignore"):
        shifted = np.ldexp(values.astype(np.float32), -exponent)
        return np.array_equal(np.ldexp(shifted, exponent), values, equal_nan=True)


def sampled(chunks: Iterable[Array], count: int) -> Array:
    """Return evenly spread elements of a constant of `count` elements, and the largest of all."""
    step = max(1, -(-count // _SAMPLE))
    parts, at, largest = list[Array](), 0, np.zeros(1, np.float32)
    for chunk in chunks:
        parts.append(chunk[(-at) % step :: step].astype(np.float32))
        at += chunk.size
        if step > 1 and chunk.size:
            top = max(float(chunk.max()), -float(chunk.min()))
            largest = np.maximum(largest, np.float32(top))
    return np.concatenate([*parts, largest]) if step > 1 else np.concatenate([*parts, largest[:0]])


def constant_keeps(array: Array, exponent: int, to: DType, *, flush: bool) -> bool:
    """True if a constant times 2⁻ᵉ rounds to the low type with at most 10 % more error, and does not overflow."""
    exact = array.reshape(-1).astype(np.float64)
    factor = math.ldexp(1.0, -exponent)
    largest = float(np.abs(exact).max(initial=0.0))
    if largest * factor > to.max >= largest:
        return False
    return _error(exact * factor, to, flush) / factor <= MOST_ADDED_ERROR * _error(exact, to, flush=False)


def _error(exact: Array, to: DType, flush: bool) -> float:
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
