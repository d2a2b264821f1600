"""Ops whose results need no rounding: on values of a low type they give values of that type."""

from __future__ import annotations

from amp_rewrite.ir.nodes import Op
from amp_rewrite.ir.op_classes import EXACT, SCATTERS
from amp_rewrite.ir.schema import attribute
from amp_rewrite.ir.versions import FIRST_PAD_WITH_INPUTS


def exact(op: Op) -> bool:
    """True if the low results of an op are values of the low type before any rounding. O(attributes)."""
    if op.kind in EXACT:
        return True
    if op.kind == "Clip":  # a bound left out is the largest value of the type; one in an attribute is any float32
        return len(op.inputs) == 3 and None not in op.inputs
    if op.kind == "Pad":  # an attribute is float32 and any value
        return op.signature is not None and op.signature.since >= FIRST_PAD_WITH_INPUTS
    if op.kind in SCATTERS:
        reduction = attribute(op.node, "reduction")
        return reduction is None or reduction.s in (b"none", b"max", b"min")
    return False
