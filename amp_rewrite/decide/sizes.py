"""Sizes of values and numbers of terms in sums, from shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from amp_rewrite.ir.attributes import equation, int_attribute
from amp_rewrite.ir.shapes import Shape, declared_dims, fixed, shape_of
from amp_rewrite.ir.view import MAIN, Op, ValueId, View, once

UNKNOWN_SIZE = 1 << 16
"""Assumed number of elements of a value, if neither its shape nor one upstream is known."""
FREE = 4096
"""Assumed size of a free dimension in a sum."""
_MAX_TERMS = 1 << 60
UNKNOWN_DIMENSION = 128
"""Assumed size of a free dimension elsewhere: in most exported models it is the length of a text, or a batch size."""


def size(view: View, value: ValueId | None) -> int:
    """Return the number of elements of a value or, if it is unknown, of the largest value upstream. 0 for None."""
    return _sizes(view)[value] if value is not None else 0


@once
def _sizes(view: View) -> Sequence[int]:
    sizes = [prod(shape(view, value.id)) if _known(view, value.id) is not None else 0 for value in view.values]
    for op in view.ops:
        largest = max((sizes[value] or UNKNOWN_SIZE for value in op.operands), default=UNKNOWN_SIZE)
        for value in op.results:
            sizes[value] = sizes[value] or largest
    return [known or UNKNOWN_SIZE for known in sizes]


def shape(view: View, value: ValueId | None) -> tuple[int, ...]:
    """Return the shape with free dimensions filled in; () if it is unknown."""
    return tuple(UNKNOWN_DIMENSION if d is None else d for d in _known(view, value) or ())


def _known(view: View, value: ValueId | None) -> Shape | None:
    """Return the declared shape if there is one, otherwise the inferred shape."""
    declared = _declared(view).get(view.value_name(value)) if value is not None else None
    return shape_of(view, value) if declared is None or value is None or view.values[value].scope != MAIN else declared


@once
def _declared(view: View) -> Mapping[str, Shape]:
    graph = view.model.proto.graph
    formals = (*graph.value_info, *graph.input, *graph.output)
    return {formal.name: fixed(dims) for formal in formals if (dims := declared_dims(formal)) is not None}


_AXES = {
    **dict.fromkeys(("Conv", "ConvInteger"), (1, slice(1, None))),
    "ConvTranspose": (1, slice(1)),
    "GlobalAveragePool": (0, slice(2, None)),
}
"""By op, the input with summed axes, and these axes."""


def summed_axes(op: Op, slot: int) -> list[int]:
    """Return the summed axes of an operand of a matrix product."""
    if op.kind == "Einsum":
        return [at for at, _ in summed_labels(op)[slot]]
    last = (slot == 0) is not bool(int_attribute(op.node, ("transA", "transB")[slot], 0))
    return [-1 if last else -2]


def summed_terms(op: Op, shapes: Sequence[Shape | None], free: int = UNKNOWN_DIMENSION) -> int:
    """Return the number of terms in each result of a product or global pool; `free` replaces an unknown length."""
    lengths: Iterable[int | None] = [None]
    if op.kind == "Einsum":
        named = {label: (at, s) for axes, s in zip(summed_labels(op), shapes, strict=False) for at, label in axes}
        lengths = [s[at] if s is not None and -len(s) <= at < len(s) else None for at, s in named.values()]
    elif op.kind in _AXES:
        slot, axes = _AXES[op.kind]
        shape = shapes[slot]
        lengths = shape[axes] if shape is not None else [None]
    else:
        ends = ((s, summed_axes(op, slot)[0] if len(s) > 1 else -1) for slot, s in enumerate(shapes[:2]) if s)
        known = (s[axis] for s, axis in ends)
        lengths = [next((length for length in known if length is not None), None)]
    groups = int_attribute(op.node, "group", 1) if op.kind == "ConvTranspose" else 1
    return max(1, prod(free if length is None else length for length in lengths) // max(1, groups))


def terms_of_product(view: View, op: Op, free: int = FREE) -> int:
    """Return the number of terms in each result of a product, from the shapes of its constant factors if possible.

    `free` replaces an unknown length.
    """
    stored = [tuple(t.dims) if (t := view.constant(v)) is not None else None for v in op.inputs[:2]]
    known = any(stored) and op.kind != "Einsum"
    return min(_MAX_TERMS, summed_terms(op, stored if known else [shape_of(view, v) for v in op.inputs], free))


def summed_labels(op: Op) -> list[list[tuple[int, str]]]:
    """Return the summed axes of each operand of an Einsum, with their labels."""
    operands, result = equation(op.node)
    parts = [labels.partition("...") for labels in operands]
    axes = ((*enumerate(front), *enumerate(back, -len(back))) for front, _, back in parts)
    return [[(at, label) for at, label in operand if label not in result] for operand in axes]
