"""Fills whose number does not matter, made small enough for a low type.

A quarter of the largest number is far below every score, and finite after a division by a temperature or a product.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from onnx import TensorProto
from onnx.numpy_helper import from_array

from amp_rewrite.decide import reasons
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.files.casting import Array
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.attributes import attribute
from amp_rewrite.ir.builder import restate
from amp_rewrite.ir.names import unused
from amp_rewrite.ir.patterns.fill_reach import bounded, far_fills, reach_of
from amp_rewrite.ir.versions import FIRST_IR_WITH_FREE_INITIALIZERS
from amp_rewrite.ir.view import OpId, Use, View
from amp_rewrite.rewrite.replacement import Context, Replacement


def bound_fills(view: View, context: Context) -> Iterator[Replacement]:
    """Bound each fill that leaves the type and ends in selections, softmaxes, indices or near comparisons alone.

    O(fills * values reached). A model that lists its weights as inputs (IR version 3) is left alone.
    """
    if view.model.proto.ir_version < FIRST_IR_WITH_FREE_INITIALIZERS:
        return
    slots: dict[OpId, dict[int, TensorProto]] = {}
    words: dict[OpId, Finding] = {}
    for value, level in far_fills(view, context.to).items():
        least = bounded(level, context.to)
        name = view.value_name(value)
        note = f"the fill value {level:g} becomes {np.copysign(least, level):g} · {reasons.HARMLESS}: it only selects"
        finding = Finding("saturated", name, note)
        made_by = view.producer(value, "ConstantOfShape")
        stated = attribute(made_by.node, "value") if made_by is not None else None
        if made_by is not None and stated is not None and _harmless(view, context.to, view.uses[value], level):
            node = clone(made_by.node)
            restate(node, "value", from_array(_within(view.model.array(stated.t), least)))
            yield Replacement("saturated", (made_by.id,), made_by.id, node, findings=(finding,))
        constant = view.array(value)
        for use in view.uses[value]:
            if constant is not None and _harmless(view, context.to, (use,), level):
                tensor = from_array(_within(constant, least), unused(f"{name}_bounded", view.names))
                slots.setdefault(use.op, {})[use.slot] = tensor
                words[use.op] = finding
    for op_id, tensors in slots.items():
        node = clone(view.ops[op_id].node)
        for slot, tensor in tensors.items():
            node.input[slot] = tensor.name
        yield Replacement("saturated", (op_id,), op_id, node, tuple(tensors.values()), findings=(words[op_id],))


def _harmless(view: View, to: DType, uses: tuple[Use, ...], level: float) -> bool:
    """True if a fill leaves the type on its way from these uses, and its number matters at none."""
    reach = reach_of(view, to, uses, level)
    fits = bounded(level, to) * reach.most <= to.max < reach.farthest
    return fits and reach.ends and not reach.itself


def _within(numbers: Array, least: float) -> Array:
    return np.where(np.isfinite(numbers), np.clip(numbers, -least, least), numbers).astype(numbers.dtype)
