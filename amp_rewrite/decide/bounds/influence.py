"""Influence of large constants on the size of each value, estimated from the graph alone.

A quick test before a proof: if no estimate exceeds the low type, no proof that starts from constants does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from amp_rewrite.decide.bounds.weights import large_constants
from amp_rewrite.ir.op_classes import (
    BOUNDED,
    COMPARISONS,
    CONTRACTS,
    COPIES,
    ELEMENTLESS,
    ROUNDS,
    SELECTIONS,
    SMALL,
    SUMS,
)
from amp_rewrite.ir.view import MAIN, Op, ValueId, View

_ENDS = BOUNDED | COMPARISONS | ELEMENTLESS | {"Log"}
"""Ops whose results are small, whatever they read."""
_FIRST = CONTRACTS | ROUNDS
"""Ops whose results are about as large as their first input at most."""


def influence(view: View) -> Mapping[ValueId, float]:
    """Return how large the `large_constants` can make values, where they have an influence. O(ops + uses).

    Other numbers count as 0: a sum adds the sizes of its operands, and a product with such a number has no limit.
    """
    sizes = dict(large_constants(view))
    if not sizes:
        return {}
    sizes.update((value, math.inf) for scope in view.scopes if scope.id != MAIN for value in scope.inputs)
    found: dict[ValueId, float] = {}
    for op in view.ops:
        if size := _size(view, op, sizes):
            results = dict.fromkeys((v for v in op.outputs if v is not None), size)
            sizes.update(results)
            found.update(results)
    return found


def _size(view: View, op: Op, sizes: Mapping[ValueId, float]) -> float:
    """Return the size of the results of an op, 0 without an influence."""
    kind, inputs = op.kind, op.inputs
    read: Iterable[ValueId | None] = inputs
    if kind in _ENDS:
        return 0.0
    if slots := COPIES.get(kind) or SELECTIONS.get(kind):
        return max((sizes.get(v, 0.0) for i, v in enumerate(inputs) if v is not None and i in slots), default=0.0)
    if kind in SUMS:
        return sum(sizes.get(v, 0.0) for v in inputs if v is not None)
    if kind in _FIRST:
        return 0.0 if inputs[0] is None else sizes.get(inputs[0], 0.0)
    if kind in SMALL:
        read = inputs[1:]
    elif kind == "Div":
        read = inputs[:1]
    elif op.bodies:
        read = (*op.operands, *(v for body in op.bodies for v in view.scopes[body].outputs))
    return math.inf if any(v in sizes for v in read) else 0.0
