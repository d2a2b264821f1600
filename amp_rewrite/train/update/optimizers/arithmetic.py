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
    clamp: Callable[[Any, np.float32], Any]
    """Bound each element to ± a number."""
    square_sum: Callable[[Any], Any]
    sum: Callable[[list[Any]], Any]
    bias_correction: Callable[[float, Any], Any]
    """1 - beta**step, computed in float64 and rounded once; `step` counts from 1."""


NUMPY = Arithmetic(
    sqrt=np.sqrt,
    maximum=np.maximum,
    clamp=lambda x, bound: np.clip(x, -bound, bound),
    square_sum=lambda x: np.asarray(np.sum(np.square(x), dtype=np.float32)),
    sum=lambda xs: np.asarray(np.sum(np.stack(xs), dtype=np.float32)),
    bias_correction=lambda beta, step: np.asarray(1.0 - np.float64(beta) ** step.astype(np.float64), np.float32),
)
"""Arithmetic on numpy arrays."""
