"""Passes to turn additive masks of attention scores into selections, and to shrink other constants added to scores.

In float32 the result is the same, since −1e30 absorbs any score. In a low type, a sum with −3.4e38 overflows to −inf,
and a fully masked row becomes NaN. A selection keeps every score finite.
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
from amp_rewrite.ir.patterns.fills import bounded, far_fills, fills_among, follow_fill
from amp_rewrite.ir.patterns.scores import FILL, MAX_GRID, ScoredRow, ScoreTerm, counts_far, scored_rows
from amp_rewrite.ir.versions import FIRST_IR_WITH_FREE_INITIALIZERS, FIRST_ROW_SOFTMAX, FIRST_WHERE
from amp_rewrite.ir.view import Op, OpId, Use, ValueId, View
from amp_rewrite.rewrite.attention.recognize import ABSORBING, NEGLIGIBLE, ScoreMask, additive_mask
from amp_rewrite.rewrite.builder import NewNodes, set_attribute
from amp_rewrite.rewrite.const_eval import numbers
from amp_rewrite.rewrite.replacement import Context, Replacement

_CARRYING_SLOTS = {**COPIES, "Where": SELECTIONS["Where"], **dict.fromkeys(AFFINE - {"Sum"}, (0, 1))}
_SOFTMAXES = SOFTMAXES - {"com.microsoft::BiasSoftmax"}  # it contains its own sum


def select_masks(view: View, context: Context) -> Iterator[Replacement]:
    """Replace each sum of scores and a mask before a softmax with a selection. O(nodes + uses).

    The mask must be a constant or a Where between two scalars. A constant mask with visible keys in each row remains a
    summand, for `shrink_score_constants`, because runtimes fuse such a sum with the softmax.
    """
    if view.model.proto.ir_version < FIRST_IR_WITH_FREE_INITIALIZERS:
        return
    for op in _score_sums(view):
        for value, scores in orders(op):
            mask = additive_mask(view, value, context.to) if value != scores else None
            if mask is None or mask.graded or mask.zero_operand is not None:
                continue
            if -math.inf < mask.fill <= ABSORBING:
                if not _shows_keys_in_each_row(view, op, value):
                    yield _selection(view, op, mask, value, scores)
                break


# -- sums of scores and masks ----------------------------------------------------------------------


def _score_sums(view: View) -> list[Op]:
    """Return the float32 Adds in front of a softmax, unless the scores already contain the fill of another mask.

    Below opset 9 there is no Where, so the list is empty. Scores hidden by two masks become −inf, less than scores
    hidden by one mask, which changes the result of a fully masked row.
    """
    if view.opset < FIRST_WHERE:
        return []
    rows = {value for op in view.of_kinds(_SOFTMAXES) for value in op.inputs}
    adds = (op for op in view.of_kinds(("Add",)) if op.outputs[0] in rows) if rows else ()
    sums = [op for op in adds if view.dtype(op.outputs[0]) is DType.FLOAT]
    if not sums:
        return []
    flow = Flow(view, _CARRYING_SLOTS)
    levels = fills_among(view, DType.FLOAT16, flow.back(value for op in sums for value in op.operands))
    filled = frozenset(flow.forth(value for value, fill in levels.items() if fill.absmax >= -ABSORBING))
    return [op for op in sums if not filled.issuperset(op.inputs)]


def _shows_keys_in_each_row(view: View, op: Op, value: ValueId) -> bool:
    """True if a mask is constant, hides keys, and leaves visible keys in each row of every softmax after the sum."""
    array, result = numbers(view, value), op.outputs[0]
    if array is None or result is None or view.opset < FIRST_ROW_SOFTMAX or array.size > MAX_GRID or not array.any():
        return False
    rows = all(r.kind == "Softmax" and int_attribute(r.node, "axis", -1) == -1 for r in view.readers(result))
    return rows and not exposed(view, result) and bool((array == 0).any(axis=-1).all())


def _selection(view: View, op: Op, mask: ScoreMask, value: ValueId, scores: ValueId) -> Replacement:
    node, new, stem = clone(op.node), NewNodes(view, op), view.value_name(value)
    where = view.producer(value, "Where")
    if where is not None:
        condition, fill = view.value_name(mask.value), where.node.input[2 if mask.visible_if else 1]
    else:
        condition = new.constant(f"{stem}_shown", np.asarray(mask.visible))
        fill = new.constant(f"{stem}_fill", np.array(mask.fill, np.float32))
    branches = (view.value_name(scores), fill)
    node.op_type = "Where"
    node.input[:] = (condition, *(branches if mask.visible_if else reversed(branches)))
    text = "a mask added to scores before a softmax: a Where now applies it, with the same result in every type"
    findings = (Finding("selected", stem, text),)
    return Replacement("mask", (op.id,), op.id, node, findings=findings, **new.parts())


# -- constants added to scores -----------------------------------------------------------------------


def shrink_score_constants(view: View, context: Context) -> Iterator[Replacement]:
    """Shift biases and bound fills in sums of scores, without changing the softmax. O(nodes + numbers read).

    A position bias is shifted so that the best visible key of each row gets 0, and a fill beyond the range is bounded.
    The numbers and the visible keys of each row must be known. The shift of a row is computed in float64.
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
            bounded = np.maximum(fill.numbers, NEGLIGIBLE).astype(np.float32)
            yield _with_term(view, "selected", fill, ("bounded", bounded), _BOUNDED)


