"""Logits behind probabilities: a loss that takes the result of a Softmax or Sigmoid reads what goes into it.

A cross entropy of probabilities that is taken for one of logits applies the softmax twice. It trains, but badly: the
loss cannot reach 0, and its gradients are small. Read from the logits, the loss also keeps the digits that a
probability close to 1 has lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from amp_rewrite.ir.attributes import int_attribute
from amp_rewrite.ir.dataflow import casts_floats, origin
from amp_rewrite.ir.versions import FIRST_ROW_SOFTMAX
from amp_rewrite.ir.view import ValueId, View
from amp_rewrite.rewrite.autodiff.facts import Shape


@dataclass(frozen=True, slots=True)
class Activation:
    """The Softmax or Sigmoid behind a value: its op type, its input, and the axis of a Softmax."""

    kind: str
    logits: ValueId
    axis: int | None = None


def activation(view: View, value: ValueId, shapes: Mapping[ValueId, Shape]) -> Activation | None:
    """Return the Softmax or Sigmoid behind a value, through copies and Casts; None without one.

    `shapes`: those of values as far as they are known.
    """
    value = origin(view, value, lambda op: op.inputs[0] if op.kind == "Identity" or casts_floats(view, op) else None)
    op = view.producer(value)
    if op is None or op.kind not in ("Softmax", "Sigmoid") or op.inputs[0] is None:
        return None
    if op.kind == "Sigmoid":
        return Activation(op.kind, op.inputs[0])
    rank = len(shapes.get(value, ()))
    if not rank:
        return None
    of_rows = view.opset >= FIRST_ROW_SOFTMAX
    axis = int_attribute(op.node, "axis", -1 if of_rows else 1) % rank
    # before opset 13 a softmax runs over all axes from this one on
    return Activation(op.kind, op.inputs[0], axis) if of_rows or axis == rank - 1 else None
