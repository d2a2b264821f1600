"""Scale and bias of written-out norms, in the type of the input if onnxruntime fuses both.

`placement` weighs the type of both, `raising` raises both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.coloring import Paint
from amp_rewrite.decide.coloring.problem import Problem
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import exposed, first_input_of, trail
from amp_rewrite.ir.patterns.clusters import Cluster
from amp_rewrite.ir.versions import FIRST_FUSED
from amp_rewrite.ir.view import OpId, Use, ValueId, View

AFFINE_NOTE = "scale and bias have the type of what is normalized: onnxruntime fuses them into one node"
_SEEN_THROUGH = frozenset(("Cast", "Dropout", "Identity"))
"""Ops that onnxruntime looks through when it fuses a normalization."""
Made = Callable[[ValueId], DType | None]
"""The type in which a value is made."""
Read = Callable[[ValueId, Use], DType | None]
"""The type in which an op reads a value."""


def tied(view: View, cluster: Cluster, low: DType) -> bool:
    """True if onnxruntime fuses a written-out norm and then wants scale and bias in the type of its input.

    It fuses from optimization level BASIC on and looks past a Cast that only the norm reads, so the fused node takes
    the type before that Cast, and the runtime refuses the model when scale and bias have another. The types of the ops
    in between do not matter. Source: some 360 small models opened with onnxruntime 1.31.1.
    """
    if cluster.kind == "layer_normalization":
        return low is DType.BFLOAT16 or view.opset >= FIRST_FUSED["LayerNormalization"]
    return cluster.kind == "rms_normalization" and low is DType.BFLOAT16


def input_type(view: View, cluster: Cluster, low: DType, made: Made, read: Read) -> DType | None:
    """Return the common type of a norm's input, scale and bias; None if they are free."""
    if not cluster.tail or not tied(view, cluster, low):
        return None
    return _seen_type(view, cluster.entry, cluster.ops, made, read)


def _seen_type(view: View, value: ValueId, readers: Collection[OpId], made: Made, read: Read) -> DType | None:
    """Return the type of a value for the runtime's fusion of `readers`, before the Casts for them alone."""
    dtype, uses = made(value), view.uses[value]
    needed = next((read(value, use) for use in uses if use.op in readers), dtype)
    others, edge = [use for use in uses if use.op not in readers], exposed(view, value)
    if dtype is not needed and (
        (edge and view.dtype(value) is needed) or any(read(value, u) is needed for u in others)
    ):
        return needed
    op = view.producer(value)
    if op is None or op.kind not in _SEEN_THROUGH or op.inputs[0] is None or others or edge:
        return dtype
    return _seen_type(view, op.inputs[0], (op.id,), made, read)


def scales_follow(problem: Problem, low: dict[int, Paint], must: Collection[int]) -> dict[int, Paint]:
    """Give scale and bias of a written-out norm the type of its input if onnxruntime refuses another."""
    p = problem

    def made(value: ValueId) -> DType | None:
        return p.to if p.maker(value) in low else DType.FLOAT if p.made_raised(value) else p.view.dtype(value)

    def read(value: ValueId, use: Use) -> DType | None:
        raised = made(value) if p.view.ops[use.op].kind == "Cast" else DType.FLOAT
        return p.to if p.reader(use) in low else raised

    for cluster in p.options.clusters:
        if (dtype := input_type(p.view, cluster, p.to, made, read)) is None:
            continue
        tail = [v for v in p.of_ops(cluster.tail) if p.op(v).kind != "Cast"]
        if dtype is not p.to:
            for v in tail:
                if p.vertices.all[v].op not in p.options.lower:
                    low.pop(v, None)
        elif all(p.can(v) and v not in must for v in tail):
            for v in tail:
                low.setdefault(v, Paint(p.to, reasons.NORM_TAIL, cluster.ops[0], AFFINE_NOTE))
        else:  # the input, and the copies before it, have to be float32
            passed, source = trail(p.view, cluster.entry, first_input_of(_SEEN_THROUGH))
            maker = p.view.producer(source)
            for v in p.of_ops([*(op.id for op in passed), *([maker.id] if maker is not None else [])]):
                low.pop(v, None)
    return low
