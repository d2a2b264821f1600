"""What a loss of the model's own divides a sum by: the weight of a batch in a mean over batches.

In the mean of a label loss that is the number of targets that are not ignored, each times the weight of its class. In a
quotient of sums it is the sum below, such as that of a mask.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.attributes import attribute, int_attribute, text_attribute
from amp_rewrite.ir.dataflow import multiples, origin
from amp_rewrite.ir.nodes import MAIN, Op, ValueId
from amp_rewrite.ir.op_classes import AFFINE, CASTS, CLAMPS, LABEL_LOSSES, SUMS
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.autodiff.builder import Builder


class Divisor(NamedTuple):
    """A value that is a sum, or (`labels`) the classes of a label loss, with their weights and the ignored class."""

    value: ValueId
    labels: bool = False
    weights: ValueId | None = None
    ignored: int | None = None


def append_divisor(b: Builder, loss: str) -> str | None:
    """Append what a loss divides by, a float32 scalar; None unless the graph shows one for all terms."""
    view, value = b.facts.view, b.known(loss)
    assert value is not None
    found = _Terms(view, _varying(view)).of(value.id)
    if found is None or len(found) != 1:
        return None
    (divisor,) = found
    name, weights = view.value_name(divisor.value), divisor.weights
    if not divisor.labels:
        return b.reshape(b.cast(name, DType.FLOAT), [])
    shares = share_of(b, name, None if weights is None else view.value_name(weights), divisor.ignored)
    return b.reduce("ReduceSum", shares, None, keepdims=False)


def share_of(b: Builder, labels: str, weights: str | None, ignored: int | None) -> str:
    """Append how much each class of `labels` counts in a mean: the weight of its class, and 0 if it is ignored."""
    dropped, dtype = None, b.dtype(labels) or DType.INT64
    if ignored is not None:
        dropped = b.op("Equal", labels, b.scalar(ignored, dtype))
    kept = b.op("Equal", labels, labels) if dropped is None else b.op("Not", dropped)
    share = b.op("Cast", kept, to=DType.FLOAT.code)
    if weights is None:
        return share
    safe = labels
    if dropped is not None:  # it may be out of the range of classes
        safe = b.op("Where", dropped, b.scalar(0, dtype), labels)
    return b.op("Mul", b.op("Gather", weights, safe), share)


def _varying(view: View) -> frozenset[ValueId]:
    """The values of the main graph that differ between batches."""
    constants = view.constants
    found = {v.id for v in view.values if v.scope == MAIN and v.producer is None and v.id not in constants}
    for position in view.scopes[MAIN].ops:
        op = view.ops[position]
        if op.bodies or found.intersection(op.operands):
            found.update(value for value in op.outputs if value is not None)
    return frozenset(found)


@dataclass(frozen=True)
class _Terms:
    """The terms of a loss, and what each divides by. `varying`: the values that differ between batches."""

    view: View
    varying: frozenset[ValueId]

    def of_all(self, values: Iterable[ValueId]) -> frozenset[Divisor] | None:
        """Return the divisors of values; None if that of one is unknown."""
        found = [self.of(value) for value in values]
        return None if None in found else frozenset().union(*(one for one in found if one is not None))

    def of(self, value: ValueId) -> frozenset[Divisor] | None:
        """Return the divisors of the terms of a value: none of one that no batch changes; None if unknown."""
        value = origin(self.view, value, multiples(self.view))
        op = self.view.producer(value)
        if value not in self.varying:
            return frozenset()
        if op is None:
            return None
        if op.kind in LABEL_LOSSES and _reduction(op) == "mean":
            return frozenset((self.classes(op),))
        varying = [v for v in op.operands if v in self.varying]
        numerator = op.kind != "Div" or varying == [op.inputs[0]]
        if op.kind in SUMS or (op.kind in AFFINE and len(varying) == 1 and numerator):
            return self.of_all(varying)
        if op.kind == "Div" and all(map(self.sums, op.operands)):
            return frozenset((Divisor(origin(self.view, op.operands[1], self.bounded)),))
        return None

    def classes(self, op: Op) -> Divisor:
        """Return the divisor of the mean of a label loss."""
        stated = attribute(op.node, "ignore_index")
        weights = op.inputs[2] if len(op.inputs) > 2 else None
        labels = op.inputs[1]
        assert labels is not None
        return Divisor(labels, True, weights, None if stated is None else int_attribute(op.node, "ignore_index", 0))

    def sums(self, value: ValueId) -> bool:
        """True for a sum over a batch, perhaps bounded, times a constant or with one added."""
        bounded, multiple = self.bounded, multiples(self.view)
        op = self.view.producer(
            origin(self.view, value, lambda op: multiple(op) if bounded(op) is None else bounded(op))
        )
        if op is None:
            return False
        if op.kind in SUMS:
            return all(v not in self.varying or self.sums(v) for v in op.operands)
        return op.kind == "ReduceSum" or (op.kind in LABEL_LOSSES and _reduction(op) == "sum")

    def bounded(self, op: Op) -> ValueId | None:
        """Return what a Cast converts, and what a Clip, Max or Min bounds by constants."""
        varying = [v for v in op.operands if v in self.varying]
        return varying[0] if op.kind in CASTS | CLAMPS and len(varying) == 1 else None


def _reduction(op: Op) -> str:
    return text_attribute(op.node, "reduction", "mean")
