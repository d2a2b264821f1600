"""Small differences of large numbers: variances and distances."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.rule import HeldOp, rule
from amp_rewrite.decide.hazards.steps import described, leading_to, learned_ops
from amp_rewrite.dtypes import LOW_TYPES, DType
from amp_rewrite.ir.dataflow import (
    Flow,
    axes_of,
    first_input_of,
    float32,
    float32_ops,
    makers,
    multiples,
    orders,
    origin,
    sums_squares,
    trail,
)
from amp_rewrite.ir.op_classes import AFFINE, COPIES, PAIR_SUMS, PRODUCTS, SCALINGS, SQUARES, Slots
from amp_rewrite.ir.view import Op, OpId, ValueId, View

_REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceSumSquare")
_WINDOWS = ("AveragePool", "Conv", "GlobalAveragePool", "MatMul")
_FAR = 32  # copies and constant factors in a row
_FACTORS = PRODUCTS - {"Einsum"}
_SUMS: Slots = {**COPIES, **dict.fromkeys(AFFINE - {"Sum"}, (0, 1)), "Gemm": (2,)}
_MEETING = PAIR_SUMS | {"Gemm"}
_RAISED: Slots = {**COPIES, **dict.fromkeys(PAIR_SUMS | SCALINGS, (0, 1))}
"""Ops whose result keeps the level of a raw value."""


@rule(
    reasons.CANCELLATION,
    "A small difference of large squares and products, or of values on one level, is computed in float32.",
    cases=(reasons.CANCELLATION, "distance", "level"),
)
def cancellation(view: View, to: DType) -> Iterator[HeldOp]:
    """Hold the difference and the ops that compute it from its operands. O(nodes + uses).

    What it protects: Variances and covariances written as E[x·y] − E[x]·E[y], by means, convolutions or products;
        distances written as |x|² − 2x·c + |c|². Differences of values on one level: both are computed from the same
        input, which no layer made, and at least one from layers as well.
    Why: The result is small compared with its terms. For x = 10 ± 0.1 the variance 0.01 is the difference of two
        numbers near 100, where the float16 spacing is 0.06. A point far from the origin is assigned to the wrong
        centre, or has a negative squared distance. Steps of a price near 4500 are lost where the spacing is 4.
    Example: Norms written this way, structural similarity (SSIM), guided filters; codebook lookup of codecs, k-means,
        kernels over neighbours; offsets between points that a network moved, returns of prices that it predicts.
    How to override: `--lower 'op=Sub'`, `--lower 'op=MatMul,feeds=Sub'` or a narrower pattern.
    Source: Catastrophic cancellation, Goldberg 1991, "What every computer scientist should know about floating-point
        arithmetic".
    """
    yield from distances(view)
    yield from levels(view)
    for op in view.of_kinds(PAIR_SUMS):
        for minuend, subtrahend in _differences(view, op):
            if parts := _variance(view, minuend, subtrahend):
                for op_id in (*parts, op.id):
                    yield HeldOp(op_id, op.id, "a variance as a difference of means, which is small beside them")


def distances(view: View) -> Iterator[HeldOp]:
    """Hold products added to sums of squares of their own operands, and those sums."""
    roots = multiples(view, signs=True)
    squares: dict[ValueId, dict[ValueId, OpId]] = {}
    for op in view.of_kinds(("ReduceSum", "ReduceSumSquare")):
        source = sums_squares(view, op, cast=True) if op.kind == "ReduceSum" else op.inputs[0]
        if source is not None and op.outputs[0] is not None:
            squares.setdefault(origin(view, source, roots), {})[op.outputs[0]] = op.id
    flow = Flow.of(view, _SUMS)
    for product in float32_ops(view, _FACTORS) if squares else ():
        for root in {origin(view, v, roots) for v in product.inputs[:2] if v is not None} & squares.keys():
            cause = next(iter(squares[root].values()))
            for op_id in _met(flow, product, squares[root]):
                yield HeldOp(op_id, cause, "a difference of squares and products, small beside them")


def levels(view: View) -> Iterator[HeldOp]:
    """Hold differences of values that share a raw value, up to the layers that they are computed from as well."""
    learned, copied = learned_ops(view), first_input_of(COPIES)
    raised: dict[ValueId, ValueId] = {}
    ends: dict[ValueId, OpId] = {}

    def level(value: ValueId) -> ValueId | None:
        """Return the raw value from which a value is computed, by copies, sums and factors; None without one."""
        made_by = view.values[value].producer
        if made_by is not None and made_by in learned:
            return raised.get(value)
        source = origin(view, value, copied)
        return source if view.dtype(value) is DType.FLOAT and view.constant(source) is None else None

    for op in view.of_kinds(_RAISED) if view.of_kinds(("Sub",)) else ():
        read = [v for at, v in enumerate(op.inputs) if at in _RAISED[op.kind] and v is not None]
        known = [raw for v in read if (raw := level(v)) is not None] if op.id in learned else []
        if op.kind == "Sub" and len(known) == 2 and known[0] == known[1]:
            ends.update(dict.fromkeys(read, op.id))
        elif known:
            raised.update(dict.fromkeys(op.results, known[0]))
    flow = Flow.of(view, _RAISED)
    for op_id, end in leading_to(flow, ends, float32(view)).items():
        if op_id in learned and flow.through(view.ops[op_id]):
            yield HeldOp(op_id, end, f"{described(view, end)} takes its level away again")


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
    return flow.path(both, scores.__contains__)


def _differences(view: View, op: Op) -> Iterator[tuple[ValueId | None, ValueId | None]]:
    """Yield minuend and subtrahend of an op, in both orders: the sign of a variance does not matter."""
    for kept, other in orders(op):
        negated = view.producer(other, "Neg")
        if op.kind == "Sub" or negated is not None:
            yield kept, negated.inputs[0] if op.kind == "Add" and negated is not None else other


def _variance(view: View, minuend: ValueId | None, subtrahend: ValueId | None) -> Collection[OpId]:
    """Return the ops of E[x·y] and E[x]·E[y]; none if the values are something else."""
    passed, mean = _behind(view, minuend)
    more, product = _behind(view, subtrahend)
    gram, averaging = _products(view, mean), _averaging(view, mean)
    factors = _factors(product) or _products(view, product)
    if mean is None or not (averaging or gram) or not factors:
        return ()
    squares = mean.kind == "ReduceSumSquare"
    inside, inner = ([], mean) if squares or gram else _behind(view, mean.inputs[0])
    terms = mean.inputs[:1] * 2 if squares else gram or _factors(inner)
    means = [_behind(view, value) for value in factors]
    known = [(m.inputs[0], key) for _, m in means if m is not None and (key := _averaging(view, m)) is not None]
    read = [value for value, key in known if gram or key == averaging]
    if len(terms) != 2 or len(read) != 2 or _sources(view, terms) != _sources(view, read):
        return ()
    return [op.id for ops in (passed, inside, more, *(ops for ops, _ in means)) for op in ops]


def _averaging(view: View, op: Op | None) -> tuple[object, ...] | None:
    """Return a key that is equal for ops that average, or sum, the same elements by the same weights; else None."""
    if op is not None and op.kind in _REDUCTIONS:
        return ("Reduce", *axes_of(view, op))
    if op is not None and op.kind in _WINDOWS:
        return (op.kind, op.inputs[1:], *sorted(a.SerializeToString() for a in op.node.attribute))
    return None


def _behind(view: View, value: ValueId | None) -> tuple[list[Op], Op | None]:
    """Return the op that computes a value behind copies and constant factors, None for inputs, and all ops passed."""
    passed, source = trail(view, value, multiples(view), most=_FAR)
    op = view.producer(source)
    return (passed if op is None or len(passed) == _FAR else [*passed, op]), op


def _sources(view: View, values: Sequence[ValueId | None]) -> set[ValueId | None]:
    return {trail(view, value, multiples(view), most=_FAR)[1] for value in values}


def _products(view: View, op: Op | None) -> Sequence[ValueId | None]:
    """Return the two operands of a product of variables, which sums as well; none for other ops."""
    plain = op is not None and op.kind in PRODUCTS and all(view.constant(v) is None for v in op.inputs[:2])
    return op.inputs[:2] if op is not None and plain else ()


def _factors(op: Op | None) -> Sequence[ValueId | None]:
    """Return the two factors of a product or square; none for other ops."""
    if op is None or op.kind not in SQUARES:
        return ()
    return op.inputs[:2] if op.kind == "Mul" else op.inputs[:1] * 2
