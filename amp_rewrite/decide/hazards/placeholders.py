"""Placeholders: weights that are one number throughout, as in models without their trained weights.

A layer of weights c sums K equal multiples of its input, so its results are up to |c|·K times as large.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from amp_rewrite.decide.hazards.steps import summed_length
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import computes_float32, first_input_of, origin
from amp_rewrite.ir.op_classes import LAYERS, MOVES
from amp_rewrite.ir.schema import attribute, float_attribute, int_attribute
from amp_rewrite.ir.shapes.onnx_shapes import Shape, Shapes, elements, shape_at, shapes_of
from amp_rewrite.ir.view import Op, OpId, ValueId, View

_MOVED = MOVES - {"Tile"}
_FAR = 32  # of these in a row


class Placeholder(NamedTuple):
    """A layer of placeholders: the gain on its input, and the slot of that input."""

    gain: float
    reads: int


def placeholders(view: View, to: DType) -> dict[OpId, Placeholder]:
    """Return the float32 layers whose weights are one number throughout and have a known shape.

    O(ops). Constants are read only if their magnitudes, known from `View.fit`, are all equal.
    """
    shapes = cache(lambda: shapes_of(view))
    layers = (op for op in view.ops if op.kind in LAYERS and computes_float32(view, op))
    return {op.id: layer for op in layers if (layer := _placeholder(view, to, op, shapes)) is not None}


def _placeholder(view: View, to: DType, op: Op, shapes: Callable[[], Shapes]) -> Placeholder | None:
    for slot in (1,) if op.kind.startswith("Conv") else (1, 0):
        weight = op.inputs[slot]
        number = number_throughout(view, weight, to) if weight is not None else None
        if weight is None or number is None:
            continue
        shape = shape_at(shapes(), view, weight)
        terms = _terms(op, slot, shape) if shape else None
        if terms is not None:
            return Placeholder(abs(number * terms * float_attribute(op.node, "alpha", 1.0)), 1 - slot)
    return None


def number_throughout(view: View, value: ValueId, to: DType) -> float | None:
    """Return the finite number that fills a constant or the result of a ConstantOfShape; None for other values."""
    value = origin(view, value, first_input_of(_MOVED), most=_FAR)
    source = view.producer(value)
    if view.dtype(value) is not DType.FLOAT:
        return None
    if source is not None and source.kind == "ConstantOfShape":
        fill = attribute(source.node, "value")
        numbers = view.model.array(fill.t) if fill is not None else np.zeros(1)
        return float(numbers.item()) if numbers.size == 1 and np.isfinite(numbers).all() else None
    tensor, fit = view.constant(value), view.fit(value, to)
    if tensor is None or not fit.count or fit.nonfinite or fit.absmin != fit.absmax:
        return None
    if not fit.absmax:
        return 0.0
    first = None
    for chunk in view.model.chunks(tensor):
        first = chunk[0] if first is None else first
        if not (chunk == first).all():
            return None
    return float(first) if first is not None else None


def _terms(op: Op, slot: int, shape: Shape) -> int | None:
    """Return the number of terms of each result of a layer, by the shape of its weights; None if it is unknown."""
    if op.kind == "Conv":
        return elements(shape[1:])
    if op.kind != "ConvTranspose":
        return summed_length(op, slot, shape)
    strides = attribute(op.node, "strides")  # every stride-th tap reaches a result, for all channels of its group
    steps = list(strides.ints) if strides is not None else [1] * (len(shape) - 2)
    taps = [None if d is None else math.ceil(d / max(step, 1)) for d, step in zip(shape[2:], steps, strict=False)]
    terms = elements((shape[0], *taps))
    return None if terms is None else terms // max(int_attribute(op.node, "group", 1), 1)
