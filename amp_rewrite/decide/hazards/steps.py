"""Steps that safety rules share: the starts of walks, and constants at inputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import Flow, scalings
from amp_rewrite.ir.op_classes import HEAVY, Slots
from amp_rewrite.ir.view import Op, OpId, Use, ValueId, View, once

LARGE = {DType.FLOAT16: 2.0**8, DType.BFLOAT16: 2.0**5}
"""Largest constant that counts as small beside a product: an eighth of the integers that the type holds exactly."""


def results_of(view: View, kinds: Container[str]) -> dict[ValueId, OpId]:
    """Return the first results of ops of these kinds, each with its op."""
    return {op.outputs[0]: op.id for op in view.of_kinds(kinds) if op.outputs[0] is not None}


def first_inputs(view: View, kinds: Container[str], but: Container[OpId] = ()) -> dict[ValueId, OpId]:
    """Return the first inputs of ops of these kinds, `but` some ops, each with the first op that reads it there."""
    ops = (op for op in reversed(view.of_kinds(kinds)) if op.id not in but)
    return {op.inputs[0]: op.id for op in ops if op.inputs[0] is not None}


def operands_at(view: View, slots: Slots) -> Iterator[tuple[Op, Use, ValueId]]:
    """Yield the operands that ops of these kinds read in these slots, with op and use, in order."""
    for op in view.of_kinds(slots):
        for slot, value in enumerate(op.inputs):
            if value is not None and slot in slots[op.kind]:
                yield op, Use(op.id, slot), value


def float32_constant(view: View, op: Op, slot: int) -> ValueId | None:
    """Return an input that is a float32 constant; None for other inputs and for one that is left out."""
    value = op.inputs[slot] if slot < len(op.inputs) else None
    return value if view.dtype(value) is DType.FLOAT and view.constant(value) is not None else None


@once
def learned_ops(view: View) -> Collection[OpId]:
    """Return layers and all ops that depend on one. O(nodes + uses)."""
    return view.after(op.id for op in view.of_kinds(HEAVY))


def scaled_by(view: View, op: Op) -> Iterator[tuple[ValueId, float]]:
    """Yield the operand that a product or quotient scales by one number other than 0, and what it multiplies it by."""
    yield from ((value, 1 / size if op.kind == "Div" else size) for value, size in scalings(view, op) if size)


def leading_to(flow: Flow, ends: Mapping[ValueId, OpId], enter: Callable[[ValueId], bool]) -> dict[OpId, OpId]:
    """Return the ops that compute values which ops read, and these ops, each with the op that reads in the end."""
    return {**flow.path(ends, enter), **{end: end for end in ends.values()}}


def described(view: View, op_id: OpId) -> str:
    """Return the name and kind of an op as notes spell them."""
    return f"{view.ops[op_id].name!r} ({view.ops[op_id].kind})"
