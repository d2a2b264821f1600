"""Constants beyond the low type's range: fills that select, fills that are added, and real overflow.

A constant with one extreme value is a fill, such as the −3.4e38 of an attention mask.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from onnx import AttributeProto, TensorProto
from onnx.numpy_helper import from_array

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.constants import constants, reads_low, underflow
from amp_rewrite.decide.hazards.rule import rule
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.ir.dataflow import Flow, computes_float32, float32, makers
from amp_rewrite.ir.op_classes import AFFINE, ALL, COPIES, FILLS, SELECTIONS, SOFTMAXES, SUMS
from amp_rewrite.ir.schema import attribute
from amp_rewrite.ir.view import Op, OpId, Use, ValueId, View

_PURE_COPIES = {**COPIES, **dict.fromkeys(FILLS, (0,))}
_CARRIES = {**COPIES, **SELECTIONS, **dict.fromkeys(AFFINE, ALL)}
_SOFTMAX = SOFTMAXES | {"Exp"}  # written out
_SELECTING = {**SELECTIONS, "Clip": (1, 2), **dict.fromkeys(FILLS, (2,))}
_BOUNDING = SELECTIONS.keys() - {"Where"}
_ATTENTION_MASKS = {
    "Attention": (3,),
    "com.microsoft::Attention": (5,),
    "com.microsoft::DecoderMaskedMultiHeadAttention": (4,),
    "com.microsoft::GroupQueryAttention": (10,),
    "com.microsoft::MultiHeadAttention": (5,),
}
# Beyond this no quantity of a network lies: what does is there to win or lose every comparison.
_SENTINEL = 1e30


@dataclass(frozen=True, slots=True)
class Fill:
    """A constant with values at or beyond the low type's last finite one. `level`: the one such value, or None
    where there are several; `overflows`: whether it rounds to infinity."""

    level: float | None
    overflows: bool
    absmax: float


def fills(view: View, to: DType, among: Container[ValueId] | None = None) -> dict[ValueId, Fill]:
    """The extreme constants of a model, results of ConstantOfShape and of LabelEncoder among them, whose numbers stand
    in attributes. Reads each constant once; those that are not `among` the given values not at all."""
    found = {}
    for value in constants(view):
        if among is not None and value not in among:
            continue
        fit = view.fit(value, to)
        if fit.absmax >= to.max:
            tensor = view.constant(value)
            assert tensor is not None
            values = view.model.array(tensor)
            beyond = values[(abs(values) >= to.max) & (abs(values) < float("inf"))]
            level = float(beyond[0]) if beyond.size and (beyond == beyond[0]).all() else None
            found[value] = Fill(level, fit.overflow > 0, fit.absmax)
    for op in view.ops:
        result = op.outputs[0] if op.kind in _STATES else None
        if result is None or view.dtype(result) is not DType.FLOAT or (among is not None and result not in among):
            continue
        for stated in filter(None, (attribute(op.node, name) for name in _STATES[op.kind])):
            fit = view.model.fit(_tensor(stated), to)
            if fit.absmax >= max(to.max, found[result].absmax if result in found else 0):
                level = float(view.model.array(stated.t).item()) if op.kind == "ConstantOfShape" else None
                found[result] = Fill(level, fit.overflow > 0, fit.absmax)
    return found


_STATES = {
    "ConstantOfShape": ("value",),
    "ai.onnx.ml::LabelEncoder": ("values_floats", "default_float", "values_tensor", "default_tensor"),
}
"""Ops whose results are numbers that their attributes state."""


def _tensor(stated: AttributeProto) -> TensorProto:
    """The numbers of an attribute as a tensor."""
    if stated.type == AttributeProto.TENSOR:
        return stated.t
    return from_array(np.array(stated.floats or [stated.f], np.float32))


@rule(reasons.ADDITIVE_MASK, "A mask that is added to scores stays finite up to the softmax.")
def additive_mask(view: View, to: DType) -> Iterator[Pin]:
    """Pin the ops from a fill through the sums that it enters to the softmax, that one included. O(nodes + uses).

    What it protects: Masks with a fill such as −3.4e38 that are added to scores. Where the mask is a selection, it is
        rewritten as Where beforehand and needs no pin.
    Why: Saturated at −65504 the fill leaves the range again when it is added, to −inf, and a softmax over a row that is
        masked throughout gives NaN.
    Example: scores + (1 − mask) · −3.4e38 in an encoder exported from transformers.
    How to override: A fill of −1e4 in the model.
    Source: masked_rows among the hard models of this project.
    """
    for op_id, (softmax, note) in sorted(_additive(view, fills(view, to)).items()):
        yield Pin(op_id, reasons.ADDITIVE_MASK, softmax, note)


@rule(reasons.CONSTANT_RANGE, "An op that computes with a constant runs in a low type only if the constant fits.")
def constant_range(view: View, to: DType) -> Iterator[Pin]:
    """Pin readers of constants that overflow or vanish, with the copies between. O(nodes + uses).

    What it protects: Arithmetic with constants beyond the type's range. A fill that only selects (a branch of Where, a
        bound of Clip, Max or Min, an attention mask) saturates instead; infinities are the same in every type.
    Why: Beyond 65504 float16 has only infinity. Below 6e-8 it has only zero, which erases a product and breaks a
        quotient.
    Example: x · 1e6, x / 1e-9, a scale of 1e-6 in DequantizeLinear.
    Source: IEEE 754 binary16.
    """
    yield from overflow(view, to)
    yield from underflow(view, to)


def overflow(view: View, to: DType) -> Iterator[Pin]:
    """Pin the ops that would compute with an overflowing constant, and the copies between it and them."""
    extreme = fills(view, to)
    found = {value: fill for value, fill in extreme.items() if fill.overflows}
    additive = _additive(view, extreme) if found else {}
    for value, fill in found.items():
        readers, between = _unfit_readers(view, to, value, fill)
        note = f"constant {view.value_name(value)!r} goes to {fill.absmax:g}, beyond {to.max:g}"
        made_by = view.values[value].producer
        for op_id in sorted({*readers, *between} - additive.keys()):
            yield Pin(op_id, reasons.CONSTANT_RANGE, made_by, note)


@rule("saturated", "A fill that only selects becomes the largest finite number, not infinity.")
def saturated(view: View, to: DType) -> tuple[frozenset[ValueId], tuple[Finding, ...]]:
    """Return the values to clamp where they become low, and one finding for each that is a constant.

    What it protects: Fills that only select (of a ConstantOfShape, its result), and the values that a fill reaches
        through copies, selections and products.
    Why: In the low type the fill would be −inf, and 0 · −inf is NaN. The last finite number wins or loses every
        comparison just as well.
    Example: Where(mask, scores, −3.4e38).
    How to override: A smaller fill in the model.
    Source: masked_rows among the hard models of this project.
    """
    found = {value: fill for value, fill in fills(view, to).items() if fill.overflows}
    pinned = _additive(view, found).keys()
    findings = []
    for value, fill in found.items():
        uses = [use for use in view.uses[value] if use.op not in pinned]
        if uses and not _unfit_readers(view, to, value, fill)[0] - pinned:
            level = fill.absmax if fill.level is None else fill.level
            note = f"fill value {level:g} becomes {to.max if level > 0 else -to.max:g}"
            findings.append(Finding("saturated", view.value_name(value), note))
    selected = Flow.of(view, {**COPIES, **SELECTIONS, "Mul": ALL, "Neg": (0,)})
    filled = {value: value for value, fill in found.items() if fill.level is not None}
    reached = selected.forth(filled, lambda v: view.dtype(v) is DType.FLOAT and not _bounds_only(view, v, filled))
    return frozenset({*reached, *found}), tuple(findings)


def _additive(view: View, found: Mapping[ValueId, Fill]) -> dict[OpId, tuple[OpId, str]]:
    """The ops of additive masks, each with the softmax behind it and one line for people."""
    sources = {value: value for value, fill in found.items() if fill.level is not None}
    if not sources:
        return {}
    softmaxes = {
        op.inputs[0]: op.id
        for op in reversed(view.ops)
        if op.kind in _SOFTMAX and op.inputs[0] is not None and view.dtype(op.inputs[0]) is DType.FLOAT
    }
    ahead = Flow.of(view).back(softmaxes, float32(view))
    carries = Flow.of(view, _CARRIES)
    masked = carries.forth(sources, lambda v: view.dtype(v) is DType.FLOAT and not _bounds_only(view, v, sources))
    sites = {op.id: read for op in view.ops if (read := _added(view, op, masked)) and op.outputs[0] in ahead}
    upstream = carries.back(
        {value: op_id for op_id, read in sites.items() for value in read}, lambda value: value in masked
    )
    summed = {result: op_id for op_id in sites if (result := view.ops[op_id].outputs[0]) is not None}
    downstream = Flow.of(view).forth(summed, ahead.__contains__)
    pins: dict[OpId, tuple[OpId, str]] = {}
    for op_id in makers(view, {**upstream, **downstream}):
        op = view.ops[op_id]
        reached = next((v for v in op.outputs if v in ahead), None)
        if computes_float32(view, op) and op.op_type != "Constant" and reached is not None:
            pins[op_id] = (ahead[reached], f"carries an additive mask to {_name(view, ahead[reached])}")
    for value in downstream:
        for reader in view.readers(value):
            if reader.kind in _SOFTMAX:
                pins[reader.id] = (reader.id, "its scores carry an additive mask")
    return pins


def _name(view: View, op_id: OpId) -> str:
    return f"{view.ops[op_id].name!r} ({view.ops[op_id].kind})"


def _bounds_only(view: View, value: ValueId, sources: Mapping[ValueId, ValueId]) -> bool:
    """Whether a value is the result of a clamp whose fill is the bound: that carries no mask on."""
    op = view.producer(value)
    return op is not None and op.kind in _BOUNDING and any(v in sources for v in op.inputs if v is not None)


def _added(view: View, op: Op, masked: Mapping[ValueId, ValueId]) -> list[ValueId]:
    """The masked operands of a sum. The maximum that a decomposed softmax subtracts is no operand of this kind."""
    if op.kind not in SUMS:
        return []
    subtracted = view.producer(op.inputs[1]) if op.kind == "Sub" else None
    if subtracted is not None and subtracted.kind == "ReduceMax" and subtracted.inputs[0] == op.inputs[0]:
        return []
    return [value for value in op.inputs if value is not None and value in masked]


def _unfit_readers(view: View, to: DType, value: ValueId, fill: Fill) -> tuple[set[OpId], set[OpId]]:
    """The ops that would compute with an overflowed constant, and the copies on the way to them."""
    copies = Flow.of(view, _PURE_COPIES)
    reached = copies.forth({value: value}, float32(view))
    readers = {
        use.op
        for copy in reached
        for use in view.uses[copy]
        if use.slot not in copies.through(view.ops[use.op])
        and reads_low(view, use, to)
        and not _selects(view.ops[use.op], use, fill)
    }
    if not readers:
        return set(), set()
    ends = {copy: None for copy in reached if any(use.op in readers for use in view.uses[copy])}
    between = makers(view, copies.back(ends, lambda v: v in reached and v != value))
    return readers, {op_id for op_id in between if computes_float32(view, view.ops[op_id])}


def _selects(op: Op, use: Use, fill: Fill) -> bool:
    if use.slot in _ATTENTION_MASKS.get(op.kind, ()) or op.kind in _BOUNDING:
        return True
    low = fill.level is not None and (fill.level < 0 or fill.level >= _SENTINEL)
    return low and use.slot in _SELECTING.get(op.kind, ())
