"""Ops that compute with shapes and constants alone."""

from __future__ import annotations

from amp_rewrite.decide.hazards.constant_folding import constant_ops
from amp_rewrite.ir.op_classes import ELEMENTLESS, RANDOM
from amp_rewrite.ir.view import OpId, View


def numbers(view: View) -> frozenset[OpId]:
    """Return the ops whose results depend on shapes and constants alone, not on data. O(nodes + uses).

    An example is an attention scale computed as `Pow(head size, -0.5)`. Pow is on the deny list, but this one is not a
    reason to keep the attention behind it in float32.
    """
    return frozenset(op.id for op in constant_ops(view, RANDOM, ELEMENTLESS))
