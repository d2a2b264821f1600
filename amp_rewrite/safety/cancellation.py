"""Cancellation: variances and covariances written as E[x·y] − E[x]·E[y], what is left being small beside both.

At x = 10 ± 0.1 a variance of 0.01 is the difference of two numbers near 100, which neighbouring float16 numbers are
0.06 apart. Norms are written so, structural similarity and guided filters too, where the means are convolutions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from amp_rewrite.dtypes import DType
from amp_rewrite.pin import Pin
from amp_rewrite.safety.flow import COPIES, computes_float32
from amp_rewrite.view import Op, OpId, ValueId, View

_MEANS = ("AveragePool", "Conv", "GlobalAveragePool", "MatMul", "ReduceMean", "ReduceSum")
"""Ops that give means, or sums that a factor makes means of."""
_FAR = 32  # copies and constant factors in a row


def cancellation(view: View, to: DType) -> Iterator[Pin]:
    """Pins on such a difference and all that computes it from x and y. O(nodes)."""
    pins: dict[OpId, OpId] = {}
    for op in view.ops:
        if op.kind == "Sub":
            for op_id in _variance(view, op):
                pins.setdefault(op_id, op.id)
    for op_id, cause in sorted(pins.items()):
        if computes_float32(view, view.ops[op_id]):
            yield Pin(op_id, "cancellation", cause, "a variance as a difference of means, which is small beside them")


def _variance(view: View, difference: Op) -> Collection[OpId]:
    """The ops of E[x·y] − E[x]·E[y]; none where it is another difference."""
    mean, product = (_made(view, value) for value in difference.inputs)
    factors = _factors(product.op)
    if mean.op is None or not factors:
        return ()
    if mean.op.kind == "ReduceSumSquare":
        inner, of = _Made((), None, mean.value), mean.op.inputs[:1] * 2
    elif mean.op.kind in _MEANS:
        inner = _made(view, mean.op.inputs[0])
        of = _factors(inner.op)
    else:
        return ()
    means = [_made(view, value) for value in factors]
    read = [m.op.inputs[0] for m in means if m.op is not None and m.op.kind in _MEANS]
    if len(of) != 2 or {_made(view, v).value for v in of} != {_made(view, v).value for v in read} or len(read) != 2:
        return ()
    parts = (mean, inner, product, *means)
    return {difference.id, *(op_id for part in parts for op_id in part.ops)}


class _Made(NamedTuple):
    """What makes a value, copies and constant factors looked past: those and the op (none for inputs), and what that
    gives."""

    ops: tuple[OpId, ...]
    op: Op | None
    value: ValueId | None


def _made(view: View, value: ValueId | None) -> _Made:
    passed: list[OpId] = []
    while (op := view.producer(value)) is not None and len(passed) < _FAR:
        passed.append(op.id)
        before = _before(view, op)
        if before is None:
            break
        value = before
    return _Made(tuple(passed), op, value)


def _before(view: View, op: Op) -> ValueId | None:
    """What an op copies, or multiplies by a constant."""
    if op.kind in COPIES and op.kind != "Concat":
        return op.inputs[0]
    varying = [v for v in op.inputs if v is not None and view.constant(v) is None]
    scales = op.kind == "Mul" or (op.kind == "Div" and varying == [op.inputs[0]])
    return varying[0] if scales and len(varying) == 1 else None


def _factors(op: Op | None) -> tuple[ValueId | None, ...]:
    """The two factors of a product or square."""
    if op is None or op.kind not in ("Mul", "Pow"):
        return ()
    return op.inputs[:2] if op.kind == "Mul" else op.inputs[:1] * 2
