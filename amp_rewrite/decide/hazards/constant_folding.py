"""Arithmetic on constants, which a runtime computes once, at load time."""

from __future__ import annotations

from collections.abc import Container, Iterator

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.rule import rule
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import computes_float32
from amp_rewrite.ir.op_classes import COPIES, QUANTIZERS, RANDOM
from amp_rewrite.ir.view import Op, OpId, ValueId, View

# Folded in any type. A quantized weight is not folded: its op is fused with the product that reads it.
_MOVES = frozenset({*COPIES, "ConstantOfShape", "Where"})
_NEVER_FOLDED = RANDOM | {kind for kind in QUANTIZERS if "::" not in kind}


@rule(reasons.FOLDED, "Arithmetic on constants alone stays foldable at load time.")
def folded(view: View, to: DType) -> Iterator[Pin]:
    """Pin arithmetic whose inputs are constants or computed from constants. O(nodes + uses).

    What it protects: Constant folding in the runtime, and the precision of the folded values.
    Why: onnxruntime folds constants with its CPU kernels. Those support half precision for ops that move data, but not
        for arithmetic: a lowered op stays in the graph and runs in every inference.
    Example: DeBERTa multiplies its table of relative positions by the weights of every layer, a product as large as
        that of the layer's own keys.
    Source: onnxruntime, graph optimizations, "Constant Folding".
    """
    for op in constant_ops(view, _NEVER_FOLDED):
        if op.kind not in _MOVES and computes_float32(view, op):
            note = "reads constants alone: computed once, in float32, when a model is loaded"
            yield Pin(op.id, reasons.FOLDED, None, note)


def constant_ops(view: View, never: Container[str], sources: Container[str] = ()) -> Iterator[Op]:
    """Yield the ops that read only constants, results of `sources`, and results of other such ops.

    Kinds in `never`, ops with bodies and unknown ops do not count.
    """
    known: set[OpId] = set()

    def constant(value: ValueId) -> bool:
        op = view.producer(value)
        return (op is not None and (op.id in known or op.kind in sources)) or view.constant(value) is not None

    for op in view.ops:
        if op.bodies or op.signature is None or op.kind in never:
            continue
        read = op.operands
        if read and all(map(constant, read)):
            known.add(op.id)
            yield op
