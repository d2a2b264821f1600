"""Ops on integers in runtimes, between DequantizeLinear and QuantizeLinear."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import Flow, exposed, makers
from amp_rewrite.ir.op_classes import DEQUANTIZES, KEEP_SCALE, LAYERS, PRODUCTS, QUANTIZERS, QUANTIZES
from amp_rewrite.ir.view import Op, OpId, ValueId, View

_WEIGHTED = LAYERS | PRODUCTS
"""Ops with integer kernels that give floats, too: they may end an integer region."""


def integer_ops(view: View) -> Mapping[OpId, OpId]:
    """Return the ops on integers, and the copies between them and their quantizers.

    Each has the op that it serves: itself, or the op at the end of the copies.
    """
    decoded = {v for op in view.of_kinds(DEQUANTIZES) if (v := op.outputs[0]) is not None}
    if not decoded:
        return {}
    for op in view.ops:
        if op.kind in KEEP_SCALE and op.outputs[0] is not None and _decoded(view, op, decoded):
            decoded.add(op.outputs[0])
    encoded: set[ValueId] = set()
    for op in reversed(view.ops):
        encoded.update(v for v in op.outputs if v is not None and _encoded(view, v, encoded))
    own = [op for op in view.ops if _on_integers(view, op, decoded, encoded)]
    flow = Flow.of(view, KEEP_SCALE)
    before = flow.back({v: op.id for op in own for v in op.operands if v in decoded}, decoded.__contains__)
    behind = flow.forth({v: op.id for op in own for v in op.results if v in encoded}, encoded.__contains__)
    passed = {reader.id: cause for v, cause in behind.items() for reader in view.readers(v)} | makers(view, before)
    copies = {op_id: cause for op_id, cause in passed.items() if flow.through(view.ops[op_id])}
    return dict(sorted({**copies, **{op.id: op.id for op in own}}.items()))


def _decoded(view: View, op: Op, decoded: Collection[ValueId]) -> bool:
    """True if all float32 operands of an op are dequantized, or constants beside those."""
    read = [v for v in op.inputs if v is not None and view.dtype(v) is DType.FLOAT]
    varying = read[:2] if op.kind in _WEIGHTED else [v for v in read if view.constant(v) is None]
    return bool(varying) and all(v in decoded for v in varying)


def _encoded(view: View, value: ValueId, encoded: Collection[ValueId]) -> bool:
    """True if only quantizers read a value, copies between."""
    if view.dtype(value) is not DType.FLOAT or not view.uses[value] or exposed(view, value):
        return False
    for use in view.uses[value]:
        op = view.ops[use.op]
        copied = use.slot in KEEP_SCALE.get(op.kind, ()) and op.outputs[0] in encoded
        if not copied and (op.kind not in QUANTIZES or use.slot):
            return False
    return True


def _on_integers(view: View, op: Op, decoded: Collection[ValueId], encoded: Collection[ValueId]) -> bool:
    if op.kind in QUANTIZERS or op.signature is None or op.bodies:
        return False
    made = [v for v in op.outputs if v is not None and view.dtype(v) is DType.FLOAT]
    ends = op.kind in _WEIGHTED or (bool(made) and all(v in encoded for v in made))
    return ends and _decoded(view, op, decoded)
