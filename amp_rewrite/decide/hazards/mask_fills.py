"""Fills: constants beyond the low type's range that select, or are added to scores.

A fill is a constant with a single extreme value, such as the −3.4e38 of an attention mask.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping
from itertools import chain

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.fill_reach import ATTENTION_MASKS, PLACES, far_reaches, held_fills, selects
from amp_rewrite.decide.hazards.rule import HeldOp, rule
from amp_rewrite.decide.hazards.steps import described, first_inputs
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.ir.dataflow import Flow, computes_float32, float32, makers
from amp_rewrite.ir.op_classes import AFFINE, ALL, CLAMPS, COPIES, FILLS, SELECTIONS, SOFTMAXES, SUMS
from amp_rewrite.ir.patterns.mask_fills import MaskFill, mask_fills
from amp_rewrite.ir.schema import KEPT_VARIABLES
from amp_rewrite.ir.view import Op, OpId, Use, ValueId, View

_PURE_COPIES = {**COPIES, **dict.fromkeys(FILLS, (0,))}
CARRIES = {**COPIES, **SELECTIONS, **dict.fromkeys(AFFINE, ALL)}
_SOFTMAX = SOFTMAXES | {"Exp"}  # Exp: a softmax written out


def reads_low(view: View, use: Use, to: DType) -> bool:
    """True if a lowered reader takes this input in the low type.

    False at ports of a fixed type (the scales of Resize), at those that stay float32 by choice, and where the schema
    does not admit the low type.
    """
    op = view.ops[use.op]
    variable = op.signature.input_variable(use.slot) if op.signature and not op.bodies else None
    if op.signature is None or variable is None or variable in KEPT_VARIABLES.get((op.domain, op.op_type), ()):
        return False
    return op.signature.admits(variable, to)


@rule(
    reasons.MASK_FILL,
    "A mask's fill wins or loses comparisons, and does not become infinite.",
    cases=("additive_mask", "saturated"),
    findings=("saturated",),
)
def mask_fill(view: View, to: DType) -> Iterator[HeldOp]:
    """Hold the ops from a fill through its sums to the softmax, which is held too. O(nodes + uses).

    A fill whose number does not matter becomes a quarter of the largest number beforehand (±16376 in float16): one that
    is put in some places, and then copied, selected, ordered, scaled by constants and compared with near numbers alone,
    up to a softmax or an index. Where its number matters, because an output shows it, another number is added to it, it
    is scaled by an unknown number or compared with one that is as far, the ops on its way keep it in float32.

    What it protects: Masks with a fill such as −3.4e38 that are added to scores. A mask that selects is rewritten as
        Where beforehand. The only fill of a constant mask that shows a key in every row becomes −16376 beforehand and
        is still added, which runtimes fuse with the softmax.
    Why: A fill saturated at −65504 overflows to −inf when it is added or divided by a temperature; a softmax over a
        fully masked row gives NaN. No score of a network reaches a quarter of the range, so that the fill wins or loses
        every comparison just as well, and has weight 0 in a softmax; three of them can be added, and 1 / 0.3 of it is
        finite.
    Example: scores + (1 − mask) · −3.4e38 in an encoder exported from transformers; Where(mask, scores, −3.4e38).
    How to override: A fill of −1e4 in the model.
    Source: masked_rows among the hard models of this project.
    """
    for op_id, (softmax, note) in additive(view, mask_fills(view, to)).items():
        yield HeldOp(op_id, softmax, note)


def saturated(view: View, to: DType) -> tuple[frozenset[ValueId], tuple[Finding, ...]]:
    """Return the values to clamp when they are lowered, and a finding for each that is a constant."""
    overflowing = {value: fill for value, fill in mask_fills(view, to).items() if fill.overflows}
    pinned, findings = {*additive(view, overflowing), *(op for op, _, _ in held_fills(view, to))}, []
    for value, fill in overflowing.items():
        free = any(use.op not in pinned for use in view.uses[value])
        if free and not unfit_readers(view, to, value, fill)[0] - pinned:
            level = fill.absmax if fill.level is None else fill.level
            stored = to.max if level > 0 else -to.max
            note = f"the fill value {level:g} becomes {stored:g} · {reasons.HARMLESS}: it only selects"
            findings.append(Finding("saturated", view.value_name(value), note))
    reached = (reach.held for reach in far_reaches(view, to))
    flow = Flow.of(view, {**COPIES, **SELECTIONS, "Mul": ALL, "Neg": (0,)})
    return frozenset({*carried(flow, overflowing), *overflowing, *chain(*reached)}), tuple(findings)


def carried(flow: Flow, extreme: Mapping[ValueId, MaskFill]) -> dict[ValueId, ValueId]:
    """Return the float32 values that carry a fill, each with the fill.

    A clamp whose bound is the fill does not carry it on.
    """
    view = flow.view
    sources = {value: value for value, fill in extreme.items() if fill.level is not None}

    def unclamped(value: ValueId) -> bool:
        op = view.producer(value, *CLAMPS)
        clamped = op is not None and not sources.keys().isdisjoint(op.operands)
        return view.dtype(value) is DType.FLOAT and not clamped

    return flow.forth(sources, unclamped)


def additive(view: View, extreme: Mapping[ValueId, MaskFill]) -> dict[OpId, tuple[OpId, str]]:
    """Return the ops of additive masks, each with the softmax that it feeds and a note."""
    carries = Flow.of(view, CARRIES)
    return to_softmax(carries, carried(carries, extreme), "an additive mask")


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
    for op_id in makers(view, {**upstream, **downstream}):
        softmax = next((ahead[v] for v in view.ops[op_id].outputs if v in ahead), None)
        if softmax is not None and computes_float32(view, view.ops[op_id]) and view.ops[op_id].op_type != "Constant":
            pins[op_id] = (softmax, f"carries {name} to {described(view, softmax)}")
    readers = (reader for value in downstream for reader in view.readers(value) if reader.kind in _SOFTMAX)
    return {**pins, **{reader.id: (reader.id, f"its scores carry {name}") for reader in readers}}


def _summands(view: View, op: Op, masked: Container[ValueId]) -> list[ValueId]:
    """Return the masked operands of a sum; none where a softmax written out subtracts the maximum."""
    if op.kind not in SUMS:
        return []
    subtracted = view.producer(op.inputs[1], "ReduceMax") if op.kind == "Sub" else None
    if subtracted is not None and subtracted.inputs[0] == op.inputs[0]:
        return []
    return [value for value in op.operands if value in masked]


def unfit_readers(view: View, to: DType, value: ValueId, fill: MaskFill) -> tuple[set[OpId], Collection[OpId]]:
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
    between = copies.path(ends, lambda v: v in reached and v != value)
    return readers, between.keys()


def _selects(op: Op, use: Use, fill: MaskFill) -> bool:
    """True if an op compares or selects with the fill and does not compute with it."""
    if use.slot in ATTENTION_MASKS.get(op.kind, ()) or op.kind in CLAMPS:
        return True
    return selects(fill) and use.slot in PLACES.get(op.kind, ())
