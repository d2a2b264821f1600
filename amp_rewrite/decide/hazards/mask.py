"""Constants beyond the low type's range: fills that select, fills that are added, and overflow.

A fill is a constant with a single extreme value, such as the −3.4e38 of an attention mask.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from onnx import AttributeProto, TensorProto

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.constants import constants, large_biases, reads_low, underflow
from amp_rewrite.decide.hazards.rule import rule
from amp_rewrite.decide.hazards.steps import described, first_inputs, in_float32
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.files.arrays import from_array
from amp_rewrite.files.rounding import Fit
from amp_rewrite.ir.dataflow import Flow, float32, makers
from amp_rewrite.ir.op_classes import AFFINE, ALL, CLAMPS, COMPARISONS, COPIES, FILLS, SELECTIONS, SOFTMAXES, SUMS
from amp_rewrite.ir.schema import attribute
from amp_rewrite.ir.view import Op, OpId, Use, ValueId, View

_PURE_COPIES = {**COPIES, **dict.fromkeys(FILLS, (0,))}
CARRIES = {**COPIES, **SELECTIONS, **dict.fromkeys(AFFINE, ALL)}
_SOFTMAX = SOFTMAXES | {"Exp"}  # Exp: a softmax written out
_SELECTING = {**SELECTIONS, "Clip": (1, 2), **dict.fromkeys(FILLS, (2,))}
_ATTENTION_MASKS = {
    "Attention": (3,),
    "com.microsoft::Attention": (5,),
    "com.microsoft::DecoderMaskedMultiHeadAttention": (4,),
    "com.microsoft::GroupQueryAttention": (10,),
    "com.microsoft::MultiHeadAttention": (5,),
}
_SENTINEL = 1e30
"""No quantity of a network is as large: a larger number is there to win or lose every comparison."""
_STATES = {
    "ConstantOfShape": ("value",),
    "ai.onnx.ml::LabelEncoder": ("values_floats", "default_float", "values_tensor", "default_tensor"),
}
"""Ops whose results are numbers that their attributes state."""


@dataclass(frozen=True, slots=True)
class Fill:
    """The extreme values of a constant, at or beyond the largest finite number of the low type.

    `level`: the single such value, None if there are several. `overflows`: it rounds to infinity.
    """

    level: float | None
    overflows: bool
    absmax: float


def fills(view: View, to: DType, among: Container[ValueId] | None = None) -> dict[ValueId, Fill]:
    """Return the extreme constants of a model, and the extreme results of ConstantOfShape and LabelEncoder.

    Each constant is read once, and only if it is `among` the given values.
    """
    extreme: dict[ValueId, Fill] = {}
    for value in constants(view):
        if among is not None and value not in among:
            continue
        fit = view.fit(value, to)
        values = view.array(value) if fit.absmax >= to.max else None
        if values is not None:
            beyond = values[(abs(values) >= to.max) & (abs(values) < float("inf"))]
            level = float(beyond[0]) if beyond.size and (beyond == beyond[0]).all() else None
            extreme[value] = Fill(level, fit.overflow > 0, fit.absmax)
    for op in view.ops:
        result = op.outputs[0] if op.kind in _STATES else None
        if result is None or view.dtype(result) is not DType.FLOAT or (among is not None and result not in among):
            continue
        tensors = [_tensor(a) for name in _STATES[op.kind] if (a := attribute(op.node, name)) is not None]
        fit = max((view.model.fit(tensor, to) for tensor in tensors), key=lambda fit: fit.absmax, default=Fit())
        if fit.absmax >= to.max:
            level = float(view.model.array(tensors[0]).item()) if op.kind == "ConstantOfShape" else None
            extreme[result] = Fill(level, fit.overflow > 0, fit.absmax)
    return extreme


def _tensor(numbers: AttributeProto) -> TensorProto:
    """Return the numbers of an attribute as a tensor."""
    if numbers.type == AttributeProto.TENSOR:
        return numbers.t
    return from_array(np.array(numbers.floats or [numbers.f], np.float32))


@rule(reasons.ADDITIVE_MASK, "A mask that is added to scores stays finite up to the softmax.")
def additive_mask(view: View, to: DType) -> Iterator[Pin]:
    """Pin the ops from a fill through its sums to the softmax, which is pinned too. O(nodes + uses).

    What it protects: Masks with a fill such as −3.4e38 that are added to scores. A mask that selects is rewritten as
        Where beforehand and needs no pin. The only fill of a constant mask that shows a key in every row becomes −32752
        beforehand and is still added, which runtimes fuse with the softmax.
    Why: A fill saturated at −65504 overflows to −inf when it is added, and a softmax over a fully masked row gives NaN.
    Example: scores + (1 − mask) · −3.4e38 in an encoder exported from transformers.
    How to override: A fill of −1e4 in the model.
    Source: masked_rows among the hard models of this project.
    """
    for op_id, (softmax, note) in sorted(_additive(view, fills(view, to)).items()):
        yield Pin(op_id, reasons.ADDITIVE_MASK, softmax, note)


@rule(reasons.CONSTANT_RANGE, "An op that computes with a constant runs in a low type only if the constant fits.")
def constant_range(view: View, to: DType) -> Iterator[Pin]:
    """Pin readers of constants that overflow or underflow, and the copies between. O(nodes + uses).

    What it protects: Arithmetic with constants beyond the type's range. A fill that only selects (a branch of Where, a
        bound of Clip, Max or Min, an attention mask) saturates instead; infinities are the same in every type. Tiny
        weights before a large scale, or a tiny scale before large weights, are balanced by a power of two beforehand.
    Why: float16 overflows to infinity beyond 65504, and rounds to 0 below 3e-8, which erases a product and breaks a
        quotient.
    Example: x · 1e6, x / 1e-9, a scale of 1e-6 in DequantizeLinear.
    Source: IEEE 754 binary16.
    """
    yield from overflow(view, to)
    yield from underflow(view, to)
    yield from large_biases(view, to)


def overflow(view: View, to: DType) -> Iterator[Pin]:
    """Pin the ops that would compute with an overflowing constant, and the copies between."""
    extreme = fills(view, to)
    overflowing = {value: fill for value, fill in extreme.items() if fill.overflows}
    additive = _additive(view, extreme) if overflowing else {}
    for value, fill in overflowing.items():
        readers, between = _unfit_readers(view, to, value, fill)
        note = f"constant {view.value_name(value)!r} goes to {fill.absmax:g}, beyond {to.max:g}"
        for op_id in sorted({*readers, *between} - additive.keys()):
            yield Pin(op_id, reasons.CONSTANT_RANGE, view.values[value].producer, note)
    for op_id, comparison in _compared(view, overflowing).items():
        note = f"saturated, a fill would meet another number in {described(view, comparison)}"
        yield Pin(op_id, reasons.CONSTANT_RANGE, comparison, note)


def _compared(view: View, overflowing: Mapping[ValueId, Fill]) -> dict[OpId, OpId]:
    """Return the ops that carry a fill to a comparison with a constant beyond the range, each with the comparison."""
    comparisons = [op for op in view.ops if op.kind in COMPARISONS and not overflowing.keys().isdisjoint(op.inputs)]
    if not comparisons:
        return {}
    carries = Flow.of(view, CARRIES)
    masked = _masked(carries, overflowing)
    read = {v: op.id for op in comparisons for v in op.inputs if v in masked and v not in overflowing and v is not None}
    path = makers(view, carries.back(read, lambda v: v in masked and v not in overflowing))
    return in_float32(view, {**path, **{op_id: op_id for op_id in read.values()}})


@rule("saturated", "A fill that only selects becomes the largest finite number, not infinity.")
def saturated(view: View, to: DType) -> tuple[frozenset[ValueId], tuple[Finding, ...]]:
    """Return the values to clamp when they are lowered, and a finding for each that is a constant.

    What it protects: Fills that only select (of a ConstantOfShape, its result), and the values that a fill reaches
        through copies, selections and products.
    Why: In the low type the fill would be −inf, and 0 · −inf is NaN. The last finite number wins or loses every
        comparison just as well.
    Example: Where(mask, scores, −3.4e38).
    How to override: A smaller fill in the model.
    Source: masked_rows among the hard models of this project.
    """
    overflowing = {value: fill for value, fill in fills(view, to).items() if fill.overflows}
    pinned = _additive(view, overflowing).keys()
    findings = []
    for value, fill in overflowing.items():
        free = any(use.op not in pinned for use in view.uses[value])
        if free and not _unfit_readers(view, to, value, fill)[0] - pinned:
            level = fill.absmax if fill.level is None else fill.level
            stored = to.max if level > 0 else -to.max
            note = f"the fill value {level:g} becomes {stored:g} · {reasons.HARMLESS}: it only selects"
            findings.append(Finding("saturated", view.value_name(value), note))
    flow = Flow.of(view, {**COPIES, **SELECTIONS, "Mul": ALL, "Neg": (0,)})
    return frozenset({*_masked(flow, overflowing), *overflowing}), tuple(findings)


def _masked(flow: Flow, extreme: Mapping[ValueId, Fill]) -> dict[ValueId, ValueId]:
    """Return the float32 values that carry a fill, each with the fill.

    A clamp whose bound is the fill does not carry it on.
    """
    view = flow.view
    sources = {value: value for value, fill in extreme.items() if fill.level is not None}

    def carried(value: ValueId) -> bool:
        op = view.producer(value, *CLAMPS)
        clamped = op is not None and not sources.keys().isdisjoint(op.inputs)
        return view.dtype(value) is DType.FLOAT and not clamped

    return flow.forth(sources, carried)


def _additive(view: View, extreme: Mapping[ValueId, Fill]) -> dict[OpId, tuple[OpId, str]]:
    """Return the ops of additive masks, each with the softmax that it feeds and a note."""
    carries = Flow.of(view, CARRIES)
    return to_softmax(carries, _masked(carries, extreme), "an additive mask")


def to_softmax(carries: Flow, masked: Collection[ValueId], name: str) -> dict[OpId, tuple[OpId, str]]:
    """Return the ops from values that are added to scores up to the softmax, each with that softmax and a note."""
    if not masked:
        return {}
    view = carries.view
    flow = Flow.of(view)
    ahead = flow.back(first_inputs(view, _SOFTMAX), float32(view))
    summands = {op.id: read for op in view.ops if (read := _summands(view, op, masked)) and op.outputs[0] in ahead}
    upstream = carries.back({v: op_id for op_id, read in summands.items() for v in read}, masked.__contains__)
    sums = {result: op_id for op_id in summands if (result := view.ops[op_id].outputs[0]) is not None}
    downstream = flow.forth(sums, ahead.__contains__)
    pins: dict[OpId, tuple[OpId, str]] = {}
    for op_id in in_float32(view, makers(view, {**upstream, **downstream})):
        softmax = next((ahead[v] for v in view.ops[op_id].outputs if v in ahead), None)
        if softmax is not None and view.ops[op_id].op_type != "Constant":
            pins[op_id] = (softmax, f"carries {name} to {described(view, softmax)}")
    for value in downstream:
        for reader in view.readers(value):
            if reader.kind in _SOFTMAX:
                pins[reader.id] = (reader.id, f"its scores carry {name}")
    return pins


def _summands(view: View, op: Op, masked: Container[ValueId]) -> list[ValueId]:
    """Return the masked operands of a sum; none where a softmax written out subtracts the maximum."""
    if op.kind not in SUMS:
        return []
    subtracted = view.producer(op.inputs[1], "ReduceMax") if op.kind == "Sub" else None
    if subtracted is not None and subtracted.inputs[0] == op.inputs[0]:
        return []
    return [value for value in op.operands if value in masked]


def _unfit_readers(view: View, to: DType, value: ValueId, fill: Fill) -> tuple[set[OpId], Collection[OpId]]:
    """Return the ops that would compute with an overflowed constant, and the copies that they read."""
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
    ends = {copy: None for copy in reached if any(use.op in readers for use in view.uses[copy])}
    between = makers(view, copies.back(ends, lambda v: v in reached and v != value))
    return readers, in_float32(view, between).keys()


def _selects(op: Op, use: Use, fill: Fill) -> bool:
    """True if an op compares or selects with the fill and does not compute with it."""
    if use.slot in _ATTENTION_MASKS.get(op.kind, ()) or op.kind in CLAMPS:
        return True
    sentinel = fill.level is not None and (fill.level < 0 or fill.level >= _SENTINEL)
    return sentinel and use.slot in _SELECTING.get(op.kind, ())
