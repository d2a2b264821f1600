"""Distances written as |x|² − 2x·c + |c|²."""

from __future__ import annotations

from collections.abc import Iterator

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.rule import rule
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import Flow, computes_float32, makers, multiples, origin, sums_squares
from amp_rewrite.ir.op_classes import AFFINE, COPIES, PAIR_SUMS, PRODUCTS, SUMS, Slots
from amp_rewrite.ir.view import Op, OpId, ValueId, View

_PRODUCTS = PRODUCTS - {"Einsum"}
_SCALES = AFFINE - SUMS
_SUMS: Slots = {**COPIES, **dict.fromkeys(PAIR_SUMS | _SCALES, (0, 1)), "Gemm": (2,)}
_MEETING = PAIR_SUMS | {"Gemm"}


@rule(reasons.DISTANCE, "A distance written as |x|² − 2x·c + |c|² is computed in float32.")
def distance(view: View, to: DType) -> Iterator[Pin]:
    """Pin products of values that are squared and summed too, where both are added, and those sums. O(nodes + uses).

    What it protects: Distances computed from squares and products.
    Why: The sum is small beside its parts, and a product in half precision is off by a share of |x||c|. A point far
        from the origin then lies nearer to the wrong centre, or at the root of a negative number.
    Example: Codebook lookup of codecs, k-means, kernels over neighbours.
    How to override: `--lower 'op=MatMul,feeds=Sub'` or the name of the product.
    Source: Catastrophic cancellation, as for `cancellation`.
    """
    roots = multiples(view, signs=True)
    squared: dict[ValueId, dict[ValueId, OpId]] = {}
    for op in view.ops:
        source = _squared(view, op)
        if source is not None and op.outputs[0] is not None:
            squared.setdefault(origin(view, source, roots), {})[op.outputs[0]] = op.id
    if not squared:
        return
    flow = Flow.of(view, _SUMS)
    pins: dict[OpId, OpId] = {}
    for product in view.ops:
        if product.kind not in _PRODUCTS or not computes_float32(view, product):
            continue
        for root in {origin(view, v, roots) for v in product.inputs[:2] if v is not None} & squared.keys():
            for op_id in _met(view, flow, product, squared[root]):
                pins.setdefault(op_id, next(iter(squared[root].values())))
    for op_id, cause in sorted(pins.items()):
        yield Pin(op_id, reasons.DISTANCE, cause, "a difference of squares and products, small beside them")


def _met(view: View, flow: Flow, product: Op, squares: dict[ValueId, OpId]) -> set[OpId]:
    """The product, the sums in which it meets the squares, and what lies between; nothing if they do not meet."""
    made = {v: product.id for v in product.outputs if v is not None}

    def floating(value: ValueId) -> bool:
        dtype = view.dtype(value)  # in a model that is converted already the squares may have been lowered
        return dtype is DType.FLOAT or (dtype is not None and dtype.low)

    lengths = flow.forth(squares, floating)
    scores = flow.forth(made, floating)
    both = {v: product.id for v in scores if v in lengths}
    meetings = [op for op in map(view.ops.__getitem__, makers(view, both)) if op.kind in _MEETING]
    if not meetings:
        return set()
    between = flow.back(both, scores.__contains__)
    return {op_id for op_id in makers(view, between) if computes_float32(view, view.ops[op_id])}


def _squared(view: View, op: Op) -> ValueId | None:
    """What an op sums the squares of."""
    if op.kind == "ReduceSumSquare":
        return op.inputs[0]
    return sums_squares(view, op, cast=True) if op.kind == "ReduceSum" else None
