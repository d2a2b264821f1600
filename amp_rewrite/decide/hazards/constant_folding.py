"""Arithmetic on constants, which a runtime computes once, at load time."""

from __future__ import annotations

from collections.abc import Container, Iterator

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.rule import HeldOp, rule
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.op_classes import COPIES, ELEMENTLESS, QUANTIZERS, RANDOM
from amp_rewrite.ir.view import Op, OpId, ValueId, View

# Folded in any type. A quantized weight is not folded: its op is fused with the product that reads it.
_MOVES = frozenset({*COPIES, "ConstantOfShape", "Where"})
_NEVER_FOLDED = RANDOM | {kind for kind in QUANTIZERS if "::" not in kind}


@rule(reasons.FOLDED, "Arithmetic on constants alone stays foldable at load time.")
def folded(view: View, to: DType) -> Iterator[HeldOp]:
    """Hold arithmetic whose inputs are constants or computed from constants. O(nodes + uses).

    What it protects: Constant folding in the runtime, and the precision of the folded values.
    Why: onnxruntime folds constants with its CPU kernels. Those support half precision for ops that move data, but not
        for arithmetic: a lowered op stays in the graph and runs in every inference.
    Example: DeBERTa multiplies its table of relative positions by the weights of every layer, a product as large as
        that of the layer's own keys.
    Source: onnxruntime, graph optimizations, "Constant Folding".
    """
    for op in constant_ops(view, _NEVER_FOLDED):
        if op.kind not in _MOVES:
            yield HeldOp(op.id, None, "reads constants alone: computed once, in float32, when a model is loaded")


def numbers(view: View) -> frozenset[OpId]:
    """Return the ops whose results depend on shapes and constants alone, not on data. O(nodes + uses).

    An example is an attention scale computed as `Pow(head size, -0.5)`. Pow is on the deny list, but this one is not a
    reason to keep the attention behind it in float32.
    """
    return frozenset(op.id for op in constant_ops(view, RANDOM, ELEMENTLESS))


def constant_ops(view: View, never: Container[str], sources: Container[str] = ()) -> Iterator[Op]:
    """Yield the ops that read only constants, results of `sources`, and results of other such ops.

    Kinds in `never`, ops with bodies and unknown ops do not count.
    """
    known: set[ValueId | None] = {None, *view.constants}
    for op in view.ops:
        plain = known.issuperset(op.inputs) and not op.bodies and op.signature is not None and op.kind not in never
        constant = plain and bool(op.operands)
        if constant or op.kind in sources:
            known.update(op.outputs)
        if constant:
            yield op
