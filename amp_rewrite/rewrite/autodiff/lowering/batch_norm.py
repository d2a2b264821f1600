"""BatchNormalization with batch statistics, decomposed into basic operators that have gradient rules."""

from __future__ import annotations

from amp_rewrite.errors import GradientError
from amp_rewrite.files.model import Model
from amp_rewrite.ir.attributes import int_attribute
from amp_rewrite.ir.nodes import MAIN, Op
from amp_rewrite.ir.versions import FIRST_TRAINING_MODE
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.autodiff.builder import Builder
from amp_rewrite.rewrite.autodiff.vjp.rule import Forward


def spelled_out(model: Model) -> Model:
    """Return the model with each BatchNormalization in training mode decomposed, or the model itself without one.

    Mean and biased variance are over all axes but the second, in the type of the running statistics. The running
    statistics are updated with weight 1 − momentum, as in the standard. GradientError inside a body, for an unknown
    rank, and before opset 14.
    """
    view = View.of(model)
    if not any(_training(op) for op in view.ops):
        return model
    b = Builder.of(model, region="batch_norm")
    for position, op_id in enumerate(view.scopes[MAIN].ops):
        if _training(view.ops[op_id]):
            _spell_out(b, view.ops[op_id], position)
    inside = next((op for op in view.ops if op.scope != MAIN and _training(op)), None)
    if inside is not None:
        raise GradientError(
            f"node {inside.name!r} (BatchNormalization) is in training mode inside a body, where it has no gradient;"
            " move it out, or set training_mode to 0"
        )
    return b.model()


def _training(op: Op) -> bool:
    if op.op_type != "BatchNormalization" or op.domain:
        return False
    return int_attribute(op.node, "training_mode", 0) != 0 or len(op.outputs) > 1


def _spell_out(b: Builder, op: Op, position: int) -> None:
    v = Forward(b, op)
    b.requires(FIRST_TRAINING_MODE["BatchNormalization"], f"node {op.name!r} (BatchNormalization) in training mode")
    x, scale, bias, mean, variance = op.node.input
    rank, dtype, kept = v.rank(0), v.dtype(0), v.dtype(3)
    axes = [0, *range(2, rank)]
    epsilon, momentum = v.attr("epsilon", 1e-5), v.attr("momentum", 0.9)
    beside = [-1, *[1] * (rank - 2)]
    with b.instead_of(position) as node:
        wide = b.cast(x, kept)
        centre = b.reduce("ReduceMean", wide, axes, keepdims=True)
        centred = b.op("Sub", wide, centre)
        spread = b.reduce("ReduceMean", b.op("Mul", centred, centred), axes, keepdims=True)
        root = b.op("Sqrt", b.op("Add", spread, b.scalar(epsilon, kept)))
        scales, biases = (b.reshape(b.cast(p, kept), beside) for p in (scale, bias))
        # one factor per channel first: every op on the whole tensor costs a pass forward and one backward
        y = b.op("Add", b.op("Mul", centred, b.op("Div", scales, root)), biases)
        b.name(b.cast(y, dtype, of=kept), node.output[0])
        for name, old, new in zip(node.output[1:], (mean, variance), (centre, spread), strict=False):
            if name:
                moved = b.op("Mul", b.reshape(new, [-1]), b.scalar(1 - momentum, kept))
                b.name(b.op("Add", b.op("Mul", old, b.scalar(momentum, kept)), moved), name)
