"""Steps that safety rules share: the starts of walks, constants at inputs, and the axis that a product sums."""

from __future__ import annotations

from collections.abc import Container, Sequence

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.schema import attribute, int_attribute
from amp_rewrite.ir.shapes.onnx_shapes import Shape
from amp_rewrite.ir.view import Op, OpId, ValueId, View


def results_of(view: View, kinds: Container[str]) -> dict[ValueId, OpId]:
    """Return the first results of ops of these kinds, each with its op."""
    return {op.outputs[0]: op.id for op in view.ops if op.kind in kinds and op.outputs[0] is not None}


def first_inputs(view: View, kinds: Container[str], but: Container[OpId] = ()) -> dict[ValueId, OpId]:
    """Return the first inputs of ops of these kinds, `but` some ops, each with the first op that reads it there."""
    ops = (op for op in reversed(view.ops) if op.kind in kinds and op.id not in but)
    return {op.inputs[0]: op.id for op in ops if op.inputs[0] is not None}


def float32_constant(view: View, op: Op, slot: int) -> ValueId | None:
    """Return an input that is a float32 constant; None for other inputs and for one that is left out."""
    value = op.inputs[slot] if slot < len(op.inputs) else None
    return value if view.dtype(value) is DType.FLOAT and view.constant(value) is not None else None


def summed_length(op: Op, slot: int, shape: Shape) -> int | None:
    """Return the length of the axis that a MatMul or Gemm sums, by the shape of one operand; None for a scalar."""
    if not shape:
        return None
    last = (slot == 0) is not bool(int_attribute(op.node, ("transA", "transB")[slot], 0))
    return shape[-1] if last or len(shape) == 1 else shape[-2]


def equation(op: Op) -> tuple[Sequence[str], str]:
    """Return the labels of each operand of an Einsum, and those of the result; empty ones if it states no result."""
    stated = attribute(op.node, "equation")
    spelled = stated.s.decode("utf-8", "replace").replace(" ", "") if stated is not None else ""
    operands, arrow, result = spelled.partition("->")
    return (operands.split(","), result) if arrow else ((), "")


def described(view: View, op_id: OpId) -> str:
    """Return the name and kind of an op as notes spell them."""
    return f"{view.ops[op_id].name!r} ({view.ops[op_id].kind})"
