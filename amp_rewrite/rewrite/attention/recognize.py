"""Recognition of written-out attention: a product of queries and keys, ops on the scores, a softmax, a second product.

This module matches structure only. `legality` decides whether the standard operator computes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from amp_rewrite.decide.needs.forward import find_facts
from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.dataflow import confined, is_only_reader, keeps_type, number, only_reader, orders
from amp_rewrite.ir.op_classes import SCALINGS
from amp_rewrite.ir.patterns.scores import SCORE_OPS
from amp_rewrite.ir.view import Op, OpId, ValueId, View
from amp_rewrite.rewrite.const_eval import moves_before, numbers
from amp_rewrite.rewrite.replacement import only_float32

# -- masks of scores: by selection, addition or multiplication -------------------------------------

ABSORBING = -1e30
"""The largest float32 number to absorb any score in a sum, the purpose of fills such as −3.4e38."""
NEGLIGIBLE = -DType.FLOAT16.max / 4
"""The largest score without weight next to a network's other scores, even if added twice; the bound of mask fills."""


@dataclass(frozen=True, slots=True)
class ScoreMask:
    """A mask of scores: `fill` replaces each score unless `value`, a bool, equals `visible_if` there.

    `visible`: True for visible scores, if they are known; then the ops read `value` itself, a bool or a summand.
    `zero_operand`: another operand of the ops, which is 0 for visible scores.
    `graded`: the summand is greater than `fill` for visible scores, and at most `fill` for hidden scores.
    """

    value: ValueId
    visible_if: bool
    fill: float
    visible: Array | None = None
    graded: bool = False
    zero_operand: ValueId | None = None


def selection_mask(view: View, op: Op, slot: int) -> ScoreMask | None:
    """Return the mask of a Where between scores and a number far below them."""
    condition, fill = op.inputs[0], number(view, op.inputs[3 - slot], axes=1)
    if condition is None or fill is None or not fill <= NEGLIGIBLE:
        return None
    return ScoreMask(condition, slot == 1, fill, _visible(view, condition, slot == 1))


def additive_mask(view: View, value: ValueId | None, low: DType) -> ScoreMask | None:
    """Return the mask in a summand of scores, if each element is 0 or the same number far below the scores."""
    op = view.producer(value)
    if value is None:
        return None
    if op is not None and op.kind == "Where" and op.inputs[0] is not None:
        branches = [number(view, branch, axes=1) for branch in op.inputs[1:]]
        cast = view.producer(op.inputs[0], "Cast")  # a bool that is True for nonzero numbers
        for slot, fill in enumerate(branches):
            zero = op.inputs[2] if slot == 0 and cast is not None and cast.inputs[0] == op.inputs[2] else None
            if fill is not None and fill <= NEGLIGIBLE and (branches[1 - slot] == 0 or zero is not None):
                visible = _visible(view, op.inputs[0], slot == 1)
                mask = ScoreMask(op.inputs[0], slot == 1, fill, visible, zero_operand=zero)
                return mask if hides_scores(fill, visible) else None
    array = numbers(view, value)
    if array is None and op is not None and op.kind == "Mul":
        return _graded_mask(view, op, value, low)
    fill = float(array.min(initial=0)) if array is not None else 0.0
    if array is None or not hides_scores(fill, array == 0) or not bool(((array == 0) | (array == fill)).all()):
        return None
    return ScoreMask(value, True, fill, array == 0)


def hides_scores(fill: float, visible: Array | None) -> bool:
    """True if adding a number makes a score irrelevant, in any row or in rows with another visible score."""
    row_attends = visible is not None and (visible.ndim == 0 or bool(visible.any(axis=-1).all()))
    return fill <= (NEGLIGIBLE if row_attends else ABSORBING)


def _visible(view: View, condition: ValueId, visible_if: bool) -> Array | None:
    array = numbers(view, condition)
    if array is not None:
        return np.asarray(array == visible_if)
    kinds = set()
    for move, moved in moves_before(view, condition):
        kinds.add(move.kind)
        array = numbers(view, moved)
        if array is not None:  # Expand does not change axes larger than 1
            visible = np.asarray(array == visible_if)
            if bool(visible.all()):
                return np.ones((), bool)
            return visible if kinds == {"Expand"} and min(array.shape[-2:], default=0) > 1 else None
    return None


