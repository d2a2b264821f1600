"""Ops that compute with the model's shapes and constants alone: numbers of the model, not of its data."""

from __future__ import annotations

from amp_rewrite.ir.op_classes import ELEMENTLESS, RANDOM
from amp_rewrite.ir.view import Op, OpId, ValueId, View


def numbers(view: View) -> frozenset[OpId]:
    """The ops behind which stands no value that a caller feeds. What they give cannot grow with the data.

    An attention scale computed as `Pow(head size, -0.5)` is one; that Pow stands on the deny list, but it is no
    reason to keep the whole attention behind it in float32. O(nodes + uses).
    """
    found: set[OpId] = set()
    for op in view.ops:
        if op.inputs and not op.bodies and op.kind not in RANDOM and op.signature is not None:
            for value in op.inputs:  # mostly the first one is fed
                if value is not None and not _fixed(view, value, found):
                    break
            else:
                if any(value is not None for value in op.inputs):
                    found.add(op.id)
    return frozenset(found)


def _fixed(view: View, value: ValueId, found: set[OpId]) -> bool:
    op: Op | None = view.producer(value)
    if op is None or op.kind == "Constant":
        return view.constant(value) is not None
    return op.kind in ELEMENTLESS or op.id in found
