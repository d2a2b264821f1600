"""Attention as exporters write it out: a product of queries and keys, ops on its scores, a softmax, a product.

Only structure is read here. `legality` decides whether the operator of the standard computes the same.
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
from amp_rewrite.rewrite.const_eval import moves_behind, numbers
from amp_rewrite.rewrite.replacement import only_float32

# -- masks of scores, by selection, by addition, by multiplication ---------------------------------

LOST = -1e30
"""The largest float32 number that swallows any score that it is added to, as −3.4e38 is meant to."""
OUT_OF_REACH = -DType.FLOAT16.max / 4
"""The largest number without any weight beside a score of a network, also twice: masks are bounded to it."""


@dataclass(frozen=True, slots=True)
class ScoreMask:
    """A mask of scores: `fill` stands for the scores at which `value`, a bool, is not `shows`.

    `shown`: True where a score is seen, if that is known; `value` is then what the ops read, a bool or what is added.
    `nothing`: another operand of the ops, which is 0 where a score is seen.
    `counts`: what is added is more than `fill` where a score is seen, and no more than that where it is not.
    """

    value: ValueId
    shows: bool
    fill: float
    shown: Array | None = None
    counts: bool = False
    nothing: ValueId | None = None


def selected(view: View, op: Op, slot: int) -> ScoreMask | None:
    """Return the mask of a Where between scores and a number far below them."""
    condition, fill = op.inputs[0], number(view, op.inputs[3 - slot], axes=1)
    if condition is None or fill is None or not fill <= OUT_OF_REACH:
        return None
    return ScoreMask(condition, slot == 1, fill, _seen(view, condition, slot == 1))


def added(view: View, value: ValueId | None, low: DType) -> ScoreMask | None:
    """Return the mask in a summand of scores, if it is 0 and one number far below them."""
    op = view.producer(value)
    if value is None:
        return None
    if op is not None and op.kind == "Where" and op.inputs[0] is not None:
        branches = [number(view, branch, axes=1) for branch in op.inputs[1:]]
        test = view.producer(op.inputs[0], "Cast")  # a bool that states that a number is not 0
        for at, fill in enumerate(branches):
            tested = op.inputs[2] if at == 0 and test is not None and test.inputs[0] == op.inputs[2] else None
            if fill is not None and fill <= OUT_OF_REACH and (branches[1 - at] == 0 or tested is not None):
                shown = _seen(view, op.inputs[0], at == 1)
                return ScoreMask(op.inputs[0], at == 1, fill, shown, nothing=tested) if hides(fill, shown) else None
    held = numbers(view, value)
    if held is None and op is not None and op.kind == "Mul":
        return _multiple(view, op, value, low)
    fill = float(held.min(initial=0)) if held is not None else 0.0
    if held is None or not hides(fill, held == 0) or not bool(((held == 0) | (held == fill)).all()):
        return None
    return ScoreMask(value, True, fill, held == 0)


def hides(fill: float, shown: Array | None) -> bool:
    """True if a score to which a number is added is lost: wholly, or beside another one that its row shows."""
    seeing = shown is not None and (shown.ndim == 0 or bool(shown.any(axis=-1).all()))
    return fill <= (OUT_OF_REACH if seeing else LOST)


def _seen(view: View, condition: ValueId, shows: bool) -> Array | None:
    held = numbers(view, condition)
    if held is not None:
        return np.asarray(held == shows)
    kinds = set()
    for move, moved in moves_behind(view, condition):
        kinds.add(move.kind)
        held = numbers(view, moved)
        if held is not None:  # Expand leaves an axis of more than one as it is
            shown, wide = np.asarray(held == shows), kinds == {"Expand"} and min(held.shape[-2:], default=0) > 1
            return np.ones((), bool) if bool(shown.all()) else shown if wide else None
    return None


def _multiple(view: View, op: Op, value: ValueId, low: DType) -> ScoreMask | None:
    """Return the mask (1 − m) · fill: whole numbers times one far below scores."""
    for factor, other in orders(op):
        fill = number(view, factor, axes=1)
        if fill is not None and np.isfinite(fill) and fill <= LOST and find_facts(view, low)[other].whole is not None:
            return ScoreMask(value, True, fill, counts=True)
    return None


# -- attention -------------------------------------------------------------------------------------

_DEPTH = 8  # ops between a product and its softmax


@dataclass(slots=True)
class AttentionForm:
    """One attention, written out. `ops`: from the first scaling to the last product, in order; `beside` them those that
    make what is added to the scores of mask and bias, and that other attentions may read, too.

    `keys` are transposed: their last axis counts keys. `zeroed`: a softmax that is NaN becomes 0.
    """

    softmax: Op
    last: Op
    ops: Sequence[OpId]
    values: ValueId
    zeroed: bool
    queries: ValueId = field(init=False)
    keys: ValueId = field(init=False)
    scale: float = 1.0
    hiding: ScoreMask | None = None
    biases: list[ValueId] = field(default_factory=list)
    beside: list[OpId] = field(default_factory=list)


def form_of(view: View, softmax: Op, low: DType) -> AttentionForm | str | None:
    """Return the attention around a softmax, or why it cannot be fused; None if it is not an attention."""
    form = _weighted(view, softmax)
    path = _path(view, softmax.inputs[0], _DEPTH) if form is not None else None
    if form is None or path is None:
        return None
    reading = _Reading(view, form, low)
    fault = reading.take(path)
    if fault:
        return fault
    product = path[-1][0]
    form.queries, form.keys = (reading.unscaled(product, slot) for slot in (0, 1))
    form.ops = sorted({*form.ops, *reading.ops})
    return _unfit(view, form) or form


def _weighted(view: View, softmax: Op) -> AttentionForm | None:
    """Return the ops after the softmax: copies, zeros for NaN, and the product with values."""
    weights, between = _uncopied(view, softmax.outputs[0])
    if weights is None:
        return None
    readers = {op.kind: op for op in view.readers(weights)}
    zeroed = "IsNaN" in readers and "Where" in readers
    if zeroed:
        test, choice = readers["IsNaN"], readers["Where"]
        if choice.inputs[0] != test.outputs[0] or choice.inputs[2] != weights or number(view, choice.inputs[1], 1) != 0:
            return None
        weights, copies = _uncopied(view, choice.outputs[0])
        between = [*between, test, choice, *copies]
    products = [op for op in view.readers(weights) if op.kind == "MatMul"] if weights is not None else []
    values = products[0].inputs[1] if len(products) == 1 and products[0].inputs[0] == weights else None
    if values is None or values == weights:
        return None
    ops = [softmax.id, *(op.id for op in between), products[0].id]
    return AttentionForm(softmax, products[0], ops, values, zeroed)


def _uncopied(view: View, value: ValueId | None) -> tuple[ValueId | None, Sequence[Op]]:
    copies = list[Op]()
    while (reader := only_reader(view, value, captured=True, yielded=True)) is not None and _copies(view, reader):
        copies.append(reader)
        value = reader.outputs[0]
    return value, copies


def _copies(view: View, op: Op) -> bool:
    return op.kind == "Identity" or (op.kind == "Cast" and keeps_type(view, op))


_Step = tuple[Op, int]
"""An op, and the operand through which it reads the scores."""


def _path(view: View, value: ValueId | None, depth: int) -> tuple[_Step, ...] | None:
    """Return the steps from a softmax's scores to their product; None if they are made in another way."""
    op = view.producer(value)
    if op is None or depth == 0:
        return None
    if op.kind == "MatMul":
        return ((op, 0),)
    for slot in SCORE_OPS.get(op.kind, ()):
        if op.kind in SCALINGS and number(view, op.inputs[1 - slot], axes=1) is None:
            continue
        if op.kind in ("Cast", "Identity") and not _copies(view, op):
            continue
        rest = _path(view, op.inputs[slot], depth - 1)
        if rest is not None:
            return ((op, slot), *rest)
    return None