def _graded_mask(view: View, op: Op, value: ValueId, low: DType) -> ScoreMask | None:
    """Return the mask (1 − m) · fill: whole numbers times a number far below the scores."""
    for factor, other in orders(op):
        fill = number(view, factor, axes=1)
        if fill is None or not -np.inf < fill <= ABSORBING:
            continue
        if find_facts(view, low)[other].whole is not None:
            return ScoreMask(value, True, fill, graded=True)
    return None


# -- attention -------------------------------------------------------------------------------------

_MAX_DEPTH = 8  # ops between a product and its softmax


@dataclass(slots=True)
class AttentionMatch:
    """A written-out attention.

    `ops` range from the first scaling to the last product, in order. `shared_ops` compute the mask and the biases, and
    other attentions may read their results. `keys` are transposed: their last axis counts keys. `zeroes_nan`: NaNs
    in the result of the softmax become 0.
    """

    softmax: Op
    last: Op
    ops: Sequence[OpId]
    values: ValueId
    zeroes_nan: bool
    queries: ValueId = field(init=False)
    keys: ValueId = field(init=False)
    scale: float = 1.0
    score_mask: ScoreMask | None = None
    biases: list[ValueId] = field(default_factory=list)
    shared_ops: list[OpId] = field(default_factory=list)


def match_attention(view: View, softmax: Op, low: DType) -> AttentionMatch | str | None:
    """Return the attention around a softmax, or the reason why it cannot be fused; None if it is not an attention."""
    match = _match_weights(view, softmax)
    path = _score_path(view, softmax.inputs[0], _MAX_DEPTH) if match is not None else None
    if match is None or path is None:
        return None
    walk = _ScoreWalk(view, match, low)
    reason = walk.follow(path)
    if reason:
        return reason
    product = path[-1][0]
    match.queries, match.keys = (walk.unscaled(product, slot) for slot in (0, 1))
    match.ops = sorted({*match.ops, *walk.ops})
    return _objection(view, match) or match


def _match_weights(view: View, softmax: Op) -> AttentionMatch | None:
    """Match the ops after the softmax: copies, zeros in place of NaN, and the product with the values."""
    weights, copies_before = _skip_copies(view, softmax.outputs[0])
    if weights is None:
        return None
    readers = {op.kind: op for op in view.readers(weights)}
    zeroes_nan = "IsNaN" in readers and "Where" in readers
    if zeroes_nan:
        test, where = readers["IsNaN"], readers["Where"]
        if where.inputs[0] != test.outputs[0] or where.inputs[2] != weights or number(view, where.inputs[1], 1) != 0:
            return None
        weights, copies = _skip_copies(view, where.outputs[0])
        copies_before = [*copies_before, test, where, *copies]
    products = [op for op in view.readers(weights) if op.kind == "MatMul"] if weights is not None else []
    values = products[0].inputs[1] if len(products) == 1 and products[0].inputs[0] == weights else None
    if values is None or values == weights:
        return None
    ops = [softmax.id, *(op.id for op in copies_before), products[0].id]
    return AttentionMatch(softmax, products[0], ops, values, zeroes_nan)


def _skip_copies(view: View, value: ValueId | None) -> tuple[ValueId | None, Sequence[Op]]:
    copies = list[Op]()
    while (reader := only_reader(view, value, captured=True, yielded=True)) is not None and _is_copy(view, reader):
        copies.append(reader)
        value = reader.outputs[0]
    return value, copies


def _is_copy(view: View, op: Op) -> bool:
    return op.kind == "Identity" or (op.kind == "Cast" and keeps_type(view, op))


_Step = tuple[Op, int]
"""An op and the slot of the scores among its inputs."""