_MOVED = "a position bias far from 0 · shifted to 0 at the best key of each row, which does not change a softmax"
_BOUNDED = (
    f"a mask added to scores before a softmax: its fill becomes {NEGLIGIBLE:g}, with the same result in every type"
)


def _rebased(row: ScoredRow, bias: ScoreTerm) -> Array | None:
    """Return the bias minus the peak of each row, at most 0 at hidden keys."""
    row_peaks = row.peaks()
    if row_peaks is None:
        return None
    shown, peaks = row_peaks
    moved = bias.numbers.astype(np.float64) - peaks
    moved = np.maximum(np.where(shown, moved, np.minimum(moved, 0)), NEGLIGIBLE).astype(np.float32)
    while moved.ndim > max(bias.numbers.ndim, 1) and moved.shape[0] == 1:
        moved = moved[0]
    return moved


def _beyond_range(row: ScoredRow, to: DType) -> ScoreTerm | None:
    filled = [term for term in row.terms if float(term.numbers.min(initial=0)) <= -FILL]
    if len(filled) != 1 or not filled[0].exclusive or not bool(row.visible.all()):
        return None
    beyond = bool((filled[0].numbers < -to.max / 2).any()) and bool(np.isfinite(filled[0].numbers).all())
    return filled[0] if beyond and row.peaks() is not None else None


def _with_term(view: View, kind: str, term: ScoreTerm, constant: tuple[str, Array], text: str) -> Replacement:
    node, new, name = clone(term.op.node), NewNodes(view, term.op), term.op.node.input[term.slot]
    node.input[term.slot] = new.constant(f"{name}_{constant[0]}", constant[1])
    findings = (Finding(kind, name, text),)
    return Replacement(kind, (term.op.id,), term.op.id, node, findings=findings, **new.parts())


# -- fills whose exact value does not matter -------------------------------------------------------


def bound_fills(view: View, context: Context) -> Iterator[Replacement]:
    """Bound each fill beyond the range of the type, if it only reaches selections, softmaxes, indices or comparisons.

    The numbers in such a comparison must be near. O(fills · reached values). A model that lists its weights as inputs
    (IR version 3) is not changed.
    """
    if view.model.proto.ir_version < FIRST_IR_WITH_FREE_INITIALIZERS:
        return
    changed: dict[OpId, tuple[NodeProto, NewNodes, Finding]] = {}
    for value, level in far_fills(view, context.to).items():
        bound = bounded(level, context.to)
        name = view.value_name(value)
        change = f"the fill value {level:g} becomes {np.copysign(bound, level):g}"
        finding = Finding("saturated", name, f"{change} · {reasons.HARMLESS}: it only selects")
        producer = view.producer(value, "ConstantOfShape")
        fill = attribute(producer.node, "value") if producer is not None else None
        if producer is not None and fill is not None and _harmless(view, context.to, view.uses[value], level):
            node = clone(producer.node)
            set_attribute(node, "value", from_array(_clipped(view.model.array(fill.t), bound)))
            yield Replacement("saturated", (producer.id,), producer.id, node, findings=(finding,))
        constant = view.array(value)
        for use in view.uses[value]:
            if constant is not None and _harmless(view, context.to, (use,), level):
                op = view.ops[use.op]
                node, new, _ = changed.get(op.id, (clone(op.node), NewNodes(view, op), finding))
                node.input[use.slot] = new.constant(f"{name}_bounded", _clipped(constant, bound))
                changed[op.id] = node, new, finding
    for op_id, (node, new, finding) in changed.items():
        yield Replacement("saturated", (op_id,), op_id, node, findings=(finding,), **new.parts())


def _harmless(view: View, to: DType, uses: Collection[Use], level: float) -> bool:
    """True if a fill exceeds the range somewhere after these uses, and its exact value does not matter."""
    reach = follow_fill(view, to, uses, level)
    fits = bounded(level, to) * reach.most <= to.max < reach.farthest
    return fits and reach.ends and not reach.direct_readers


def _clipped(numbers: Array, bound: float) -> Array:
    return np.where(np.isfinite(numbers), np.clip(numbers, -bound, bound), numbers).astype(numbers.dtype)
