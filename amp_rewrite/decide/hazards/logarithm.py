"""Logarithms of probabilities."""

from __future__ import annotations

from collections.abc import Iterator

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.rule import rule
from amp_rewrite.decide.hazards.steps import described, first_inputs, in_float32, results_of
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import Flow, float32, makers
from amp_rewrite.ir.op_classes import CARRIERS, PAIR_SUMS, SQUEEZES
from amp_rewrite.ir.view import ValueId, View


@rule(reasons.LOGARITHM, "From a softmax or sigmoid to the logarithm of its result all ops are float32.")
def logarithm(view: View, to: DType) -> Iterator[Pin]:
    """Pin the ops from a squeeze to a logarithm, and sums with constants before a logarithm. O(nodes + uses).

    What it protects: The argument of Log, and of Atanh, which is half the logarithm of (1 + x) / (1 − x).
    Why: A logarithm turns a relative error into an absolute one, and zero into −inf. float16 rounds small p to 0 below
        3e-8 and large p to 1 above 0.9998, where the logarithms of p and 1 − p are −17 and −9.
    Example: log(softmax(x)), log(1 − sigmoid(x)), log(1 + x).
    How to override: LogSoftmax in the model; `--lower 'op=Log'`.
    Source: IEEE 754 binary16: smallest subnormal 2⁻²⁴, largest number below 1 is 1 − 2⁻¹¹.
    """
    ends = first_inputs(view, ("Log", "Atanh"))
    if not ends:
        return
    flow = Flow.of(view, {kind: slots for kind, slots in CARRIERS.items() if kind not in SQUEEZES})
    squeezed = flow.forth(results_of(view, SQUEEZES), float32(view))
    marked = flow.back(ends, lambda value: value in squeezed or _shifted(view, value))
    pins = {**makers(view, marked), **{op_id: op_id for value, op_id in ends.items() if value in marked}}
    for op_id, cause in in_float32(view, pins).items():
        yield Pin(op_id, reasons.LOGARITHM, cause, f"computes the argument of {described(view, cause)}")


def _shifted(view: View, value: ValueId) -> bool:
    """True if a value is a float32 sum or difference of a value and a constant."""
    op = view.producer(value, *PAIR_SUMS) if view.dtype(value) is DType.FLOAT else None
    return op is not None and any(view.constant(v) is not None for v in op.inputs)