def _score_path(view: View, value: ValueId | None, depth: int) -> tuple[_Step, ...] | None:
    """Return the steps from the scores of a softmax back to their product; None if other ops compute them."""
    op = view.producer(value)
    if op is None or depth == 0:
        return None
    if op.kind == "MatMul":
        return ((op, 0),)
    for slot in SCORE_OPS.get(op.kind, ()):
        if op.kind in SCALINGS and number(view, op.inputs[1 - slot], axes=1) is None:
            continue
        if op.kind in ("Cast", "Identity") and not _is_copy(view, op):
            continue
        rest = _score_path(view, op.inputs[slot], depth - 1)
        if rest is not None:
            return ((op, slot), *rest)
    return None


@dataclass(slots=True)
class _ScoreWalk:
    """A walk from a softmax back to the product of its scores; fills in the match, and collects the ops on the way."""

    view: View
    match: AttentionMatch
    low: DType
    ops: list[OpId] = field(default_factory=list)

    def follow(self, path: Sequence[_Step]) -> str | None:
        for op, slot in path:
            self.ops.append(op.id)
            if op.kind == "Tanh":
                return (
                    "its scores are capped by Tanh, and releases of the runtime differ in whether the mask comes first"
                )
            if op.kind in SCALINGS:
                self._scale(op, slot)
            elif op.kind in ("Add", "Where"):
                reason = self._mask(op, slot)
                if reason:
                    return reason
        return None

    def unscaled(self, product: Op, slot: int) -> ValueId:
        reader, value = product, product.inputs[slot]
        while (op := self.view.producer(value)) is not None and op.kind in SCALINGS:
            slots = (i for i in SCORE_OPS[op.kind] if number(self.view, op.inputs[1 - i], axes=1) is not None)
            scaled = next(slots, None)
            if scaled is None or not is_only_reader(self.view, value, reader):
                break
            self.ops.append(op.id)
            self._scale(op, scaled)
            reader, value = op, op.inputs[scaled]
        assert value is not None
        return value

    def _scale(self, op: Op, slot: int) -> None:
        factor = number(self.view, op.inputs[1 - slot])
        assert factor is not None
        scale = self.match.scale
        with np.errstate(all="ignore"):
            self.match.scale = float(np.float64(scale) / factor if op.kind == "Div" else scale * factor)

    def _mask(self, op: Op, slot: int) -> str | None:
        if self.match.scale != 1:
            return "its mask is scaled with its scores"
        if op.kind == "Add":
            return self._add(op.inputs[1 - slot])
        score_mask = selection_mask(self.view, op, slot)
        return self._hide(score_mask) if score_mask is not None else f"{op.name} replaces scores, but is not a mask"

    def _add(self, value: ValueId | None) -> str | None:
        view, match = self.view, self.match
        score_mask, op = additive_mask(view, value, self.low), view.producer(value)
        if score_mask is not None:
            match.shared_ops += [op.id] if op is not None and op.kind == "Where" else []
            match.biases += [score_mask.value] if score_mask.graded else []
            return self._hide(score_mask)
        if op is not None and op.kind == "Add":
            for mask, other in orders(op):
                if additive_mask(view, mask, self.low) is not None:
                    match.shared_ops.append(op.id)
                    return self._add(mask) or self._add(other)
        if op is not None and op.kind == "Where":
            for slot in (1, 2):
                score_mask = selection_mask(view, op, slot)
                if score_mask is not None and hides_scores(score_mask.fill, score_mask.visible):
                    match.shared_ops.append(op.id)
                    return self._hide(score_mask) or self._add(op.inputs[slot])
        if value is None or value in match.biases:
            return "a bias is added to its scores twice"
        match.biases.append(value)
        return None

    def _hide(self, score_mask: ScoreMask) -> str | None:
        if self.match.score_mask is not None:
            return "two masks hide its scores"
        self.match.score_mask = score_mask
        return None


def _objection(view: View, match: AttentionMatch) -> str | None:
    inside = set(match.ops)
    for op_id in match.ops:
        if not only_float32(view, (op_id,)):
            return "not all of it is float32"
        op = view.ops[op_id]
        result = op.outputs[0]
        if op_id != match.last.id and (op.scope != match.last.scope or not confined(view, result, inside)):
            return f"other ops read the result of {op.name}"
    if not DType.FLOAT.smallest_subnormal <= match.scale <= DType.FLOAT.max:
        return f"its scale is {match.scale:g}, but runtimes require a positive, finite scale"
    return None
