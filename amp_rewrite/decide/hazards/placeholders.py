"""Placeholders: weights that are one number throughout, as in models without their trained weights.

A layer of weights c sums K equal multiples of its input, so its results are up to |c|·K times as large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import computes_float32, first_input_of, origin
from amp_rewrite.ir.op_classes import MOVES
from amp_rewrite.ir.schema import attribute, float_attribute, int_attribute
from amp_rewrite.ir.shapes.onnx_shapes import Shape, Shapes, elements, shapes_of
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
    layers = {op.id: _placeholder(view, to, op, shapes) for op in view.ops if op.kind in _TERMS}
    return {op_id: layer for op_id, layer in layers.items() if layer is not None}


def _placeholder(view: View, to: DType, op: Op, shapes: Callable[[], Shapes]) -> Placeholder | None:
    for slot, terms_of in _TERMS[op.kind]:
        weight = op.inputs[slot]
        number = number_throughout(view, weight, to) if weight is not None and computes_float32(view, op) else None
        if weight is None or number is None:
            continue
        shape = shapes().get((view.values[weight].scope, view.value_name(weight)))
        terms = terms_of(op, shape) if shape else None
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


# -- terms of each result of a layer, by the shape of its weights; None if unknown ------------------------------------

_Terms = Callable[[Op, Shape], int | None]


def _of_transposed_conv(op: Op, shape: Shape) -> int | None:
    """Count every stride-th tap of the kernel, for all channels of a group."""
    strides = attribute(op.node, "strides")
    steps = list(strides.ints) if strides is not None else [1] * (len(shape) - 2)
    taps = [None if d is None else math.ceil(d / max(step, 1)) for d, step in zip(shape[2:], steps, strict=False)]
    terms = elements((shape[0], *taps))
    return None if terms is None else terms // max(int_attribute(op.node, "group", 1), 1)


def _axis(at: int, flag: str = "") -> _Terms:
    """Count the length of an axis; of the other of two axes if the flag is set."""

    def terms(op: Op, shape: Shape) -> int | None:
        axis = 1 - at if flag and int_attribute(op.node, flag, 0) else at
        return shape[max(axis, -len(shape))] if axis < len(shape) else None

    return terms


_TERMS: Mapping[str, tuple[tuple[int, _Terms], ...]] = {
    "Conv": ((1, lambda op, shape: elements(shape[1:])),),
    "ConvTranspose": ((1, _of_transposed_conv),),
    "Gemm": ((1, _axis(0, "transB")), (0, _axis(1, "transA"))),
    "MatMul": ((1, _axis(-2)), (0, _axis(-1))),
}
"""The inputs of a layer that may be its weights, each with its count of terms."""
