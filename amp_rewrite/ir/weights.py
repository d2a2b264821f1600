"""What rounding to a low type does to stored weights."""

from __future__ import annotations

import math

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.view import ValueId, View

OUTWEIGHS = 2.0**11
"""How many times the norm of the weights a bias may have before a low type loses the product beside it."""
_LOSS = 2.0**-8
"""Largest part of a constant's norm that may be lost."""


def outweighs(view: View, bias: ValueId | None, weight: ValueId | None, to: DType, *, by: float = OUTWEIGHS) -> bool:
    """True if the norm of a constant bias is more than `by` times that of the constant weights."""
    if bias is None or weight is None or view.constant(bias) is None or view.constant(weight) is None:
        return False
    added, factors = view.fit(bias, to), view.fit(weight, to)
    if added.nonfinite or added.absmax * math.sqrt(added.count) <= by * factors.absmax:
        return False
    return _norm(view, bias) > by * _norm(view, weight)


def loses_digits(view: View, value: ValueId, to: DType) -> bool:
    """True if rounding a constant to the type changes it by more than 2⁻⁸ of its norm: most of it is subnormal."""
    fit, half = view.fit(value, to), to.smallest_subnormal / 2
    if fit.nonfinite or fit.overflow or not (fit.flushed or fit.subnormal):
        return False
    if fit.absmax * _LOSS > half * math.sqrt(fit.count):  # a subnormal is off by half its spacing at most
        return False
    return _norm(view, value, to) > _LOSS * _norm(view, value)


def _norm(view: View, value: ValueId, rounded_to: DType | None = None) -> float:
    """Return the norm of a constant, or of what rounding changes in it. Read in parts."""
    tensor, squares = view.constant(value), 0.0
    for chunk in view.model.chunks(tensor) if tensor is not None else ():
        exact = chunk.astype(np.float64)
        numbers = exact if rounded_to is None else chunk.astype(rounded_to.numpy).astype(np.float64) - exact
        squares += float(np.square(numbers).sum())
    return math.sqrt(squares)
