"""Grids: constants that count in equal steps."""

from __future__ import annotations

import math

import numpy as np
from onnx import TensorProto

from amp_rewrite.files.casting import Array
from amp_rewrite.ir.view import ValueId, View

LEAST = 16
"""Least number of different positions in a grid: every type distinguishes fewer."""
MOST = 1 << 22
"""Largest number of elements of a grid: a larger constant is a weight, and is not read."""
_LOOK = 64
"""Leading elements of a constant that are checked first: most weights fail there."""


def is_grid(view: View, value: ValueId) -> bool:
    """True for a constant that counts: its 16 or more values fill most of a row with equal steps."""
    tensor = view.constant(value)
    if tensor is None or not LEAST <= math.prod(tensor.dims) <= MOST or tensor.data_type == TensorProto.STRING:
        return False
    if not even(next(view.model.chunks(tensor, _LOOK)), least=1):
        return False
    numbers = view.model.array(tensor).ravel()
    changes = np.flatnonzero(numbers[1:] != numbers[:-1])[:_LOOK]  # a table of sines begins with zeros
    return changes.size >= LEAST - 1 and even(numbers[changes], least=1) and even(numbers, least=LEAST)


def even(values: Array, *, least: int) -> bool:
    """True if at least so many different values fill half or more of a row with equal steps."""
    known = np.sort(values.astype(np.float64))
    changes = np.append(True, known[1:] != known[:-1])  # np.unique takes 20 ms to import modules that it does not use
    known = known[changes[: known.size]]
    if known.size < max(least, 2) or not np.isfinite(known).all():
        return bool(known.size == least)
    apart = np.diff(known)
    step = (known[-1] - known[0]) / np.round(apart / apart.min()).sum()  # float32 rounds each difference
    steps = (known - known[0]) / step
    return bool(steps[-1] < 2 * known.size and np.abs(steps - np.round(steps)).max() < 1e-2)
