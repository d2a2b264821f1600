"""Groups of ops that share one color: sequences, and clusters that compute one thing together."""

from __future__ import annotations

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.coloring import Paint
from amp_rewrite.decide.coloring.state import Canvas
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import exposed, first_input_of, trail
from amp_rewrite.ir.op_classes import SEEN_THROUGH
from amp_rewrite.ir.patterns.clusters import Cluster
from amp_rewrite.ir.versions import FIRST_FUSED
from amp_rewrite.ir.view import OpId, ValueId, View
from amp_rewrite.settings.choices import Level
from amp_rewrite.settings.list_entry import Color


def sequences_by_deny(canvas: Canvas) -> None:
    """A sequence keeps one element type: denied or sealed anywhere, denied everywhere."""
    for cluster, sealed in zip(canvas.vertices.clusters, canvas.vertices.sealed, strict=True):
        due = next((v for v in cluster if v in canvas.denied or not canvas.can(v)), None)
        if sealed or due is not None:
            _deny_sequence(canvas, cluster, due)


def _deny_sequence(canvas: Canvas, cluster: tuple[int, ...], due: int | None) -> None:
    because = canvas.vertices.all[due].op if due is not None else None
    for v in cluster:
        canvas.low.pop(v, None)
        note = "a sequence that other ops share stays float32"
        canvas.denied.setdefault(v, canvas.high(reasons.SEQUENCE_CLUSTER, because, note))


def sequences_by_allow(canvas: Canvas) -> None:
    """A sequence that anything lowered touches is lowered whole."""
    for cluster in canvas.vertices.clusters:
        due = next((v for v in cluster if v in canvas.low), None)
        if due is None or any(v in canvas.denied for v in cluster):
            continue
        for v in cluster:
            paint = Paint(canvas.to, reasons.SEQUENCE_CLUSTER, canvas.vertices.all[due].op)
            canvas.low.setdefault(v, paint)


def freeze_clusters(canvas: Canvas) -> None:
    """A cluster that cannot be lowered as a whole stays float32 as a whole."""
    for cluster in canvas.clusters:
        members = [v for op in cluster.ops for v in canvas.vertices.by_op.get(op, ())]
        culprit = next((v for v in members if _stays_float32(canvas, v)), None)
        if culprit is not None:
            _hold(canvas, cluster, canvas.vertices.all[culprit].op)


def _stays_float32(canvas: Canvas, v: int) -> bool:
    refusal = canvas.vertices.all[v].refusal
    if canvas.op(v).kind == "Cast" or (refusal is not None and refusal.rule == reasons.KEPT_VARIABLE):
        return False
    if not canvas.can(v):
        return True
    return canvas.level is not Level.UNSAFE_FORCE_ALL and canvas.color(v) in (Color.DENY, Color.UNLISTED)


def _hold(canvas: Canvas, cluster: Cluster, culprit: OpId) -> None:
    why = _as_a_whole(canvas, cluster, culprit)
    for op in cluster.ops:
        if op != culprit and op not in canvas.lower:
            canvas.frozen.setdefault(op, why)


def _as_a_whole(canvas: Canvas, cluster: Cluster, culprit: OpId) -> Paint:
    name = canvas.view.ops[culprit].name
    return canvas.high(reasons.CLUSTER, culprit, f"{cluster.kind} stays float32 as a whole, because {name!r} does")


def clusters_whole(canvas: Canvas) -> None:
    """A cluster that the rules lowered only in part goes back to float32 whole."""
    for cluster in canvas.clusters:
        members = [op for op in cluster.ops if canvas.view.ops[op].kind != "Cast"]
        high = next((op for op in members if not canvas.lowered(op)), None)
        if high is not None and any(canvas.lowered(op) for op in members):
            free = [op for op in members if op not in canvas.lower]
            canvas.raise_ops(free, _as_a_whole(canvas, cluster, high))


