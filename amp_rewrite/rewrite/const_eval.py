"""Evaluation of values: the ops between a value and entries, and its numbers if it depends on constants alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from amp_rewrite.files.casting import Array
from amp_rewrite.ir.attributes import ints_attribute
from amp_rewrite.ir.dataflow import behind, first_input_of
from amp_rewrite.ir.op_classes import BROADCASTS, CARRIERS, ELEMENTLESS, MOVES, SAME_SHAPE, SCATTERS, UNREPEATABLE
from amp_rewrite.ir.view import Op, OpId, ValueId, View
from amp_rewrite.rewrite.equivalence import Arrays, runs_of

TRACED_MOVES = MOVES - {"Flatten"}
"""The moves that attentions are looked for through."""
_EVALUATED = frozenset(
    (CARRIERS.keys() | BROADCASTS | SAME_SHAPE | ELEMENTLESS | {"ConstantOfShape", "EyeLike", "OneHot", "Range"})
    - UNREPEATABLE
    - SCATTERS
)
"""Ops that take a moment per element; onnx's reference runs windows, cells and scatters in loops of Python."""
_MOST_OPS = 64
_MOST_ELEMENTS = 1 << 24  # of a constant that is looked at, and of what is computed from constants


def moves_behind(view: View, value: ValueId) -> Iterator[tuple[Op, ValueId]]:
    """Yield the moves that a value comes through, nearest first, each with what it moves."""
    return behind(view, value, first_input_of(TRACED_MOVES))


def permutation(op: Op) -> tuple[int, ...]:
    """Return the permutation that a Transpose states; () if it states none, and for other ops."""
    return ints_attribute(op.node, "perm") if op.kind == "Transpose" else ()


def ops_behind(view: View, value: ValueId, entries: Collection[ValueId] = ()) -> tuple[OpId, ...] | None:
    """Return the ops that make a value of the entries and of constants, in order; None if they read anything else.

    None also if there are more than 64, one is not cheap to evaluate, or a constant is a large weight.
    """
    ops: set[OpId] = set()
    pending = [value]
    while pending:
        read = pending.pop()
        if read in entries:
            continue
        if (tensor := view.constant(read)) is not None:
            if math.prod(tensor.dims) > _MOST_ELEMENTS:
                return None
            continue
        op = view.producer(read)
        if op is None or op.kind not in _EVALUATED or len(ops) >= _MOST_OPS:
            return None
        if op.id not in ops:
            ops.add(op.id)
            pending.extend(op.operands)
    return tuple(sorted(ops))


def numbers(view: View, value: ValueId) -> Array | None:
    """Return the numbers of a value that is a constant or computed from constants; None if they are not known."""
    if view.constant(value) is not None:
        return view.array(value, _MOST_ELEMENTS)
    ops = ops_behind(view, value)
    return computed(view, ops, value, {}) if ops else None


def computed(view: View, ops: tuple[OpId, ...], value: ValueId, feed: Arrays) -> Array | None:
    """Run ops on a feed; None if onnx's reference cannot run them."""
    results = runs_of(view, ops, view.value_name(value), [feed])
    return None if isinstance(results, str) else results[0]
