"""Constants and fills that are one number throughout, as the weights of models without their trained weights."""

from __future__ import annotations

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.attributes import attribute
from amp_rewrite.ir.dataflow import first_input_of, origin
from amp_rewrite.ir.op_classes import MOVES
from amp_rewrite.ir.view import ValueId, View

_MOVED = MOVES - {"Tile"}
_FAR = 32  # of these in a row


def number_throughout(view: View, value: ValueId | None) -> float | None:
    """Return the finite number that fills a constant or the result of a ConstantOfShape; None for other values.

    A constant is read only up to the first number that differs.
    """
    if value is None:
        return None
    value = origin(view, value, first_input_of(_MOVED), most=_FAR)
    source = view.producer(value)
    if view.dtype(value) is not DType.FLOAT:
        return None
    if source is not None and source.kind == "ConstantOfShape":
        fill = attribute(source.node, "value")
        numbers = view.model.array(fill.t) if fill is not None else np.zeros(1)
        return float(numbers.item()) if numbers.size == 1 and np.isfinite(numbers).all() else None
    tensor = view.constant(value)
    if tensor is None or not tensor.dims:
        return None
    first = None
    for chunk in view.model.chunks(tensor, 1 << 14):
        first = chunk[0] if first is None and chunk.size else first
        if first is None or not np.isfinite(first) or chunk[-1] != first or not (chunk == first).all():
            return None
    return float(first) if first is not None else None
