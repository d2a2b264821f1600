"""Sums of a few terms, such as those over the chosen experts or over the parts of a gate.

ReduceSum is on the deny list because a long sum leaves the range. A sum of eight terms needs terms of 8190 for that. It
accumulates in float32, whereas a chain of Adds, which are on the gray list, rounds after each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from amp_rewrite.ir.dataflow import axes_of, computes_float32, sums_squares
from amp_rewrite.ir.shapes.onnx_shapes import Shapes, elements
from amp_rewrite.ir.view import Op, OpId, View

MOST_TERMS = 8


def small_sums(view: View, shapes: Callable[[], Shapes]) -> Iterator[OpId]:
    """Yield every ReduceSum over at most eight terms by the known shapes, except sums of squares."""
    for op in view.ops:
        if op.kind == "ReduceSum" and computes_float32(view, op) and sums_squares(view, op) is None:
            terms = terms_of(view, op, shapes())
            if terms is not None and terms <= MOST_TERMS:
                yield op.id


def terms_of(view: View, op: Op, shapes: Shapes) -> int | None:
    """Return the number of elements that each result of a reduction combines; None if it is unknown."""
    value = op.inputs[0]
    shape = shapes.get((view.values[value].scope, view.value_name(value)), ()) if value is not None else ()
    axes = axes_of(view, op)
    if not axes or any(not -len(shape) <= axis < len(shape) for axis in axes):
        return None
    return elements([shape[axis] for axis in axes])