@dataclass(slots=True)
class _Reading:
    """The way up from a softmax. It fills in the form; `ops` are those that it passes."""

    view: View
    form: AttentionForm
    low: DType
    ops: list[OpId] = field(default_factory=list)

    def take(self, path: Sequence[_Step]) -> str | None:
        for op, slot in path:
            self.ops.append(op.id)
            if op.kind == "Tanh":
                return (
                    "its scores are capped by Tanh, and releases of the runtime differ in whether the mask comes first"
                )
            if op.kind in SCALINGS:
                self._scale(op, slot)
            elif op.kind in ("Add", "Where"):
                fault = self._mask(op, slot)
                if fault:
                    return fault
        return None

    def unscaled(self, product: Op, slot: int) -> ValueId:
        reader, value = product, product.inputs[slot]
        while (op := self.view.producer(value)) is not None and op.kind in SCALINGS:
            at = next((i for i in SCORE_OPS[op.kind] if number(self.view, op.inputs[1 - i], axes=1) is not None), None)
            if at is None or not is_only_reader(self.view, value, reader):
                break
            self.ops.append(op.id)
            self._scale(op, at)
            reader, value = op, op.inputs[at]
        assert value is not None
        return value

    def _scale(self, op: Op, slot: int) -> None:
        factor = number(self.view, op.inputs[1 - slot])
        assert factor is not None
        scale = self.form.scale
        with np.errstate(all="ignore"):
            self.form.scale = float(np.float64(scale) / factor if op.kind == "Div" else scale * factor)

    def _mask(self, op: Op, slot: int) -> str | None:
        if self.form.scale != 1:
            return "its mask is scaled with its scores"
        if op.kind == "Add":
            return self._add(op.inputs[1 - slot])
        hiding = selected(self.view, op, slot)
        return self._hide(hiding) if hiding is not None else f"{op.name} replaces scores by what is not a mask"

    def _add(self, value: ValueId | None) -> str | None:
        view, form = self.view, self.form
        hiding, op = added(view, value, self.low), view.producer(value)
        if hiding is not None:
            form.beside += [op.id] if op is not None and op.kind == "Where" else []
            form.biases += [hiding.value] if hiding.counts else []
            return self._hide(hiding)
        if op is not None and op.kind == "Add":
            for mask, other in orders(op):
                if added(view, mask, self.low) is not None:
                    form.beside.append(op.id)
                    return self._add(mask) or self._add(other)
        if op is not None and op.kind == "Where":
            for slot in (1, 2):
                hiding = selected(view, op, slot)
                if hiding is not None and hides(hiding.fill, hiding.shown):
                    form.beside.append(op.id)
                    return self._hide(hiding) or self._add(op.inputs[slot])
        if value is None or value in form.biases:
            return "a bias is added to its scores twice"
        form.biases.append(value)
        return None

    def _hide(self, hiding: ScoreMask) -> str | None:
        if self.form.hiding is not None:
            return "two masks hide its scores"
        self.form.hiding = hiding
        return None


def _unfit(view: View, form: AttentionForm) -> str | None:
    inside = set(form.ops)
    for op_id in form.ops:
        if not only_float32(view, (op_id,)):
            return "not all of it is float32"
        op = view.ops[op_id]
        result = op.outputs[0]
        if op_id != form.last.id and (op.scope != form.last.scope or not confined(view, result, inside)):
            return f"others read what {op.name} gives"
    if not DType.FLOAT.smallest_subnormal <= form.scale <= DType.FLOAT.max:
        return f"its scale is {form.scale:g}, and the runtime wants one above 0"
    return None
