"""Placeholders: weights that are one number throughout, as they stand in models whose trained weights were left out.

A layer of such weights c adds up K equal multiples of what it reads: what it gives is up to |c|·K times as large.
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
    """A layer of placeholders: by how much it multiplies which of its inputs."""

    gain: float
    reads: int


def placeholders(view: View, to: DType) -> dict[OpId, Placeholder]:
    """The float32 layers whose weights are one number throughout, and of known shape.

    O(ops). Constants are read only where their magnitudes, known from `View.fit`, are all equal.
    """
    shapes = cache(lambda: shapes_of(view))
    found = {op.id: _placeholder(view, to, op, shapes) for op in view.ops if op.kind in _TERMS}
    return {op_id: layer for op_id, layer in found.items() if layer is not None}


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
    """The finite number that every element of a constant is, or of a ConstantOfShape; None where they differ."""
    value = origin(view, value, first_input_of(_MOVED), most=_FAR)
    made_by = view.producer(value)
    if view.dtype(value) is not DType.FLOAT:
        return None
    if made_by is not None and made_by.kind == "ConstantOfShape":
        fill = attribute(made_by.node, "value")
        held = view.model.array(fill.t) if fill is not None else np.zeros(1)
        return float(held.item()) if held.size == 1 and np.isfinite(held).all() else None
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


# -- how many products each result is the sum of, by the shape of the weights; None where that is not known --------


def _of_conv(op: Op, shape: Shape) -> int | None:
    return elements(shape[1:])


def _of_transposed_conv(op: Op, shape: Shape) -> int | None:
    """A result is reached by every stride-th tap of the kernel, from all channels of its group."""
    strides = attribute(op.node, "strides")
    steps = list(strides.ints) if strides is not None else [1] * (len(shape) - 2)
    taps = [None if d is None else math.ceil(d / max(step, 1)) for d, step in zip(shape[2:], steps, strict=False)]
    terms = elements((shape[0], *taps))
    return None if terms is None else terms // max(int_attribute(op.node, "group", 1), 1)


def _axis(at: int, flag: str = "") -> Callable[[Op, Shape], int | None]:
    """The length of an axis, of the other of two where the flag says that they change places."""

    def terms(op: Op, shape: Shape) -> int | None:
        axis = 1 - at if flag and int_attribute(op.node, flag, 0) else at
        return shape[max(axis, -len(shape))] if axis < len(shape) else None

    return terms


_TERMS: Mapping[str, tuple[tuple[int, Callable[[Op, Shape], int | None]], ...]] = {
    "Conv": ((1, _of_conv),),
    "ConvTranspose": ((1, _of_transposed_conv),),
    "Gemm": ((1, _axis(0, "transB")), (0, _axis(1, "transA"))),
    "MatMul": ((1, _axis(-2)), (0, _axis(-1))),
}
"""By layer: the inputs that may be its weights."""
