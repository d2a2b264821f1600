"""Masks that are added to attention scores, rewritten as selections, and other constants there, made small.

In float32 both give the same: beside −1e30 a score is lost, whatever it is. In a low type a sum with −3.4e38 overflows
to −inf, and a row that is masked throughout becomes NaN; a selection keeps every score finite.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from functools import cache, partial

import numpy as np
from onnx import NodeProto
from onnx.numpy_helper import from_array

from amp_rewrite.decide import reasons
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.files.casting import Array
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.attributes import attribute, int_attribute
from amp_rewrite.ir.dataflow import Flow, exposed, orders
from amp_rewrite.ir.op_classes import AFFINE, COPIES, SELECTIONS, SOFTMAXES
from amp_rewrite.ir.patterns.fills import bounded, far_fills, fills_among, reach_of
from amp_rewrite.ir.patterns.scores import FILL, MOST, ScoredRow, ScoreTerm, counts_far, scored_rows
from amp_rewrite.ir.versions import FIRST_IR_WITH_FREE_INITIALIZERS, FIRST_ROW_SOFTMAX, FIRST_WHERE
from amp_rewrite.ir.view import Op, OpId, Use, ValueId, View
from amp_rewrite.rewrite.attention.recognize import LOST, OUT_OF_REACH, ScoreMask, added
from amp_rewrite.rewrite.builder import Surroundings, set_attribute
from amp_rewrite.rewrite.const_eval import numbers
from amp_rewrite.rewrite.replacement import Context, Replacement

_CARRY = {**COPIES, "Where": SELECTIONS["Where"], **dict.fromkeys(AFFINE - {"Sum"}, (0, 1))}
_SOFTMAXES = SOFTMAXES - {"com.microsoft::BiasSoftmax"}  # that has a sum of its own


def select_masks(view: View, context: Context) -> Iterator[Replacement]:
    """Replace each sum of scores and a mask before a softmax by a selection. O(nodes + uses).

    For masks that a Where between two scalars makes, and constant ones. A constant mask that masks no row throughout
    stays a summand, for `shrink_score_constants`: runtimes fuse such a sum with the softmax.
    """
    if view.model.proto.ir_version < FIRST_IR_WITH_FREE_INITIALIZERS:
        return
    for op in _scored(view):
        for value, scores in orders(op):
            mask = added(view, value, context.to) if value != scores else None
            if mask is not None and -math.inf < mask.fill <= LOST and not mask.counts and mask.nothing is None:
                if not _in_each_row(view, op, value):
                    yield _selected(view, op, mask, value, scores)
                break


# -- sums of scores and masks ----------------------------------------------------------------------


def _scored(view: View) -> list[Op]:
    """Return the float32 Adds feeding a softmax, except where the scores already contain another mask's fill value.

    None below opset 9, which has no Where. Scores that two masks hide are −inf, less than what one mask hides: that
    shows in a row that is masked throughout.
    """
    if view.opset < FIRST_WHERE:
        return []
    read = {value for op in view.of_kinds(_SOFTMAXES) for value in op.inputs}
    adds = (op for op in view.of_kinds(("Add",)) if op.outputs[0] in read) if read else ()
    sums = [op for op in adds if view.dtype(op.outputs[0]) is DType.FLOAT]
    if not sums:
        return []
    flow = Flow(view, _CARRY)
    levels = fills_among(view, DType.FLOAT16, flow.back(value for op in sums for value in op.operands))
    filled = frozenset(flow.forth(value for value, fill in levels.items() if fill.absmax >= -LOST))
    return [op for op in sums if not filled.issuperset(op.inputs)]


def _in_each_row(view: View, op: Op, value: ValueId) -> bool:
    """True if a mask is constant, hides something, and shows something in each row of every softmax behind the sum."""
    held, result = numbers(view, value), op.outputs[0]
    if held is None or result is None or view.opset < FIRST_ROW_SOFTMAX or held.size > MOST or not held.any():
        return False
    rows = all(r.kind == "Softmax" and int_attribute(r.node, "axis", -1) == -1 for r in view.readers(result))
    return rows and not exposed(view, result) and bool((held == 0).any(axis=-1).all())


def _selected(view: View, op: Op, mask: ScoreMask, value: ValueId, scores: ValueId) -> Replacement:
    node, around, stem = clone(op.node), Surroundings(view, op), view.value_name(value)
    where = view.producer(value, "Where")
    if where is not None:
        condition, fill = view.value_name(mask.value), where.node.input[2 if mask.shows else 1]
    else:
        condition = around.constant(f"{stem}_shown", np.asarray(mask.shown))
        fill = around.constant(f"{stem}_fill", np.array(mask.fill, np.float32))
    branches = (view.value_name(scores), fill)
    node.op_type = "Where"
    node.input[:] = (condition, *(branches if mask.shows else reversed(branches)))
    words = "a mask added to scores before a softmax: a Where applies it instead, with the same result in every type"
    said = (Finding("selected", stem, words),)
    return Replacement("mask", (op.id,), op.id, node, findings=said, **around.parts())


# -- constants added to scores -----------------------------------------------------------------------


def shrink_score_constants(view: View, context: Context) -> Iterator[Replacement]:
    """Move biases and bound fills in sums of scores, without a change of the softmax. O(nodes + their numbers).

    A position bias is moved to 0 at the best key that each row shows, and a fill beyond the range is bounded. Both only
    for known numbers, in rows whose keys are known and that show one. What is subtracted from a row is computed in
    float64.
    """
    if view.model.proto.ir_version < FIRST_IR_WITH_FREE_INITIALIZERS:
        return
    for row in scored_rows(view, cache(partial(numbers, view))):
        bias = next((term for term in row.terms if term.exclusive and counts_far(term.numbers, context.to)), None)
        moved = _rebased(row, bias) if bias is not None and not row.near(context.to) else None
        fill = _beyond_range(row, context.to)
        if bias is not None and moved is not None:
            yield _with_term(view, "bias", bias, ("rebased", moved), _MOVED)
        if fill is not None and (moved is None or fill is not bias):
            bounded = np.maximum(fill.numbers, OUT_OF_REACH).astype(np.float32)
            yield _with_term(view, "selected", fill, ("bounded", bounded), _BOUNDED)


_MOVED = "a position bias far from 0 · less what it adds to the best key of each row, which a softmax does not see"
_BOUNDED = (
    f"a mask added to scores before a softmax: its fill becomes {OUT_OF_REACH:g}, with the same result in every type"
)


def _rebased(row: ScoredRow, bias: ScoreTerm) -> Array | None:
    """Return the bias less the peak of each row; at hidden keys it is 0 at most."""
    known = row.peaks()
    if known is None:
        return None
    shown, peaks = known
    moved = bias.numbers.astype(np.float64) - peaks
    moved = np.maximum(np.where(shown, moved, np.minimum(moved, 0)), OUT_OF_REACH).astype(np.float32)
    while moved.ndim > max(bias.numbers.ndim, 1) and moved.shape[0] == 1:
        moved = moved[0]
    return moved


def _beyond_range(row: ScoredRow, to: DType) -> ScoreTerm | None:
    filled = [term for term in row.terms if float(term.numbers.min(initial=0)) <= -FILL]
    if len(filled) != 1 or not filled[0].exclusive or not bool(row.shown.all()):
        return None
    beyond = bool((filled[0].numbers < -to.max / 2).any()) and bool(np.isfinite(filled[0].numbers).all())
    return filled[0] if beyond and row.peaks() is not None else None


def _with_term(view: View, kind: str, term: ScoreTerm, new: tuple[str, Array], words: str) -> Replacement:
    node, around, name = clone(term.op.node), Surroundings(view, term.op), term.op.node.input[term.slot]
    node.input[term.slot] = around.constant(f"{name}_{new[0]}", new[1])
    said = (Finding(kind, name, words),)
    return Replacement(kind, (term.op.id,), term.op.id, node, findings=said, **around.parts())


# -- fills whose number does not matter ------------------------------------------------------------


def bound_fills(view: View, context: Context) -> Iterator[Replacement]:
    """Bound each fill that leaves the type and ends in selections, softmaxes, indices or near comparisons alone.

    O(fills * values reached). A model that lists its weights as inputs (IR version 3) is left alone.
    """
    if view.model.proto.ir_version < FIRST_IR_WITH_FREE_INITIALIZERS:
        return
    changed: dict[OpId, tuple[NodeProto, Surroundings, Finding]] = {}
    for value, level in far_fills(view, context.to).items():
        least = bounded(level, context.to)
        name = view.value_name(value)
        note = f"the fill value {level:g} becomes {np.copysign(least, level):g} · {reasons.HARMLESS}: it only selects"
        finding = Finding("saturated", name, note)
        producer = view.producer(value, "ConstantOfShape")
        stated = attribute(producer.node, "value") if producer is not None else None
        if producer is not None and stated is not None and _harmless(view, context.to, view.uses[value], level):
            node = clone(producer.node)
            set_attribute(node, "value", from_array(_within(view.model.array(stated.t), least)))
            yield Replacement("saturated", (producer.id,), producer.id, node, findings=(finding,))
        constant = view.array(value)
        for use in view.uses[value]:
            if constant is not None and _harmless(view, context.to, (use,), level):
                op = view.ops[use.op]
                node, around, _ = changed.get(op.id, (clone(op.node), Surroundings(view, op), finding))
                node.input[use.slot] = around.constant(f"{name}_bounded", _within(constant, least))
                changed[op.id] = node, around, finding
    for op_id, (node, around, finding) in changed.items():
        yield Replacement("saturated", (op_id,), op_id, node, findings=(finding,), **around.parts())


def _harmless(view: View, to: DType, uses: Collection[Use], level: float) -> bool:
    """True if a fill leaves the type on its way from these uses, and its number matters at none."""
    reach = reach_of(view, to, uses, level)
    fits = bounded(level, to) * reach.most <= to.max < reach.farthest
    return fits and reach.ends and not reach.itself


def _within(numbers: Array, least: float) -> Array:
    return np.where(np.isfinite(numbers), np.clip(numbers, -least, least), numbers).astype(numbers.dtype)
