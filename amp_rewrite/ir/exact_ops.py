"""Exact ops: on values of a low type, their results are values of that type without rounding."""

from __future__ import annotations

from amp_rewrite.ir.attributes import text_attribute
from amp_rewrite.ir.nodes import Op
from amp_rewrite.ir.op_classes import EXACT, SCATTERS
from amp_rewrite.ir.versions import FIRST_PAD_WITH_INPUTS


def exact(op: Op) -> bool:
    """True if an op on low values needs no rounding. O(attributes)."""
    if op.kind in EXACT:
        return True
    if op.kind == "Clip":  # an omitted bound is the largest value of the type; one in an attribute may be any float32
        return len(op.inputs) == 3 and None not in op.inputs
    if op.kind == "Pad":  # an attribute may be any float32
        return op.signature is not None and op.signature.since >= FIRST_PAD_WITH_INPUTS
    if op.kind in SCATTERS:
        return text_attribute(op.node, "reduction", "none") in ("none", "max", "min")
    return False
