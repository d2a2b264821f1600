"""Variances and covariances written as E[x·y] − E[x]·E[y]."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.rule import rule
from amp_rewrite.decide.hazards.steps import in_float32
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import axes_of, multiples, trail
from amp_rewrite.ir.op_classes import PAIR_SUMS, PRODUCTS, SQUARES
from amp_rewrite.ir.view import Op, OpId, ValueId, View

_REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceSumSquare")
_WINDOWS = ("AveragePool", "Conv", "GlobalAveragePool", "MatMul")
_FAR = 32  # copies and constant factors in a row


@rule(reasons.CANCELLATION, "A variance written as E[x²] − E[x]² is computed in float32.")
def cancellation(view: View, to: DType) -> Iterator[Pin]:
    """Pin the difference and the ops that compute it from x and y. O(nodes).

    What it protects: Variances and covariances written as E[x·y] − E[x]·E[y], by means, convolutions or products.
    Why: The result is small compared with both terms. For x = 10 ± 0.1 the variance 0.01 is the difference of two
        numbers near 100, where the float16 spacing is 0.06.
    Example: Norms written this way, structural similarity (SSIM), guided filters.
    How to override: `--lower 'op=Sub'` or a narrower pattern.
    Source: Catastrophic cancellation, Goldberg 1991, "What every computer scientist should know about floating-point
        arithmetic".
    """
    pins: dict[OpId, OpId] = {}
    for op in view.ops:
        for minuend, subtrahend in _differences(view, op):
            parts = _variance(view, minuend, subtrahend)
            for op_id in (*parts, op.id) if parts else ():
                pins.setdefault(op_id, op.id)
    for op_id, cause in in_float32(view, pins).items():
        note = "a variance as a difference of means, which is small beside them"
        yield Pin(op_id, reasons.CANCELLATION, cause, note)


def _differences(view: View, op: Op) -> Iterator[tuple[ValueId | None, ValueId | None]]:
    """Yield minuend and subtrahend of an op, in both orders: the sign of a variance does not matter."""
    if op.kind not in PAIR_SUMS or len(op.inputs) != 2:
        return
    for kept, other in (op.inputs, op.inputs[::-1]):
        negated = view.producer(other, "Neg")
        if op.kind == "Sub":
            yield kept, other
        elif negated is not None:
            yield kept, negated.inputs[0]


def _variance(view: View, minuend: ValueId | None, subtrahend: ValueId | None) -> Collection[OpId]:
    """Return the ops of E[x·y] and E[x]·E[y]; none if the values are something else."""
    mean, product = _source(view, minuend), _source(view, subtrahend)
    gram = _products(view, mean.op)
    factors, averaging = _factors(product.op) or _products(view, product.op), _averaging(view, mean.op)
    if mean.op is None or not (averaging or gram) or not factors:
        return ()
    squares = mean.op.kind == "ReduceSumSquare"
    inner = mean if squares or gram else _source(view, mean.op.inputs[0])
    terms = mean.op.inputs[:1] * 2 if squares else gram or _factors(inner.op)
    means = [_source(view, value) for value in factors]
    known = [(m.op.inputs[0], key) for m in means if m.op is not None and (key := _averaging(view, m.op)) is not None]
    read = [value for value, key in known if gram or key == averaging]
    if len(terms) != 2 or len(read) != 2:
        return ()
    if {_source(view, v).value for v in terms} != {_source(view, v).value for v in read}:
        return ()
    return {op_id for part in (mean, inner, product, *means) for op_id in part.ops}


def _averaging(view: View, op: Op | None) -> tuple[object, ...] | None:
    """Return a key that is equal for ops that average, or sum, the same elements by the same weights.

    None for ops that do neither.
    """
    if op is not None and op.kind in _REDUCTIONS:
        return ("Reduce", *axes_of(view, op))
    if op is not None and op.kind in _WINDOWS:
        return (op.kind, op.inputs[1:], *sorted(a.SerializeToString() for a in op.node.attribute))
    return None


class _Source(NamedTuple):
    """A value behind copies and constant factors, the op that computes it (None for inputs), and all ops passed."""

    ops: tuple[OpId, ...]
    op: Op | None
    value: ValueId | None


def _source(view: View, value: ValueId | None) -> _Source:
    passed, source = trail(view, value, multiples(view), most=_FAR)
    op = view.producer(source)
    last = [op] if op is not None and len(passed) < _FAR else []
    return _Source(tuple(step.id for step in (*passed, *last)), op, source)


def _products(view: View, op: Op | None) -> tuple[ValueId | None, ...]:
    """Return the two operands of a product of variables, which sums as well; none for other ops."""
    if op is None or op.kind not in PRODUCTS or any(view.constant(v) is not None for v in op.inputs[:2]):
        return ()
    return op.inputs[:2]


def _factors(op: Op | None) -> tuple[ValueId | None, ...]:
    """Return the two factors of a product or square; none for other ops."""
    if op is None or op.kind not in SQUARES:
        return ()
    return op.inputs[:2] if op.kind == "Mul" else op.inputs[:1] * 2
