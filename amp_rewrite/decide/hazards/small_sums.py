"""Sums over a handful of numbers, such as those of the chosen experts or of a gate: they do what as many Adds do.

A ReduceSum stands on the deny list for the sums that leave the range. One of eight terms needs terms of 8190 for that,
and adds them up in float32, where the Adds that stand on the gray list round after each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from amp_rewrite.ir.dataflow import axes_of, computes_float32, sums_squares
from amp_rewrite.ir.shapes.onnx_shapes import Shapes, elements
from amp_rewrite.ir.view import Op, OpId, View

MOST_TERMS = 8
_NOTE = f"a sum of at most {MOST_TERMS} numbers, as that many Adds give"


def small_sums(view: View, shapes: Callable[[], Shapes]) -> Iterator[tuple[OpId, str]]:
    """Every ReduceSum over so few elements by the shapes that are known, but for sums of squares."""
    for op in view.ops:
        if op.kind == "ReduceSum" and computes_float32(view, op) and sums_squares(view, op) is None:
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
