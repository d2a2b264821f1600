"""Ops whose results need no rounding: on values of a low type they give values of that type."""

from __future__ import annotations

from amp_rewrite.ir.nodes import Op
from amp_rewrite.ir.schema import attribute
from amp_rewrite.ir.versions import FIRST_PAD_WITH_INPUTS

# Copies, selections, and what rounds to whole numbers. An op is here only if no input at all, infinities
# included, makes its float32 kernel leave the low type; MaxPool starts from the lowest float32 and is not.
_NAMES = """
Abs Ceil CenterCropPad Compress Concat ConcatFromSequence Constant ConstantOfShape DepthToSpace Expand EyeLike
Flatten Floor Gather GatherElements GatherND Hardmax Identity If Loop Max Min Neg OneHot Optional
OptionalGetElement Relu Reshape ReverseSequence Round Scan SequenceAt SequenceConstruct SequenceEmpty
SequenceErase SequenceInsert SequenceMap Sign Slice SpaceToDepth Split SplitToSequence Squeeze TensorScatter
Tile TopK Transpose Trilu Unique Unsqueeze Where com.microsoft::ExpandDims
"""
_EXACT = frozenset(_NAMES.split())


def exact(op: Op) -> bool:
    """Whether the op's low results are values of the low type before any rounding. O(attributes)."""
    if op.kind in _EXACT:
        return True
    if op.kind == "Clip":  # a bound left out is the largest value of the type; one in an attribute is any float32
        return len(op.inputs) == 3 and None not in op.inputs
    if op.kind == "Pad":  # an attribute is float32 and any value
        return op.signature is not None and op.signature.since >= FIRST_PAD_WITH_INPUTS
    if op.kind in ("Scatter", "ScatterElements", "ScatterND"):
        reduction = attribute(op.node, "reduction")
        return reduction is None or reduction.s in (b"none", b"max", b"min")
    return False
