"""Logarithms of probabilities."""

from __future__ import annotations

from collections.abc import Iterator

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.rule import rule
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import Flow, computes_float32, makers
from amp_rewrite.ir.op_classes import CARRIERS, PAIR_SUMS, SQUEEZES
from amp_rewrite.ir.view import Op, ValueId, View

_LOGARITHMS = ("Log", "Atanh")


@rule(reasons.LOGARITHM, "From a softmax or sigmoid to the logarithm of its result all ops are float32.")
def logarithm(view: View, to: DType) -> Iterator[Pin]:
    """Pin the ops from a squeeze to a logarithm, and sums with constants before a logarithm. O(nodes + uses).

    What it protects: The argument of Log and Atanh, half the logarithm of (1 + x) / (1 − x).
    Why: A logarithm turns a relative error into an absolute one, and zero into −inf. float16 has only zero below 6e-8
        and only 1 above 0.9998: the probability of an unlikely class vanishes, and so does 1 − p of a likely one,
        where float32 has a logarithm of −17 or −9. The scores before the softmax need no more digits than others.
    Example: log(softmax(x)), log(1 − sigmoid(x)), log(1 + x).
    How to override: LogSoftmax in the model; `--lower 'op=Log'`.
    Source: IEEE 754 binary16: smallest subnormal 2⁻²⁴, largest number below 1 is 1 − 2⁻¹¹.
    """
    ends = {op.inputs[0]: op.id for op in reversed(view.ops) if op.kind in _LOGARITHMS and op.inputs[0] is not None}
    if not ends:
        return
    flow = Flow.of(view, {kind: slots for kind, slots in CARRIERS.items() if kind not in SQUEEZES})
    squeezes = {op.outputs[0]: op.id for op in view.ops if op.kind in SQUEEZES and op.outputs[0] is not None}
    squeezed = flow.forth(squeezes, lambda value: view.dtype(value) is DType.FLOAT)
    marked = flow.back(ends, lambda value: value in squeezed or _shifted(view, value))
    pins = {**makers(view, marked), **{ends[v]: ends[v] for v in ends if v in marked}}
    for op_id, cause in sorted(pins.items()):
        if computes_float32(view, view.ops[op_id]):
            end = view.ops[cause]
            yield Pin(op_id, reasons.LOGARITHM, cause, f"computes the argument of {end.name!r} ({end.kind})")


def _shifted(view: View, value: ValueId) -> bool:
    """Whether a value is a float32 sum or difference of one value and constants."""
    op: Op | None = view.producer(value)
    if op is None or op.kind not in PAIR_SUMS or view.dtype(value) is not DType.FLOAT:
        return False
    return any(view.constant(v) is not None for v in op.inputs if v is not None)
