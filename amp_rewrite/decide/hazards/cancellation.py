"""Variances and covariances written as E[x·y] − E[x]·E[y]."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.rule import rule
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import axes_of, computes_float32, multiples, trail
from amp_rewrite.ir.op_classes import PAIR_SUMS, SQUARES
from amp_rewrite.ir.view import Op, OpId, ValueId, View

_REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceSumSquare")
_WINDOWS = ("AveragePool", "Conv", "GlobalAveragePool", "MatMul")
_FAR = 32  # copies and constant factors in a row


@rule(reasons.CANCELLATION, "A variance written as E[x²] − E[x]² is computed in float32.")
def cancellation(view: View, to: DType) -> Iterator[Pin]:
    """Pin such a difference and all that computes it from x and y. O(nodes).

    What it protects: Variances and covariances written as E[x·y] − E[x]·E[y], with means or with convolutions.
    Why: The result is small beside both terms. At x = 10 ± 0.1 a variance of 0.01 is the difference of two numbers
        near 100, where neighbouring float16 numbers are 0.06 apart.
    Example: Norms written this way, structural similarity (SSIM), guided filters.
    How to override: `--lower 'op=Sub'` or a narrower pattern.
    Source: Catastrophic cancellation, Goldberg 1991, "What every computer scientist should know about floating-point
        arithmetic".
    """
    pins: dict[OpId, OpId] = {}
    for op in view.ops:
        for minuend, subtrahend in _differences(view, op):
            for op_id in _variance(view, minuend, subtrahend):
                pins.setdefault(op_id, op.id)
                pins.setdefault(op.id, op.id)
    for op_id, cause in sorted(pins.items()):
        if computes_float32(view, view.ops[op_id]):
            note = "a variance as a difference of means, which is small beside them"
            yield Pin(op_id, reasons.CANCELLATION, cause, note)


def _differences(view: View, op: Op) -> Iterator[tuple[ValueId | None, ValueId | None]]:
    """What an op subtracts from what, either way round: the sign of a variance does not matter."""
    if op.kind not in PAIR_SUMS or len(op.inputs) != 2:
        return
    first, second = op.inputs
    if op.kind == "Sub":
        yield from ((first, second), (second, first))
        return
    for kept, other in ((first, second), (second, first)):
        negated = view.producer(other)
        if negated is not None and negated.kind == "Neg":
            yield kept, negated.inputs[0]


def _variance(view: View, minuend: ValueId | None, subtrahend: ValueId | None) -> Collection[OpId]:
    """The ops of E[x·y] and E[x]·E[y]; none where these are something else."""
    mean, product = _made(view, minuend), _made(view, subtrahend)
    factors, manner = _factors(product.op), None if mean.op is None else _manner(view, mean.op)
    if mean.op is None or manner is None or not factors:
        return ()
    if mean.op.kind == "ReduceSumSquare":
        inner, of = _Made((), None, mean.value), mean.op.inputs[:1] * 2
    else:
        inner = _made(view, mean.op.inputs[0])
        of = _factors(inner.op)
    means = [_made(view, value) for value in factors]
    read = [m.op.inputs[0] for m in means if m.op is not None and _manner(view, m.op) == manner]
    if len(of) != 2 or len(read) != 2 or {_made(view, v).value for v in of} != {_made(view, v).value for v in read}:
        return ()
    parts = (mean, inner, product, *means)
    return {op_id for part in parts for op_id in part.ops}


def _manner(view: View, op: Op) -> tuple[object, ...] | None:
    """How an op makes means, or sums that a factor makes means of: the same for those over the same elements with the
    same weights. None for an op that makes none."""
    if op.kind in _REDUCTIONS:
        return ("Reduce", *axes_of(view, op))
    if op.kind in _WINDOWS:
        return (op.kind, op.inputs[1:], *sorted(a.SerializeToString() for a in op.node.attribute))
    return None


class _Made(NamedTuple):
    """What makes a value, copies and constant factors looked past: those and the op (none for inputs), and what that
    gives."""

    ops: tuple[OpId, ...]
    op: Op | None
    value: ValueId | None


def _made(view: View, value: ValueId | None) -> _Made:
    passed, source = trail(view, value, multiples(view), most=_FAR)
    op = view.producer(source)
    last = [op] if op is not None and len(passed) < _FAR else []
    return _Made(tuple(step.id for step in (*passed, *last)), op, source)


def _factors(op: Op | None) -> tuple[ValueId | None, ...]:
    """The two factors of a product or square."""
    if op is None or op.kind not in SQUARES:
        return ()
    return op.inputs[:2] if op.kind == "Mul" else op.inputs[:1] * 2
