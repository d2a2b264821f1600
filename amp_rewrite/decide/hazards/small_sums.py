"""Sums over a handful of numbers, such as those of the chosen experts or of a gate: they do what as many Adds do.

A ReduceSum stands on the deny list for the sums that leave the range. One of eight terms needs terms of 8190 for that,
and adds them up in float32, where the Adds that stand on the gray list round after each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from amp_rewrite.decide.hazards.flow import computes_float32
from amp_rewrite.ir.schema import attribute
from amp_rewrite.ir.shapes.onnx_shapes import Shapes, elements
from amp_rewrite.ir.view import Op, OpId, View

MOST_TERMS = 8
_NOTE = f"a sum of at most {MOST_TERMS} numbers, as that many Adds give"


def small_sums(view: View, shapes: Callable[[], Shapes]) -> Iterator[tuple[OpId, str]]:
    """Every ReduceSum over so few elements by the shapes that are known, but for sums of squares."""
    for op in view.ops:
        if op.kind == "ReduceSum" and computes_float32(view, op) and not of_squares(view, op):
            terms = terms_of(view, op, shapes())
            if terms is not None and terms <= MOST_TERMS:
                yield op.id, _NOTE


def terms_of(view: View, op: Op, shapes: Shapes) -> int | None:
    """How many numbers a reduction puts together into each of its results; None where that is not known."""
    value = op.inputs[0]
    shape = shapes.get((view.values[value].scope, view.value_name(value)), ()) if value is not None else ()
    axes = axes_of(view, op)
    if not axes or any(not -len(shape) <= axis < len(shape) for axis in axes):
        return None
    return elements([shape[axis] for axis in axes])


def axes_of(view: View, op: Op) -> Sequence[int]:
    """The axes of a reduction, where they are stated or constant; none where it is over all or the run tells."""
    stated = attribute(op.node, "axes")
    if stated is not None:
        return list(stated.ints)
    tensor = view.constant(op.inputs[1]) if len(op.inputs) > 1 else None
    return [int(axis) for axis in view.model.array(tensor).reshape(-1)] if tensor is not None else []


def of_squares(view: View, op: Op) -> bool:
    """Whether a reduction reads squares, or other powers."""
    made_by = view.producer(op.inputs[0])
    return made_by is not None and (made_by.kind == "Pow" or (made_by.kind == "Mul" and len(set(made_by.inputs)) == 1))
