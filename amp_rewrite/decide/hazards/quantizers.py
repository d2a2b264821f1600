"""Quantizers whose integers or 8-bit floats, times their scale, leave the low type's range."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.rule import rule
from amp_rewrite.decide.hazards.steps import float32_constant, in_float32
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import Flow, computes_float32, float32, makers
from amp_rewrite.ir.op_classes import DEQUANTIZES, KEEP_SCALE, QUANTIZERS, QUANTIZES
from amp_rewrite.ir.view import Op, OpId, View

_FLOATS = (DType.FLOAT8E4M3FN, DType.FLOAT8E4M3FNUZ, DType.FLOAT8E5M2, DType.FLOAT8E5M2FNUZ)  # zero points are 0
_INTEGERS = (DType.INT8, DType.UINT8, DType.INT16, DType.UINT16)
"""Types that matter: four bits are too small, and no bias fills its int32."""


@rule(reasons.QUANTIZER, "A quantizer with a scale beyond the type keeps float32 around it.")
def quantizers(view: View, to: DType) -> Iterator[Pin]:
    """Pin ops that quantize or dequantize beyond the low type; with a constant scale also their neighbours. O(uses).

    What it protects: QuantizeLinear and DequantizeLinear, and the ops that feed or read them.
    Why: A constant scale records how large the values were at calibration: 128 · 1000 overflows float16. FLOAT8E5M2
        reaches 57344 without a scale, and a scale computed at run time is not known to be small.
    Example: Int8 codes with a scale of 1000.
    How to override: `--lower 'op=DequantizeLinear'`.
    Source: ONNX operators QuantizeLinear and DequantizeLinear; "Float stored in 8 bits".
    """
    beyond: dict[OpId, str] = {}
    for op in view.ops:
        note = _beyond(view, op, to) if op.kind in QUANTIZERS and computes_float32(view, op) else None
        if note is not None:
            beyond[op.id] = note
            yield Pin(op.id, reasons.QUANTIZER, None, note)
    sure = [view.ops[op_id] for op_id in beyond if view.constant(view.ops[op_id].inputs[1]) is not None]
    for op_id, cause in (_neighbours(view, sure) if sure else {}).items():
        yield Pin(op_id, reasons.QUANTIZER, cause, beyond[cause])


def _beyond(view: View, op: Op, to: DType) -> str | None:
    """Return a note if an op's integers or 8-bit floats, scaled, exceed the low type."""
    value, scale = op.outputs[0] if op.kind in QUANTIZES else op.inputs[0], op.inputs[1]
    kind = view.dtype(value)
    most = _farthest(view, op, kind) if kind is not None else None
    if kind is None or scale is None or most is None:
        return None
    if view.constant(scale) is None:
        unsure = kind in _FLOATS and most > to.max / 2
        return f"{kind.spelling} goes to {most:g}, and its scale is not known to be small" if unsure else None
    times = view.fit(scale, to).absmax if float32_constant(view, op, 1) is not None else 0.0
    return f"{most:g} of {kind.spelling} times {times:g} is beyond {to.max:g}" if most * times > to.max else None


def _farthest(view: View, op: Op, kind: DType) -> float | None:
    """Return the largest distance of a type's numbers from the op's zero point; None for other types."""
    if kind in _FLOATS:
        import ml_dtypes

        return float(ml_dtypes.finfo(kind.numpy).max)
    if kind not in _INTEGERS:
        return None
    limits, zero = np.iinfo(kind.numpy), op.inputs[2] if len(op.inputs) > 2 else None
    if zero is None:
        return float(max(limits.max, -limits.min))
    zeros = view.array(zero)
    if zeros is None:
        return float(limits.max)
    zeros = zeros.astype(np.int64)
    return float(max(limits.max - zeros.min(initial=limits.max), zeros.max(initial=limits.min) - limits.min))


def _neighbours(view: View, sure: Sequence[Op]) -> dict[OpId, OpId]:
    """Return the float32 ops that make quantized values or read dequantized ones, through copies too; each with its op.

    Ops of a maximum or selection count as copies: their results are as large as what they read.
    """
    flow = Flow.of(view, KEEP_SCALE)
    read = {v: op.id for op in sure if op.kind in QUANTIZES and (v := op.inputs[0]) is not None}
    written = {v: op.id for op in sure if op.kind in DEQUANTIZES and (v := op.outputs[0]) is not None}
    causes = makers(view, flow.back(read, float32(view)))
    for value, cause in flow.forth(written, float32(view)).items():
        for reader in view.readers(value):
            causes.setdefault(reader.id, cause)
    return in_float32(view, causes)
