"""Attention as exporters write it out: a product of queries and keys, what is done to its scores, a softmax, a product.

What is read here is structure alone. `attention` asks whether the operator of the standard computes the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.files.tensors import Array
from amp_rewrite.fuse.cone import moves_behind, numbers
from amp_rewrite.fuse.fusion import alone
from amp_rewrite.schema import attribute
from amp_rewrite.view import Op, OpId, ValueId, View

LOST = -1e30
"""At or below it a float32 number swallows the score that it is added to; it is what −3.4e38 is chosen for."""
OUT_OF_REACH = -DType.FLOAT16.max / 2
"""At or below it a number has no weight beside any score of a network: masks are bounded to it before this."""
_DEPTH = 6  # ops between a product and its softmax


@dataclass(frozen=True, slots=True)
class Hiding:
    """Which scores a softmax is not to see: those where `value`, a bool, is not `shows`, have `fill` instead.

    `shown`: True where a score is seen, if that is known; `value` is then what the ops read, a bool or what is added.
    """

    value: ValueId
    shows: bool
    fill: float
    shown: Array | None = None


@dataclass(frozen=True, slots=True)
class Form:
    """One attention, written out. `ops`: from the first scaling to the last product, in order; `beside` them those that
    make what is added to the scores of mask and bias, and that other attentions may read, too.

    `keys` are transposed: their last axis counts keys. `zeroed`: a softmax that is NaN becomes 0.
    """

    ops: tuple[OpId, ...]
    last: Op
    queries: ValueId
    keys: ValueId
    values: ValueId
    scale: float
    hiding: Hiding | None
    bias: ValueId | None
    zeroed: bool
    beside: tuple[OpId, ...] = ()


def form_of(view: View, softmax: Op) -> Form | str | None:
    """What a softmax is the heart of; None where that is no attention, and why not where something forbids it."""
    end = _end(view, softmax)
    path = _path(view, softmax.inputs[0], _DEPTH) if end is not None else None
    if end is None or path is None:
        return None
    found = _Found()
    fault = found.take(view, path)
    if fault:
        return fault
    product = path[-1][0]
    queries, keys = (_scaled(view, product, slot, found) for slot in (0, 1))
    axis = attribute(softmax.node, "axis")
    if (axis.i if axis is not None else -1) not in (-1, 3):
        return "its softmax is not over the last axis"
    last, zeroing = end
    ops = sorted({*found.ops, softmax.id, last.id, *(op.id for op in zeroing)})
    values = last.inputs[1]
    assert queries is not None and keys is not None and values is not None
    zeroed, beside = bool(zeroing), tuple(found.beside)
    form = Form(tuple(ops), last, queries, keys, values, found.scale, found.hiding, found.bias, zeroed, beside)
    return _unfit(view, form) or form


def _end(view: View, softmax: Op) -> tuple[Op, Sequence[Op]] | None:
    """The product of weights and values, and the ops before it that make 0 of NaN."""
    weights = softmax.outputs[0]
    if weights is None:
        return None
    readers = {op.kind: op for op in view.readers(weights)}
    zeroing: Sequence[Op] = ()
    if "IsNaN" in readers and "Where" in readers:
        test, choice = readers["IsNaN"], readers["Where"]
        if choice.inputs[0] != test.outputs[0] or choice.inputs[2] != weights or number(view, choice.inputs[1]) != 0:
            return None
        zeroing, weights = (test, choice), choice.outputs[0]
    products = [op for op in view.readers(weights) if op.kind == "MatMul"] if weights is not None else []
    fits = len(products) == 1 and products[0].inputs[0] == weights and products[0].inputs[1] != weights
    return (products[0], zeroing) if fits else None


_Step = tuple[Op, int]
"""An op, and the operand through which it reads the scores."""


def _path(view: View, value: ValueId | None, depth: int) -> tuple[_Step, ...] | None:
    """The steps from a softmax's scores to the product that makes them; None if they are made in another way."""
    op = view.producer(value)
    if op is None or depth == 0:
        return None
    if op.kind == "MatMul":
        return ((op, 0),)
    for slot in _SCORES.get(op.kind, ()):
        if op.kind in ("Mul", "Div") and number(view, op.inputs[1 - slot]) is None:
            continue
        rest = _path(view, op.inputs[slot], depth - 1)
        if rest is not None:
            return ((op, slot), *rest)
    return None


_SCORES = {"Mul": (0, 1), "Div": (0,), "Add": (0, 1), "Where": (1, 2)}


