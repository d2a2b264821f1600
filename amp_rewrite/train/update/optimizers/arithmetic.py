"""The operations of optimizer formulas, on numpy arrays or, in `update.graph`, as nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Values = Mapping[str, Any]
"""Operands of an `Arithmetic`, by slot."""
Result = tuple[Any, Values]
"""The new value of a variable, and its new slots."""
number = np.float32
"""Convert a hyperparameter for a formula."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """Functions for formulas, besides + - * / between operands and with np.float32 numbers."""

    sqrt: Callable[[Any], Any]
    maximum: Callable[[Any, np.float32], Any]
    minimum: Callable[[Any, Any], Any]
    clamp: Callable[[Any, np.float32], Any]
    """Bound each element to ± a number."""
    sign: Callable[[Any], Any]
    ratio: Callable[[Any, Any], Any]
    """The quotient of two scalars, 1 unless both are above 0."""
    square_sum: Callable[[Any], Any]
    mean: Callable[[Any, int | None], Any]
    """The mean over one axis, which stays with size 1; over all of them for None, as a scalar."""
    sum: Callable[[list[Any]], Any]
    bias_correction: Callable[[float, Any], Any]
    """1 - beta**step, computed in float64 and rounded once; `step` counts from 1."""
    step_power: Callable[[float, Any], Any]
    """step**exponent, computed in float64 and rounded once."""
    at_first: Callable[[Any, np.float32, np.float32], Any]
    """The first number in step 1, else the second."""


NUMPY = Arithmetic(
    sqrt=np.sqrt,
    maximum=np.maximum,
    minimum=np.minimum,
    clamp=lambda x, bound: np.clip(x, -bound, bound),
    sign=np.sign,
    ratio=lambda a, b: np.where((a > 0) & (b > 0), a / b, np.float32(1)),
    square_sum=lambda x: np.asarray(np.sum(np.square(x), dtype=np.float32)),
    mean=lambda x, axis: np.asarray(np.mean(x, axis=axis, keepdims=axis is not None, dtype=np.float32)),
    sum=lambda xs: np.asarray(np.sum(np.stack(xs), dtype=np.float32)),
    bias_correction=lambda beta, step: np.asarray(1.0 - np.float64(beta) ** step.astype(np.float64), np.float32),
    step_power=lambda exponent, step: np.asarray(step.astype(np.float64) ** exponent, np.float32),
    at_first=lambda step, first, later: np.where(step == 1, first, later),
)
"""Arithmetic on numpy arrays."""
