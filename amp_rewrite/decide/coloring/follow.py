"""What follows the border between the types: Casts of the model itself, and scale and bias of written-out norms."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.coloring import Paint
from amp_rewrite.decide.coloring.problem import Problem
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import exposed, first_input_of, trail
from amp_rewrite.ir.op_classes import SEEN_THROUGH
from amp_rewrite.ir.patterns.clusters import Cluster
from amp_rewrite.ir.versions import FIRST_FUSED
from amp_rewrite.ir.view import OpId, ValueId, View

AFFINE_NOTE = "scale and bias have the type of what is normalized: onnxruntime fuses them into one node"


def follow_casts(problem: Problem, low: Mapping[int, Paint]) -> dict[int, Paint]:
    """Let a Cast to float32 that only lowered ops read cast to the low type instead."""
    p, low = problem, dict(low)
    for v in p.of_kinds(("Cast",)):
        vertex, out = p.vertices.all[v], p.op(v).outputs[0]
        if v in low or vertex.refusal is not None or "T2" not in vertex.variables or out is None:
            continue
        uses = p.view.uses[out]
        if p.view.dtype(out) is not DType.FLOAT or exposed(p.view, out) or not uses:
            continue
        if all(p.reader(use) in low for use in uses):
            low[v] = Paint(p.to, reasons.EXISTING_CAST, uses[0].op)
    return low


def fuses(view: View, cluster: Cluster, low: DType) -> bool:
    """True if onnxruntime fuses a written-out norm and then wants scale and bias in the type of its input.

    It fuses from optimization level BASIC on and looks past a Cast that only the norm reads, so the fused node takes
    the type before that Cast, and the runtime refuses the model when scale and bias have another. The types of the ops
    in between do not matter. Source: some 360 small models opened with onnxruntime 1.31.1.
    """
    if cluster.kind == "layer_normalization":
        return low is DType.BFLOAT16 or view.opset >= FIRST_FUSED["LayerNormalization"]
    return cluster.kind == "rms_normalization" and low is DType.BFLOAT16


def scales_follow(problem: Problem, low: dict[int, Paint], must: Collection[int]) -> dict[int, Paint]:
    """Give scale and bias of a written-out norm the type of its input, where onnxruntime refuses another."""
    p = problem
    for cluster in p.options.clusters:
        if cluster.entry is None or not cluster.tail or not fuses(p.view, cluster, p.to):
            continue
        tail = [v for v in p.of_ops(cluster.tail) if p.op(v).kind != "Cast"]
        if not _seen_low(p, low, cluster.entry, frozenset(cluster.ops)):
            for v in tail:
                if p.vertices.all[v].op not in p.options.lower:
                    low.pop(v, None)
        elif all(p.can(v) and v not in must for v in tail):
            for v in tail:
                low.setdefault(v, Paint(p.to, reasons.NORM_TAIL, cluster.ops[0], AFFINE_NOTE))
        else:  # the input, and the copies before it, have to be float32
            passed, source = trail(p.view, cluster.entry, first_input_of(SEEN_THROUGH))
            maker = p.view.producer(source)
            for v in p.of_ops([*(op.id for op in passed), *([maker.id] if maker is not None else [])]):
                low.pop(v, None)
    return low


def _seen_low(p: Problem, low: Mapping[int, Paint], value: ValueId, readers: frozenset[OpId]) -> bool:
    """True if the fusion sees a value of the low type, past a Cast, Identity or Dropout that only `readers` read."""
    if p.view.dtype(value) is p.to:
        return not p.made_raised(value)
    op = p.view.producer(value)
    if op is None:
        return False
    made_low = any(v in low for v in p.vertices.by_op.get(op.id, ()))
    others = [use for use in p.view.uses[value] if use.op not in readers]
    if exposed(p.view, value) or not all(p.reader(use) in low for use in others):
        return made_low and op.kind in SEEN_THROUGH
    # Readers of the low version of a widened value read it before the Cast, so they do not read the Cast.
    source = op.inputs[0] if op.kind == "Cast" or (op.kind in SEEN_THROUGH and not others) else None
    return made_low if source is None else _seen_low(p, low, source, frozenset((op.id,)))