@dataclass(slots=True)
class _Found:
    """What is read on the way up."""

    ops: list[OpId] = field(default_factory=list)
    scale: float = 1.0
    hiding: Hiding | None = None
    bias: ValueId | None = None
    beside: list[OpId] = field(default_factory=list)

    def take(self, view: View, path: Sequence[_Step]) -> str | None:
        """Read the steps; why they are none of an attention."""
        for op, slot in path:
            self.ops.append(op.id)
            if op.kind in ("Mul", "Div"):
                self.scaled_by(view, op, slot)
            elif op.kind in ("Add", "Where"):
                fault = self._mask(view, op, slot)
                if fault:
                    return fault
        return None

    def scaled_by(self, view: View, op: Op, slot: int) -> None:
        factor = number(view, op.inputs[1 - slot])
        assert factor is not None
        with np.errstate(all="ignore"):
            self.scale = float(np.float64(self.scale) / factor if op.kind == "Div" else self.scale * factor)

    def _mask(self, view: View, op: Op, slot: int) -> str | None:
        if self.scale != 1:
            return "its mask is scaled with its scores"
        if op.kind == "Add":
            return self._add(view, op.inputs[1 - slot])
        hiding = _selected(view, op, slot)
        return self._hide(hiding) if hiding is not None else f"{op.name} replaces scores by what is no mask"

    def _add(self, view: View, value: ValueId | None) -> str | None:
        """Take what is added to scores: a mask, a bias, or the sum of both."""
        hiding, op = _added(view, value), view.producer(value)
        if hiding is not None:
            self.beside += [op.id] if op is not None and op.kind == "Where" else []
            return self._hide(hiding)
        for slot in (0, 1) if op is not None and op.kind == "Add" else ():
            if op is not None and _added(view, op.inputs[slot]) is not None:
                self.beside.append(op.id)
                return self._add(view, op.inputs[slot]) or self._add(view, op.inputs[1 - slot])
        if self.bias is not None:
            return "two biases are added to its scores"
        self.bias = value
        return None

    def _hide(self, hiding: Hiding) -> str | None:
        if self.hiding is not None:
            return "two masks hide its scores"
        self.hiding = hiding
        return None


def _selected(view: View, op: Op, slot: int) -> Hiding | None:
    """The mask by which a Where takes scores or a number far below them."""
    condition, fill = op.inputs[0], number(view, op.inputs[3 - slot])
    if condition is None or fill is None or not fill <= OUT_OF_REACH:
        return None
    return Hiding(condition, slot == 1, fill, _seen(view, condition, slot == 1))


def _added(view: View, value: ValueId | None) -> Hiding | None:
    """The mask that is added to scores, if it is 0 and one number far below them."""
    op = view.producer(value)
    if value is None:
        return None
    if op is not None and op.kind == "Where" and op.inputs[0] is not None:
        branches = [number(view, branch) for branch in op.inputs[1:]]
        for at, fill in enumerate(branches):
            if fill is not None and fill <= OUT_OF_REACH and branches[1 - at] == 0:
                shown = _seen(view, op.inputs[0], at == 1)
                return Hiding(op.inputs[0], at == 1, fill, shown) if _hides(fill, shown) else None
    held = numbers(view, value)
    fill = float(held.min(initial=0)) if held is not None else 0.0
    if held is None or not _hides(fill, held == 0) or not bool(((held == 0) | (held == fill)).all()):
        return None
    return Hiding(value, True, fill, held == 0)


def _hides(fill: float, shown: Array | None) -> bool:
    """Whether a score to which a number is added is lost: wholly, or, where its row shows another, beside that."""
    seeing = shown is not None and (shown.ndim == 0 or bool(shown.any(axis=-1).all()))
    return fill <= (OUT_OF_REACH if seeing else LOST)


def _seen(view: View, condition: ValueId, shows: bool) -> Array | None:
    """True where a condition shows a score, if that is known; with axes of 1 where it is the same all along one."""
    held = numbers(view, condition)
    if held is not None:
        return np.asarray(held == shows)
    kinds = set()
    for move, moved in moves_behind(view, condition):
        kinds.add(move.kind)
        held = numbers(view, moved)
        if held is not None and bool((held == shows).all()):
            return np.ones((), bool)
        if held is not None:  # Expand leaves an axis of more than one as it is
            wide = kinds == {"Expand"} and min(held.shape[-2:], default=0) > 1
            return np.asarray(held == shows) if wide else None
    return None


def _scaled(view: View, product: Op, slot: int, found: _Found) -> ValueId | None:
    """An operand of a product without the factors that only this product's operand has."""
    reader, value = product, product.inputs[slot]
    while value is not None and (op := view.producer(value)) is not None and op.kind in ("Mul", "Div"):
        at = next((i for i in _SCORES[op.kind] if number(view, op.inputs[1 - i]) is not None), None)
        if at is None or not alone(view, value, reader):
            return value
        found.ops.append(op.id)
        found.scaled_by(view, op, at)
        reader, value = op, op.inputs[at]
    return value


def number(view: View, value: ValueId | None) -> float | None:
    """The one number that a constant of at most one axis holds."""
    tensor = view.constant(value)
    if tensor is None or list(tensor.dims) not in ([], [1]):
        return None
    held = view.model.array(tensor)
    return float(held.item()) if held.dtype.kind in "fiu" else None


def _unfit(view: View, form: Form) -> str | None:
    """What of a form's types, readers or numbers forbids to fuse it."""
    inside = set(form.ops)
    for op_id in form.ops:
        op = view.ops[op_id]
        floats = [v for v in (*op.inputs, *op.outputs) if v is not None and (d := view.dtype(v)) and d.floating]
        if any(view.dtype(v) is not DType.FLOAT for v in floats):
            return "not all of it is float32"
        made = op.outputs[0]
        outer = made is None or any(use.op not in inside for use in view.uses[made])
        if op_id != form.last.id and (outer or made in view.yielded or op.scope != form.last.scope):
            return f"others read what {op.name} gives"
    if not (math.isfinite(form.scale) and np.float32(form.scale) > 0):
        return f"its scale is {form.scale:g}, and the runtime wants one above 0"
    return None
