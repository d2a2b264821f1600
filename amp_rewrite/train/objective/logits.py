"""Logits behind probabilities: a loss that takes the result of a Softmax or Sigmoid reads what goes into it.

A cross entropy of probabilities that is taken for one of logits applies the softmax twice. It trains, but badly: the
loss cannot reach 0, and its gradients are small. Read from the logits, the loss also keeps the digits that a
probability close to 1 has lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from amp_rewrite.ir.attributes import int_attribute, ints_attribute
from amp_rewrite.ir.dataflow import axes_of, casts_floats, trail
from amp_rewrite.ir.op_classes import MOVES, PERMUTES, PICKS, RELABELS, SCALINGS, SOFTMAXES
from amp_rewrite.ir.versions import FIRST_ROW_SOFTMAX
from amp_rewrite.ir.view import Op, ValueId, View
from amp_rewrite.rewrite.autodiff.facts import Shape

_PASSED = (MOVES | PERMUTES | PICKS | {"Split"}) - {"Identity"}
"""Ops whose results are elements of their first input, so that they can also move logarithms."""
_SAME_AXES = frozenset({"Slice", "Split", "Expand", "Tile", "Gather", "GatherElements", "ReverseSequence"})
"""Those that keep the axes of an input of the same rank."""


@dataclass(frozen=True, slots=True)
class Activation:
    """The softmax or sigmoid that computes a value, or its logarithm.

    `kind`: its op type. `logits`: the value that it reads. `own_axis`: its axis. `logarithm`: the value is the
    logarithm. `moves`: the ops behind it that move its elements, each with the result that is read, the last one first.
    `axis`: where its axis is in the value; None if that is not known.
    """

    kind: str
    logits: ValueId
    own_axis: int | None = None
    logarithm: bool = False
    moves: tuple[tuple[Op, int], ...] = ()
    axis: int | None = None


def activation(view: View, value: ValueId, shapes: Mapping[ValueId, Shape]) -> Activation | None:
    """Return the softmax or sigmoid behind copies, Casts and moves of a value; None without one.

    `shapes`: those of values as far as they are known.
    """
    moves: list[tuple[Op, int]] = []
    logarithms = 0
    while (op := view.producer(value)) is not None:
        step = 1 if op.kind in ("Log", "LogSoftmax") else -1 if op.kind == "Exp" else 0
        found = _computed(view, op, shapes)
        if found is not None:
            kind, logits, axis = found
            logarithms += step
            if logarithms not in (0, 1):
                return None
            place = axis
            for move, slot in reversed(moves):
                place = None if place is None else _moved_axis(move, slot, place, shapes)
            return Activation(kind, logits, axis, logarithms == 1, tuple(moves), place)
        if op.kind in _PASSED:
            moves.append((op, op.outputs.index(value)))
        elif not step and _passed(view, op) is None:
            return None
        if op.inputs[0] is None:
            return None
        logarithms += step
        value = op.inputs[0]
    return None


def _passed(view: View, op: Op) -> ValueId | None:
    return op.inputs[0] if op.kind == "Identity" or casts_floats(view, op) else None


def _computed(view: View, op: Op, shapes: Mapping[ValueId, Shape]) -> tuple[str, ValueId, int | None] | None:
    """Return kind, logits and axis of a softmax, its logarithm, or a sigmoid; None for another op."""
    if op.kind == "Sigmoid" and op.inputs[0] is not None:
        return "Sigmoid", op.inputs[0], None
    shape = shapes.get(op.outputs[0]) if op.outputs and op.outputs[0] is not None else None
    if not shape:
        return None
    rank = len(shape)
    if op.kind in SOFTMAXES and len(op.inputs) == 1 and op.inputs[0] is not None:
        of_rows = view.opset >= FIRST_ROW_SOFTMAX
        axis = int_attribute(op.node, "axis", -1 if of_rows else 1) % rank
        # before opset 13 a softmax runs over all axes from this one on
        return ("Softmax", op.inputs[0], axis) if of_rows or axis == rank - 1 else None
    return _written_out(view, op, rank)


def _written_out(view: View, op: Op, rank: int) -> tuple[str, ValueId, int | None] | None:
    """Return a softmax written out as e / ReduceSum(e), or e * Reciprocal(ReduceSum(e)), with e = Exp(logits)."""
    if op.kind not in SCALINGS:
        return None
    copies = partial(_passed, view)
    above, below = (trail(view, v, copies)[1] for v in op.inputs)
    if op.kind == "Mul":
        inverse = view.producer(below, "Reciprocal")
        below = None if inverse is None else trail(view, inverse.inputs[0], copies)[1]
    exp, total = (None if v is None else view.producer(v) for v in (above, below))
    if exp is None or total is None or (exp.kind, total.kind) != ("Exp", "ReduceSum") or exp.inputs[0] is None:
        return None
    axes = [axis % rank for axis in axes_of(view, total)]
    if trail(view, total.inputs[0], copies)[1] != above or len(axes) != 1:
        return None
    return "Softmax", exp.inputs[0], axes[0]


def _moved_axis(op: Op, slot: int, axis: int, shapes: Mapping[ValueId, Shape]) -> int | None:
    """Return where an axis of the first input of a move is in a result; None if that is not known."""
    before, after = (None if v is None else shapes.get(v) for v in (op.inputs[0], op.outputs[slot]))
    if before is None or after is None:
        return None
    if op.kind == "Transpose":
        perm = ints_attribute(op.node, "perm") or list(range(len(before)))[::-1]
        return perm.index(axis)
    if op.kind in _SAME_AXES and len(before) == len(after):
        return axis
    if op.kind not in RELABELS:
        return None
    front, back = _dims(before[:axis]), _dims(before[axis + 1 :])
    places = (at for at, size in enumerate(after) if size == before[axis])
    return next((at for at in places if _dims(after[:at]) == front or _dims(after[at + 1 :]) == back), None)


def _dims(shape: Shape) -> list[object]:
    """Return the dims of a part of a shape that say how many elements it has."""
    return [dim for dim in shape if dim != 1]
