"""Distances written as |x|² − 2x·c + |c|²."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.rule import rule
from amp_rewrite.decide.hazards.steps import in_float32
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import LOW_TYPES, DType
from amp_rewrite.ir.dataflow import Flow, computes_float32, makers, multiples, origin, sums_squares
from amp_rewrite.ir.op_classes import AFFINE, COPIES, PAIR_SUMS, PRODUCTS, Slots
from amp_rewrite.ir.view import Op, OpId, ValueId, View

_PRODUCTS = PRODUCTS - {"Einsum"}
_SUMS: Slots = {**COPIES, **dict.fromkeys(AFFINE - {"Sum"}, (0, 1)), "Gemm": (2,)}
_MEETING = PAIR_SUMS | {"Gemm"}


@rule(reasons.DISTANCE, "A distance written as |x|² − 2x·c + |c|² is computed in float32.")
def distance(view: View, to: DType) -> Iterator[Pin]:
    """Pin products added to sums of squares of their own operands, and those sums. O(nodes + uses).

    What it protects: Distances computed from squares and products.
    Why: The sum is small compared with its terms, and half precision rounds the product in proportion to |x||c|. A
        point far from the origin is then assigned to the wrong centre, or has a negative squared distance.
    Example: Codebook lookup of codecs, k-means, kernels over neighbours.
    How to override: `--lower 'op=MatMul,feeds=Sub'` or the name of the product.
    Source: Catastrophic cancellation, as for `cancellation`.
    """
    roots = multiples(view, signs=True)
    squares: dict[ValueId, dict[ValueId, OpId]] = {}
    for op in view.ops:
        source = _squared(view, op)
        if source is not None and op.outputs[0] is not None:
            squares.setdefault(origin(view, source, roots), {})[op.outputs[0]] = op.id
    if not squares:
        return
    flow = Flow.of(view, _SUMS)
    pins: dict[OpId, OpId] = {}
    for product in view.ops:
        if product.kind not in _PRODUCTS or not computes_float32(view, product):
            continue
        for root in {origin(view, v, roots) for v in product.inputs[:2] if v is not None} & squares.keys():
            for op_id in _met(flow, product, squares[root]):
                pins.setdefault(op_id, next(iter(squares[root].values())))
    for op_id, cause in in_float32(view, pins).items():
        yield Pin(op_id, reasons.DISTANCE, cause, "a difference of squares and products, small beside them")


def _met(flow: Flow, product: Op, squares: dict[ValueId, OpId]) -> Collection[OpId]:
    """Return the product, the sums in which it meets the squares, and the ops between; none if they do not meet."""
    view = flow.view

    def floating(value: ValueId) -> bool:  # squares may be low in a model that is converted already
        return view.dtype(value) in (DType.FLOAT, *LOW_TYPES)

    lengths = flow.forth(squares, floating)
    scores = flow.forth(dict.fromkeys(product.results, product.id), floating)
    both = {v: product.id for v in scores if v in lengths}
    if not any(view.ops[op_id].kind in _MEETING for op_id in makers(view, both)):
        return ()
    return makers(view, flow.back(both, scores.__contains__))


def _squared(view: View, op: Op) -> ValueId | None:
    """Return the value of which an op sums the squares; None for other ops."""
    if op.kind == "ReduceSumSquare":
        return op.inputs[0]
    return sums_squares(view, op, cast=True) if op.kind == "ReduceSum" else None
