"""Attention as exporters write it out: a product of queries and keys, what is done to its scores, a softmax, a product.

What is read here is structure alone. `attention` asks whether the operator of the standard computes the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import alone, keeps_type, number, only_reader
from amp_rewrite.ir.op_classes import SCALINGS
from amp_rewrite.ir.schema import attribute
from amp_rewrite.ir.view import Op, OpId, ValueId, View
from amp_rewrite.rewrite.attention.masks import Hiding, added, hides, selected

_DEPTH = 8  # ops between a product and its softmax


@dataclass(frozen=True, slots=True)
class Form:
    """One attention, written out. `ops`: from the first scaling to the last product, in order; `beside` them those that
    make what is added to the scores of mask and bias, and that other attentions may read, too.

    `keys` are transposed: their last axis counts keys. `zeroed`: a softmax that is NaN becomes 0. `turned`: the values
    are transposed, too, and the result is. `parting` splits the first axis of the scores in batch and heads, `joining`
    puts those of the weights together again; `merged` are mask and biases that are applied before the one.
    """

    ops: tuple[OpId, ...]
    last: Op
    queries: ValueId
    keys: ValueId
    values: ValueId
    scale: float
    hiding: Hiding | None
    biases: tuple[ValueId, ...]
    zeroed: bool
    beside: tuple[OpId, ...] = ()
    turned: bool = False
    parting: Op | None = None
    joining: Op | None = None
    merged: frozenset[ValueId] = frozenset()

    def weights(self, view: View) -> Op:
        """The softmax."""
        (found,) = [view.ops[op] for op in self.ops if view.ops[op].kind == "Softmax"]
        return found


def form_of(view: View, softmax: Op) -> Form | str | None:
    """Return the attention around a softmax, or why it cannot be fused; None if it is not an attention."""
    end = _end(view, softmax)
    path = _path(view, softmax.inputs[0], _DEPTH) if end is not None else None
    if end is None or path is None:
        return None
    found = _Found()
    fault = found.take(view, path)
    if fault:
        return fault
    if (found.parting is None) != (end.joining is None):
        return "its scores are laid out anew, and not back"
    product = path[-1][0]
    queries, keys = (_scaled(view, product, slot, found) for slot in (0, 1))
    axis = attribute(softmax.node, "axis")
    if (axis.i if axis is not None else -1) not in (-1, 2, 3):
        return "its softmax is not over the last axis"
    ops = sorted({*found.ops, softmax.id, end.last.id, *(op.id for op in end.between)})
    assert queries is not None and keys is not None and end.values is not None
    form = Form(
        ops=tuple(ops),
        last=end.last,
        queries=queries,
        keys=keys,
        values=end.values,
        scale=found.scale,
        hiding=found.hiding,
        biases=tuple(found.biases),
        zeroed=any(op.kind == "Where" for op in end.between),
        beside=tuple(found.beside),
        turned=end.turned,
        parting=found.parting,
        joining=end.joining,
        merged=frozenset(found.merged),
    )
    return _unfit(view, form) or form


@dataclass(frozen=True, slots=True)
class _End:
    """The product of weights and values, and the ops before it that copy the weights, move them or make 0 of NaN."""

    last: Op
    values: ValueId | None
    between: Sequence[Op]
    turned: bool
    joining: Op | None


def _end(view: View, softmax: Op) -> _End | None:
    weights, between = _uncopied(view, softmax.outputs[0])
    if weights is None:
        return None
    readers = {op.kind: op for op in view.readers(weights)}
    if "IsNaN" in readers and "Where" in readers:
        test, choice = readers["IsNaN"], readers["Where"]
        if choice.inputs[0] != test.outputs[0] or choice.inputs[2] != weights or number(view, choice.inputs[1], 1) != 0:
            return None
        weights, copies = _uncopied(view, choice.outputs[0])
        between = [*between, test, choice, *copies]
    joining, turning = only_reader(view, weights, "Reshape", captured=True, yielded=True), None
    if joining is not None:
        between, weights = [*between, joining], joining.outputs[0]
    elif (turning := only_reader(view, weights, "Transpose", captured=True, yielded=True)) is not None:
        perm = attribute(turning.node, "perm")
        if perm is None or list(perm.ints) not in ([0, 2, 1], [0, 1, 3, 2]):
            return None
        between, weights = [*between, turning], turning.outputs[0]
    products = [op for op in view.readers(weights) if op.kind == "MatMul"] if weights is not None else []
    at = 0 if turning is None else 1
    fits = len(products) == 1 and products[0].inputs[at] == weights and products[0].inputs[1 - at] != weights
    return _End(products[0], products[0].inputs[1 - at], between, turning is not None, joining) if fits else None


def _uncopied(view: View, value: ValueId | None) -> tuple[ValueId | None, Sequence[Op]]:
    """Follow a chain of copies that each are the only reader; return the value at its end and the copies."""
    copies = list[Op]()
    while (reader := only_reader(view, value, captured=True, yielded=True)) is not None and _copies(view, reader):
        copies.append(reader)
        value = reader.outputs[0]
    return value, copies


def _copies(view: View, op: Op) -> bool:
    """True for an Identity, and for a Cast to the type that it reads."""
    return op.kind == "Identity" or (op.kind == "Cast" and keeps_type(view, op))


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
        if op.kind in SCALINGS and number(view, op.inputs[1 - slot], axes=1) is None:
            continue
        if op.kind in ("Cast", "Identity") and not _copies(view, op):
            continue
        rest = _path(view, op.inputs[slot], depth - 1)
        if rest is not None:
            return ((op, slot), *rest)
    return None


_SCORES = {
    "Mul": (0, 1),
    "Div": (0,),
    "Add": (0, 1),
    "Where": (1, 2),
    "Cast": (0,),
    "Identity": (0,),
    "Reshape": (0,),
    "Tanh": (0,),
}


@dataclass(slots=True)
class _Found:
    """The ops and values collected on the way up from a softmax."""

    ops: list[OpId] = field(default_factory=list)
    scale: float = 1.0
    hiding: Hiding | None = None
    biases: list[ValueId] = field(default_factory=list)
    beside: list[OpId] = field(default_factory=list)
    parting: Op | None = None
    merged: list[ValueId] = field(default_factory=list)

    def take(self, view: View, path: Sequence[_Step]) -> str | None:
        """Read the steps; why they are none of an attention."""
        for op, slot in path:
            self.ops.append(op.id)
            if op.kind == "Tanh":
                return (
                    "its scores are capped by Tanh, and releases of the runtime differ in whether the mask comes first"
                )
            if op.kind == "Reshape":
                if self.parting is not None:
                    return "its scores are laid out anew twice"
                self.parting = op
            elif op.kind in SCALINGS:
                self.scaled_by(view, op, slot)
            elif op.kind in ("Add", "Where"):
                fault = self._mask(view, op, slot)
                if fault:
                    return fault
        return None

    def scaled_by(self, view: View, op: Op, slot: int) -> None:
        factor = number(view, op.inputs[1 - slot], axes=1)
        assert factor is not None
        with np.errstate(all="ignore"):
            self.scale = float(np.float64(self.scale) / factor if op.kind == "Div" else self.scale * factor)

    def _mask(self, view: View, op: Op, slot: int) -> str | None:
        if self.scale != 1:
            return "its mask is scaled with its scores"
        if op.kind == "Add":
            return self._add(view, op.inputs[1 - slot])
        hiding = selected(view, op, slot)
        return self._hide(hiding) if hiding is not None else f"{op.name} replaces scores by what is not a mask"

    def _add(self, view: View, value: ValueId | None) -> str | None:
        """Take what is added to scores: a mask, a bias, or the sum of both."""
        hiding, op = added(view, value), view.producer(value)
        if hiding is not None:
            self.beside += [op.id] if op is not None and op.kind == "Where" else []
            self.biases += [hiding.value] if hiding.counts else []
            return self._hide(hiding)
        for slot in (0, 1) if op is not None and op.kind == "Add" else ():
            if op is not None and added(view, op.inputs[slot]) is not None:
                self.beside.append(op.id)
                return self._add(view, op.inputs[slot]) or self._add(view, op.inputs[1 - slot])
        for slot in (1, 2) if op is not None and op.kind == "Where" else ():
            replaced = selected(view, op, slot) if op is not None else None
            if op is not None and replaced is not None and hides(replaced.fill, replaced.shown):
                self.beside.append(op.id)
                return self._hide(replaced) or self._add(view, op.inputs[slot])
        if value is not None and value not in self.biases:
            self.biases.append(value)
            self.merged += [value] if self.parting is not None else []
            return None
        return "a bias is added to its scores twice"

    def _hide(self, hiding: Hiding) -> str | None:
        if self.hiding is not None:
            return "two masks hide its scores"
        self.hiding = hiding
        self.merged += [hiding.value] if self.parting is not None else []
        return None


def _scaled(view: View, product: Op, slot: int, found: _Found) -> ValueId | None:
    """An operand of a product without the factors that only this product's operand has."""
    reader, value = product, product.inputs[slot]
    while value is not None and (op := view.producer(value)) is not None and op.kind in SCALINGS:
        at = next((i for i in _SCORES[op.kind] if number(view, op.inputs[1 - i], axes=1) is not None), None)
        if at is None or not alone(view, value, reader):
            return value
        found.ops.append(op.id)
        found.scaled_by(view, op, at)
        reader, value = op, op.inputs[at]
    return value


def _unfit(view: View, form: Form) -> str | None:
    """Return which types, readers or numbers of a form forbid fusing it."""
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
