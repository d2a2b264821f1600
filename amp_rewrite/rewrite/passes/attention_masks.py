"""Masks that are added to attention scores, rewritten as selections, and other constants there, made small.

In float32 both give the same: beside −1e30 a score is lost, whatever it is. In a low type a sum with −3.4e38 overflows
to −inf, and a row that is masked throughout becomes NaN; a selection keeps every score finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np
from onnx import TensorProto
from onnx.numpy_helper import from_array

from amp_rewrite.decide import reasons
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.files.casting import Array
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.attributes import attribute, int_attribute
from amp_rewrite.ir.builder import restate
from amp_rewrite.ir.dataflow import Flow, exposed, number
from amp_rewrite.ir.names import claimed, unused
from amp_rewrite.ir.op_classes import AFFINE, COPIES, SELECTIONS, SOFTMAXES
from amp_rewrite.ir.patterns.fills import bounded, far_fills, fills_among, reach_of
from amp_rewrite.ir.patterns.scores import FILL, MOST, ScoredRow, ScoreTerm, counts_far, scored_rows
from amp_rewrite.ir.versions import FIRST_IR_WITH_FREE_INITIALIZERS, FIRST_ROW_SOFTMAX, FIRST_WHERE
from amp_rewrite.ir.view import Op, OpId, Use, ValueId, View
from amp_rewrite.rewrite.attention.recognize import LOST, OUT_OF_REACH
from amp_rewrite.rewrite.const_eval import numbers
from amp_rewrite.rewrite.replacement import Context, Replacement

_LARGEST_MASK = 1 << 24  # elements of a constant mask whose values are read
_CARRY = {**COPIES, "Where": SELECTIONS["Where"], **dict.fromkeys(AFFINE - {"Sum"}, (0, 1))}
_SOFTMAXES = SOFTMAXES - {"com.microsoft::BiasSoftmax"}  # that has a sum of its own


def select_masks(view: View, context: Context) -> Iterator[Replacement]:
    """Replace each sum of scores and a mask before a softmax by a selection. O(nodes + uses).

    For masks that a Where between two scalars makes, and constant ones. A constant mask that masks no row throughout
    stays a summand, for `shrink_score_constants`: runtimes fuse such a sum with the softmax.
    """
    if view.model.proto.ir_version < FIRST_IR_WITH_FREE_INITIALIZERS:
        return
    constants = cache(partial(_constants, view))  # several sums may read a mask
    for op in _scored(view):
        mask = _mask_of(view, op)
        if mask is not None:
            yield _selected(view, op, mask, constants(mask.value))


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
    filled = _filled(view, sums) if sums else frozenset()
    return [op for op in sums if not filled.issuperset(op.inputs)]


def _filled(view: View, sums: Sequence[Op]) -> frozenset[ValueId | None]:
    flow = Flow.of(view, _CARRY)
    origins = flow.back({value: value for op in sums for value in op.operands})
    levels = fills_among(view, DType.FLOAT16, origins).items()
    return frozenset(flow.forth({value: value for value, fill in levels if fill.absmax >= -LOST}))


# -- masks -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Mask:
    """The operand `slot` of a sum: 0 where the condition holds and the fill elsewhere, or (not `shows`) the reverse."""

    value: ValueId
    slot: int
    shows: bool


def _mask_of(view: View, op: Op) -> _Mask | None:
    for slot, value in enumerate(op.operands if len(set(op.inputs)) > 1 else ()):
        shows = _shows(view, value)
        if shows is not None:
            return None if _in_each_row(view, op, value, shows) else _Mask(value, slot, shows)
    return None


def _in_each_row(view: View, op: Op, value: ValueId, shows: bool) -> bool:
    """True if a mask is constant and shows something in each row of every softmax that reads the sum."""
    shown, result = _shown(view, value, shows), op.outputs[0]
    if shown is None or result is None or view.opset < FIRST_ROW_SOFTMAX or shown.size > MOST:
        return False
    rows = all(r.kind == "Softmax" and int_attribute(r.node, "axis", -1) == -1 for r in view.readers(result))
    return rows and not exposed(view, result) and bool(shown.any(axis=-1).all())


def _shown(view: View, value: ValueId, shows: bool) -> Array | None:
    where = view.producer(value, "Where")
    values = _readable(view, where.inputs[0] if where is not None else value)
    return None if values is None else np.asarray(values == (shows if where is not None else 0))


def _readable(view: View, value: ValueId | None) -> Array | None:
    values = view.array(value, _LARGEST_MASK)
    return values if values is not None and values.ndim and values.size else None


def _shows(view: View, value: ValueId) -> bool | None:
    where = view.producer(value, "Where")
    if where is not None:
        branches = [n for v in where.inputs[1:] if (n := number(view, v, axes=1)) is not None and math.isfinite(n)]
        two = len(branches) == 2 and 0 in branches and min(branches) <= LOST
        return branches[0] == 0 if two else None
    values = _readable(view, value)
    if values is None:
        return None
    least = float(values.min())
    return True if -math.inf < least <= LOST and bool(((values == 0) | (values == least)).all()) else None


# -- selections ------------------------------------------------------------------------------------


def _selected(view: View, op: Op, mask: _Mask, weights: tuple[TensorProto, ...]) -> Replacement:
    node, scores = clone(op.node), op.node.input[1 - mask.slot]
    where = view.producer(mask.value, "Where")
    if where is not None:
        condition, fill = where.node.input[0], where.node.input[2 if mask.shows else 1]
    else:
        condition, fill = (weight.name for weight in weights)
    node.op_type = "Where"
    node.input[:] = (condition, scores, fill) if mask.shows else (condition, fill, scores)
    words = "a mask added to scores before a softmax: a Where applies it instead, with the same result in every type"
    finding = Finding("selected", op.node.input[mask.slot], words)
    return Replacement("mask", (op.id,), op.id, node, weights, findings=(finding,))


def _constants(view: View, value: ValueId) -> tuple[TensorProto, ...]:
    stem, values = view.value_name(value), view.array(value)
    parts = {} if values is None else {"shown": np.asarray(values == 0), "fill": np.asarray(values.min())}
    return tuple(from_array(part, unused(f"{stem}_{name}", view.names)) for name, part in parts.items())


# -- constants added to scores -----------------------------------------------------------------------


def shrink_score_constants(view: View, context: Context) -> Iterator[Replacement]:
    """Move biases and bound fills in sums of scores, without a change of the softmax. O(nodes + their numbers).

    A position bias is moved to 0 at the best key that each row shows, and a fill beyond the range is bounded. Both only
    for numbers that are known, in rows whose keys are known and that show one. What is subtracted from a row is
    computed in float64.
    """
    if view.model.proto.ir_version < FIRST_IR_WITH_FREE_INITIALIZERS:
        return
    store = _ConstantStore(set(view.names))
    for row in scored_rows(view, cache(partial(numbers, view))):
        bias = next((term for term in row.terms if term.alone and counts_far(term.numbers, context.to)), None)
        moved = _rebased(row, bias) if bias is not None and not row.near(context.to) else None
        fill = _beyond_range(row, context.to)
        if bias is not None and moved is not None:
            yield _with_term("bias", bias, store.tensor(bias, "rebased", moved), _MOVED)
        if fill is not None and (moved is None or fill is not bias):
            bounded = np.maximum(fill.numbers, OUT_OF_REACH).astype(np.float32)
            yield _with_term("selected", fill, store.tensor(fill, "bounded", bounded), _BOUNDED)


_MOVED = "a position bias far from 0 · less what it adds to the best key of each row, which a softmax does not see"
_BOUNDED = (
    f"a mask added to scores before a softmax: its fill becomes {OUT_OF_REACH:g}, with the same result in every type"
)


@dataclass(slots=True)
class _ConstantStore:
    """New constants; layers that add the same numbers share one."""

    taken: set[str]
    held: dict[tuple[bytes, tuple[int, ...]], TensorProto] = field(default_factory=dict)

    def tensor(self, term: ScoreTerm, word: str, array: Array) -> TensorProto:
        key = (array.tobytes(), array.shape)
        if key not in self.held:
            name = claimed(f"{term.op.node.input[term.slot]}_{word}", self.taken)
            self.held[key] = from_array(array, name)
        return self.held[key]


def _rebased(row: ScoredRow, bias: ScoreTerm) -> Array | None:
    """Return the bias less the peak of each row; at keys that are not shown it is 0 at most."""
    held, peaks = row.total(), row.peaks()
    if held is None or peaks is None:
        return None
    moved = bias.numbers.astype(np.float64) - peaks
    moved = np.maximum(np.where(held[1], moved, np.minimum(moved, 0)), OUT_OF_REACH).astype(np.float32)
    while moved.ndim > max(bias.numbers.ndim, 1) and moved.shape[0] == 1:
        moved = moved[0]
    return moved


def _beyond_range(row: ScoredRow, to: DType) -> ScoreTerm | None:
    filled = [term for term in row.terms if float(term.numbers.min(initial=0)) <= -FILL]
    if len(filled) != 1 or not filled[0].alone or not bool(row.shown.all()):
        return None
    beyond = bool((filled[0].numbers < -to.max / 2).any()) and bool(np.isfinite(filled[0].numbers).all())
    return filled[0] if beyond and row.total() is not None else None


def _with_term(kind: str, term: ScoreTerm, numbers: TensorProto, words: str) -> Replacement:
    node = clone(term.op.node)
    name, node.input[term.slot] = node.input[term.slot], numbers.name
    return Replacement(kind, (term.op.id,), term.op.id, node, (numbers,), findings=(Finding(kind, name, words),))


# -- fills whose number does not matter ------------------------------------------------------------


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
