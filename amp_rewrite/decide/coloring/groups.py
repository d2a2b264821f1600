"""Groups of ops that share one color: sequences, and clusters that compute one thing together."""

from __future__ import annotations

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.coloring import Paint
from amp_rewrite.decide.coloring.paint_state import PaintState
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import exposed, first_input_of, trail
from amp_rewrite.ir.op_classes import SEEN_THROUGH
from amp_rewrite.ir.patterns.clusters import Cluster
from amp_rewrite.ir.versions import FIRST_FUSED
from amp_rewrite.ir.view import OpId, ValueId
from amp_rewrite.settings.choices import Level
from amp_rewrite.settings.list_entry import Color

AFFINE_NOTE = "scale and bias have the type of what is normalized: onnxruntime fuses them into one node"


def sequences_by_deny(state: PaintState) -> None:
    """Deny a whole sequence if any of its vertices is denied, or if it reaches a place that keeps its type."""
    for cluster, sealed in zip(state.vertices.clusters, state.vertices.sealed, strict=True):
        due = next((v for v in cluster if v in state.denied or not state.can(v)), None)
        if not sealed and due is None:
            continue
        because = state.vertices.all[due].op if due is not None else None
        paint = state.high(reasons.SEQUENCE_CLUSTER, because, "a sequence that other ops share stays float32")
        for v in cluster:
            state.low.pop(v, None)
            state.denied.setdefault(v, paint)


def sequences_by_allow(state: PaintState) -> None:
    """Lower a whole sequence if any of its vertices is low."""
    for cluster in state.vertices.clusters:
        due = next((v for v in cluster if v in state.low), None)
        if due is not None and not any(v in state.denied for v in cluster):
            paint = Paint(state.to, reasons.SEQUENCE_CLUSTER, state.vertices.all[due].op)
            for v in cluster:
                state.low.setdefault(v, paint)


def freeze_clusters(state: PaintState) -> None:
    """Freeze a cluster that cannot be lowered as a whole."""
    for cluster in state.hazards.clusters:
        culprit = next((v for v in state.of_ops(cluster.ops) if _stays_float32(state, v)), None)
        if culprit is None:
            continue
        because = state.vertices.all[culprit].op
        paint = _as_a_whole(state, cluster, because)
        for op in cluster.ops:
            if op != because and op not in state.options.lower:
                state.frozen.setdefault(op, paint)


def _stays_float32(state: PaintState, v: int) -> bool:
    refusal = state.vertices.all[v].refusal
    if state.op(v).kind == "Cast" or (refusal is not None and refusal.rule == reasons.KEPT_VARIABLE):
        return False
    if not state.can(v):
        return True
    return state.options.level is not Level.UNSAFE_FORCE_ALL and state.colors[v] in (Color.DENY, Color.UNLISTED)


def _as_a_whole(state: PaintState, cluster: Cluster, culprit: OpId) -> Paint:
    name = state.view.ops[culprit].name
    return state.high(reasons.CLUSTER, culprit, f"{cluster.kind} stays float32 as a whole, because {name!r} does")


def clusters_whole(state: PaintState) -> None:
    """Take a cluster that the rules lowered only in part back to float32."""
    for cluster in state.hazards.clusters:
        members = state.without_casts(cluster.ops)
        high = next((op for op in members if not state.lowered(op)), None)
        if high is not None and any(state.lowered(op) for op in members):
            free = [op for op in members if op not in state.options.lower]
            state.back_to_float32(free, _as_a_whole(state, cluster, high))


def norm_affine(state: PaintState) -> None:
    """Give scale and bias of a decomposed normalization the type of its input.

    onnxruntime fuses such a normalization into one node from optimization level BASIC on. It looks past a Cast that
    only the normalization reads, so the fused node takes the type before that Cast, and the runtime refuses the model
    when scale and bias have another. The types of the ops in between do not matter. Source: some 360 small models
    opened with onnxruntime 1.31.1.
    """
    for cluster in state.options.norms:
        if cluster.entry is None or not cluster.tail or not fuses(state, cluster, state.to):
            continue
        tail = state.without_casts(cluster.tail)
        if not _seen_low(state, cluster.entry, frozenset(cluster.ops)):
            if any(state.lowered(op) for op in tail):
                free = [op for op in cluster.ops if op not in state.options.lower]
                note = f"{cluster.kind} stays float32, as what it normalizes does"
                state.back_to_float32(free, state.high(reasons.NORM_TAIL, None, note))
        elif not _lower_affine(state, cluster, tail):
            _entry_to_float32(state, cluster)


def fuses(state: PaintState, cluster: Cluster, low: DType) -> bool:
    """True if scale and bias get the type of the input: the runtime fuses the norm only then, or without Casts."""
    if cluster.kind == "layer_normalization":
        return low is DType.BFLOAT16 or state.view.opset >= FIRST_FUSED["LayerNormalization"]
    if cluster.kind != "rms_normalization":
        return False
    uses = [use for value in state.view.ops[cluster.ops[-1]].results for use in state.view.uses[value]]
    read_low = state.options.spare_casts and any(state.reads_low(use.op, use.slot) for use in uses)
    return low is DType.BFLOAT16 or read_low


def _seen_low(state: PaintState, value: ValueId, readers: frozenset[OpId]) -> bool:
    """True if the fusion sees a value of the low type, past a Cast, Identity or Dropout that only `readers` read."""
    if state.view.dtype(value) is state.to:
        return not state.made_upcast(value)
    op = state.view.producer(value)
    if op is None:
        return False
    made_low = any(v in state.low for v in state.vertices.by_op.get(op.id, ()))
    others = [use for use in state.view.uses[value] if use.op not in readers]
    if exposed(state.view, value) or not all(state.reads_low(use.op, use.slot) for use in others):
        return made_low and op.kind in SEEN_THROUGH
    # Readers of the low version of a widened value read it before the Cast, so they do not read the Cast.
    source = op.inputs[0] if op.kind == "Cast" or (op.kind in SEEN_THROUGH and not others) else None
    return made_low if source is None else _seen_low(state, source, frozenset((op.id,)))


def affine_may_fall(state: PaintState, v: int) -> bool:
    """True if only its cluster keeps a scale or bias in float32."""
    vertex = state.vertices.all[v]
    frozen = state.frozen.get(vertex.op)
    return vertex.refusal is None and (frozen is None or frozen.rule == reasons.CLUSTER)


def _lower_affine(state: PaintState, cluster: Cluster, tail: list[OpId]) -> bool:
    """Lower scale and bias; return False if one of them must stay float32."""
    vertices = state.of_ops(tail)
    if not all(affine_may_fall(state, v) for v in vertices):
        return False
    for v in vertices:
        state.low.setdefault(v, Paint(state.to, reasons.NORM_TAIL, cluster.ops[0], AFFINE_NOTE))
    return True


def _entry_to_float32(state: PaintState, cluster: Cluster) -> None:
    """Take the input of a normalization, and the copies before it, back to float32."""
    passed, source = trail(state.view, cluster.entry, first_input_of(SEEN_THROUGH))
    state.back_to_float32([op.id for op in passed], state.high(reasons.NORM_TAIL, cluster.ops[0]))
    op = state.view.producer(source)
    if op is not None:
        note = f"{cluster.kind} after it stays float32, and onnxruntime fuses it only in one type"
        state.back_to_float32([op.id], state.high(reasons.NORM_TAIL, cluster.ops[0], note))
