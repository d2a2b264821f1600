"""Logits behind probabilities: a loss that takes the result of a Softmax or Sigmoid reads what goes into it.

A cross entropy of probabilities that is taken for one of logits applies the softmax twice. It trains, but badly: the
loss cannot reach 0, and its gradients are small. Read from the logits, the loss also keeps the digits that a
probability close to 1 has lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from amp_rewrite.ir.attributes import attribute
from amp_rewrite.ir.dataflow import axes_of, casts_floats, origin, trail
from amp_rewrite.ir.op_classes import MOVES
from amp_rewrite.ir.versions import FIRST_ROW_SOFTMAX
from amp_rewrite.ir.view import Op, ValueId, View

_BLENDS = ("Concat", "Mul", "Min", "Max", "Mean")
"""Ops whose result lies in [0, 1] where all their operands do."""
_NARROWS = ("ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "Sqrt")
"""Ops whose result lies in [0, 1] where their first operand does."""
_UNIT = ("Softmax", "Sigmoid", "HardSigmoid", "Hardmax")
"""Ops whose result lies in [0, 1]."""
_MOST = 64
"""Ops that the search for an interval visits."""


@dataclass(frozen=True, slots=True)
class Activation:
    """The softmax or sigmoid that computes a value: its op type, the value that it reads, and its axis."""

    kind: str
    logits: ValueId
    axis: int | None = None


def activation(view: View, value: ValueId, rank: int | None) -> Activation | None:
    """Return the softmax or sigmoid behind copies and Casts of a value; None without one."""
    op = view.producer(origin(view, value, lambda op: _passed(view, op)))
    if op is None:
        return None
    if op.kind == "Sigmoid" and op.inputs[0] is not None:
        return Activation("Sigmoid", op.inputs[0])
    if op.kind == "Softmax" and op.inputs[0] is not None and rank:
        of_rows = view.opset >= FIRST_ROW_SOFTMAX
        stated = attribute(op.node, "axis")
        axis = (stated.i if stated is not None else (-1 if of_rows else 1)) % rank
        # before opset 13 a softmax runs over all axes from this one on
        return Activation("Softmax", op.inputs[0], axis) if of_rows or axis == rank - 1 else None
    return _written_out(view, op, rank)


def _passed(view: View, op: Op) -> ValueId | None:
    return op.inputs[0] if op.kind == "Identity" or casts_floats(view, op) else None


def _written_out(view: View, op: Op, rank: int | None) -> Activation | None:
    """Return a softmax written out as e / ReduceSum(e) with e = Exp(logits)."""
    if op.kind != "Div" or not rank:
        return None
    above, below = (trail(view, v, lambda op: _passed(view, op))[1] for v in op.inputs)
    exp, total = view.producer(above), view.producer(below)
    if exp is None or total is None or (exp.kind, total.kind) != ("Exp", "ReduceSum") or exp.inputs[0] is None:
        return None
    axes = [axis % rank for axis in axes_of(view, total)]
    if trail(view, total.inputs[0], lambda op: _passed(view, op))[1] != above or len(axes) != 1:
        return None
    return Activation("Softmax", exp.inputs[0], axes[0])


def in_unit_interval(view: View, value: ValueId) -> bool:
    """True if all elements of a value are known to lie in [0, 1]: moved, multiplied or averaged probabilities."""
    pending, seen = [value], 0
    while pending:
        op = view.producer(pending.pop())
        seen += 1
        if op is None or seen > _MOST:
            return False
        if _gives_unit(view, op):
            continue
        if op.kind in MOVES or op.kind in _NARROWS or casts_floats(view, op):
            read = [op.inputs[0]]
        elif op.kind in _BLENDS:
            read = list(op.inputs)
        else:
            return False
        if any(v is None or view.constant(v) is not None for v in read):
            return False
        pending += [v for v in read if v is not None]
    return True


def _gives_unit(view: View, op: Op) -> bool:
    """True for an op whose result lies in [0, 1], whatever it reads."""
    if op.kind == "Exp":
        return view.producer(op.inputs[0], "LogSoftmax") is not None
    if op.kind != "Clip":
        return op.kind in _UNIT
    bounds = [view.array(v) if v is not None else None for v in (*op.inputs[1:], None, None)[:2]]
    return all(b is not None and b.size == 1 and 0 <= b.item() <= 1 for b in bounds)
