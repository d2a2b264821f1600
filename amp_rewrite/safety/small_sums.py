"""Sums over a handful of numbers, such as those of the chosen experts or of a gate: they do what as many Adds do.

A ReduceSum stands on the deny list for the sums that leave the range. One of eight terms needs terms of 8190 for that,
and adds them up in float32, where the Adds that stand on the gray list round after each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from amp_rewrite.safety.flow import computes_float32
from amp_rewrite.schema import attribute
from amp_rewrite.view import Op, OpId, View

MOST_TERMS = 8
_NOTE = f"a sum of at most {MOST_TERMS} numbers, as that many Adds give"


def small_sums(view: View) -> Iterator[tuple[OpId, str]]:
    """Every ReduceSum over so few elements by the shapes that the model states, but for sums of squares."""
    sums = [
        op for op in view.ops if op.kind == "ReduceSum" and computes_float32(view, op) and not _of_squares(view, op)
    ]
    if not sums:
        return
    stated = {
        (scope.id, formal.name): formal.type.tensor_type.shape.dim
        for scope in view.scopes
        for formal in (*scope.graph.input, *scope.graph.value_info)
        if formal.type.tensor_type.HasField("shape")
    }
    for op in sums:
        value = op.inputs[0]
        dims = stated.get((view.values[value].scope, view.value_name(value))) if value is not None else None
        lengths = [dim.dim_value if dim.HasField("dim_value") else None for dim in dims or ()]
        if _few(lengths, _axes(view, op)):
            yield op.id, _NOTE


def _few(lengths: Sequence[int | None], axes: Sequence[int]) -> bool:
    terms = 1
    for axis in axes:
        length = lengths[axis] if -len(lengths) <= axis < len(lengths) else None
        if length is None:
            return False
        terms *= length
    return bool(axes) and terms <= MOST_TERMS


def _axes(view: View, op: Op) -> Sequence[int]:
    """The axes of a reduction, where they are stated or constant; none where it is over all or the run tells."""
    stated = attribute(op.node, "axes")
    if stated is not None:
        return list(stated.ints)
    tensor = view.constant(op.inputs[1]) if len(op.inputs) > 1 else None
    return [int(axis) for axis in view.model.array(tensor).reshape(-1)] if tensor is not None else []


def _of_squares(view: View, op: Op) -> bool:
    made_by = view.producer(op.inputs[0])
    return made_by is not None and (made_by.kind == "Pow" or (made_by.kind == "Mul" and len(set(made_by.inputs)) == 1))
