"""Arithmetic on constants alone, which a runtime does once, when it loads the model."""

from __future__ import annotations

from collections.abc import Iterator

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.rule import rule
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import computes_float32
from amp_rewrite.ir.op_classes import COPIES, DEQUANTIZES, QUANTIZES, RANDOM
from amp_rewrite.ir.view import Op, OpId, ValueId, View

# Folded in any type. A quantized weight is not folded: its op is fused with the product that reads it.
_MOVES = frozenset({*COPIES, "ConstantOfShape", "Where"})
_NEVER_FOLDED = RANDOM | {kind for kind in QUANTIZES | DEQUANTIZES if "::" not in kind}


@rule(reasons.FOLDED, "Arithmetic on constants alone stays foldable at load time.")
def folded(view: View, to: DType) -> Iterator[Pin]:
    """Pin arithmetic whose inputs are constants, or computed from constants alone. O(nodes + uses).

    What it protects: Constant folding in the runtime, and the digits of what is folded.
    Why: onnxruntime folds constants with its CPU kernels. Those have half precision for ops that move data, but not
        for arithmetic: lowered, such an op stays in the graph and runs again in every inference.
    Example: A DeBERTa projects its table of relative positions by the weights of every layer, a product as large as
        that of the layer's own keys.
    Source: onnxruntime, graph optimizations, "Constant Folding".
    """
    known: set[OpId] = set()
    for op in view.ops:
        if op.bodies or op.signature is None or op.kind in _NEVER_FOLDED or not _fixed(view, op, known):
            continue
        known.add(op.id)
        if op.kind not in _MOVES and computes_float32(view, op):
            note = "reads constants alone: computed once, in float32, when a model is loaded"
            yield Pin(op.id, reasons.FOLDED, None, note)


def _fixed(view: View, op: Op, known: set[OpId]) -> bool:
    read = [value for value in op.inputs if value is not None]
    return bool(read) and all(_constant(view, value, known) for value in read)


def _constant(view: View, value: ValueId, known: set[OpId]) -> bool:
    return view.values[value].producer in known or view.constant(value) is not None