def norm_tails(canvas: Canvas) -> None:
    """Scale and bias of a decomposed normalization get the type of what is normalized.

    onnxruntime fuses such a normalization into one node from optimization level BASIC on. It looks past a
    Cast that only the normalization reads, so the fused node takes the type before that Cast, and the
    runtime refuses the model when scale and bias have another. Found by opening some 360 small models with
    onnxruntime 1.31.1: what the ops between are in does not matter.
    """
    for cluster in canvas.norms:
        if cluster.entry is None or not cluster.tail or not fuses(canvas.view, cluster, canvas.to):
            continue
        tail = [op for op in cluster.tail if canvas.view.ops[op].kind != "Cast"]
        if not _seen_low(canvas, cluster.entry, frozenset(cluster.ops)):
            if any(canvas.lowered(op) for op in tail):
                body = [op for op in cluster.ops if op not in canvas.lower]
                note = f"{cluster.kind} stays float32, as what it normalizes does"
                canvas.raise_ops(body, canvas.high(reasons.NORM_TAIL, None, note))
        elif not _lower_tail(canvas, cluster, tail):
            _raise_entry(canvas, cluster)


def fuses(view: View, cluster: Cluster, low: DType) -> bool:
    """Whether the runtime fuses a cluster, partly in that low type, to a node whose types it then finds at odds."""
    if cluster.kind == "layer_normalization":
        return low is DType.BFLOAT16 or view.opsets.get("", 1) >= FIRST_FUSED["LayerNormalization"]
    return cluster.kind == "rms_normalization" and low is DType.BFLOAT16


def _seen_low(canvas: Canvas, value: ValueId, readers: frozenset[OpId]) -> bool:
    """Whether the fusion sees a value of the low type, past a Cast, Identity or Dropout that only `readers` read."""
    if canvas.view.dtype(value) is canvas.to:
        return not canvas.made_raised(value)
    op = canvas.view.producer(value)
    if op is None:
        return False
    made_low = any(v in canvas.low for v in canvas.vertices.by_op.get(op.id, ()))
    named = exposed(canvas.view, value)
    others = [use for use in canvas.view.uses[value] if use.op not in readers]
    if named or not all(canvas.reads_low(use.op, use.slot) for use in others):
        return made_low and op.kind in SEEN_THROUGH
    # Whoever reads the low version of a widened value reads it before the Cast, so those are no readers of the Cast.
    source = op.inputs[0] if op.kind == "Cast" or (op.kind in SEEN_THROUGH and not others) else None
    return made_low if source is None else _seen_low(canvas, source, frozenset((op.id,)))


def _lower_tail(canvas: Canvas, cluster: Cluster, tail: list[OpId]) -> bool:
    """Lower scale and bias; False when one of them cannot be."""
    vertices = [v for op in tail for v in canvas.vertices.by_op.get(op, ())]
    held = (canvas.frozen.get(canvas.vertices.all[v].op) for v in vertices)
    if any(canvas.vertices.all[v].refusal for v in vertices) or any(p and p.rule != reasons.CLUSTER for p in held):
        return False
    for v in vertices:
        note = "scale and bias have the type of what is normalized: onnxruntime fuses them into one node"
        canvas.low.setdefault(v, Paint(canvas.to, reasons.NORM_TAIL, cluster.ops[0], note))
    return True


def _raise_entry(canvas: Canvas, cluster: Cluster) -> None:
    """What cannot be lowered at the end is not lowered at the start either."""
    passed, source = trail(canvas.view, cluster.entry, first_input_of(SEEN_THROUGH))
    for op_id in (op.id for op in passed):
        canvas.raise_ops((op_id,), canvas.high(reasons.NORM_TAIL, cluster.ops[0]))
    op = canvas.view.producer(source)
    if op is not None:
        note = f"{cluster.kind} after it stays float32, and onnxruntime fuses it only in one type"
        canvas.raise_ops((op.id,), canvas.high(reasons.NORM_TAIL, cluster.ops[0], note))
