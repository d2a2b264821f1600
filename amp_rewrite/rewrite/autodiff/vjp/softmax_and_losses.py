"""VJPs of softmax and of losses over classes: scores [N, C, d…], labels [N, d…], weights [C]."""

from __future__ import annotations

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.versions import FIRST_ROW_SOFTMAX
from amp_rewrite.rewrite.autodiff.vjp.rule import Call, Family, Refuse, Stop, row


def _softmax_axis(v: Call) -> int:
    v.b.requires(FIRST_ROW_SOFTMAX, f"the gradient of {v.op.op_type}")
    return int(v.axis(-1))


def _softmax(v: Call, slot: int) -> str:
    """y·(g − Σ g·y)."""
    weighted = v.do("Mul", v.g, v.y())
    total = v.b.reduce("ReduceSum", weighted, [_softmax_axis(v)], keepdims=True)
    return v.do("Sub", weighted, v.do("Mul", v.y(), total))


def _of_log_softmax(v: Call, g: str, y: str, axis: int) -> str:
    """g − exp(y)·Σ g."""
    total = v.b.reduce("ReduceSum", g, [axis], keepdims=True)
    return v.do("Sub", g, v.do("Mul", v.do("Exp", y), total))


def _nll(v: Call, slot: int) -> str:
    """−k at the label's class, 0 elsewhere."""
    factor = _factor(v)
    return v.do("Where", _at_label(v), v.do("Neg", factor), 0.0)


def _cross_entropy(v: Call, slot: int) -> str:
    """k·(softmax − 1 at the label's class), plus the gradient through the log-probabilities."""
    partials = []
    if v.gradients[0] is not None:
        probability = v.do("Exp", v.y(1))
        distance = v.do("Where", _at_label(v), v.do("Sub", probability, 1.0), probability)
        partials.append(v.do("Mul", distance, _factor(v)))
    if len(v.gradients) > 1 and v.gradients[1] is not None:
        partials.append(_of_log_softmax(v, v.gradients[1], v.y(1), 1))
    return partials[0] if len(partials) == 1 else v.do("Sum", *partials)


def _at_label(v: Call) -> str:
    """Mask of the scores' shape: True at the label's class."""
    rank, shape = v.rank(0), v.shape(0)
    labels = v.b.unsqueeze(v.x(1), [1])
    count = None if shape is None else shape[1]
    if not isinstance(count, int):
        count = v.b.op("Gather", v.b.op("Shape", v.x(0)), v.b.scalar(1, DType.INT64))
    span = v.counted(count)
    classes = v.b.reshape(span, [-1, *[1] * (rank - 2)])
    return v.b.op("Equal", labels, v.b.cast(classes, v.dtype(1)))


def _factor(v: Call) -> str:
    """k: the factor of each sample's loss in the output, times the output's gradient.

    The factor is the sample's weight, or 0 if its label is `ignore_index`; for a mean, divided by the sum of these.
    The result is one number, or one per sample with a class axis of 1.
    """
    reduction = v.attr("reduction", "mean")
    share = _share(v)
    if share is None:
        if reduction == "mean":
            return v.shared(v.g, v.b.shape_of(v.x(1)))
        return v.b.unsqueeze(v.g, [1]) if reduction == "none" else v.g
    factor = v.do("Mul", v.g, share)
    if reduction == "mean":
        factor = v.do("Div", factor, v.b.reduce("ReduceSum", share, None, keepdims=False))
    return v.b.unsqueeze(factor, [1])


def _share(v: Call) -> str | None:
    """Weight of each sample, of the labels' shape; None if all are 1."""
    ignored = v.attr("ignore_index")
    if ignored is None:
        return v.do("Gather", v.x(2), v.x(1)) if v.has(2) else None
    dropped = v.b.op("Equal", v.x(1), v.b.scalar(ignored, v.dtype(1)))
    if not v.has(2):
        return v.do("Where", dropped, 0.0, 1.0)
    # ignore_index may be out of the range of classes
    labels = v.b.op("Where", dropped, v.b.scalar(0, v.dtype(1)), v.x(1))
    return v.do("Where", dropped, 0.0, v.do("Gather", v.x(2), labels))


_LABELS = Stop("labels are integers")
_WEIGHTS = Refuse("class weights have no gradient rule")

ROWS: Family = {
    "Softmax": row(_softmax),
    "LogSoftmax": row(lambda v, slot: _of_log_softmax(v, v.g, v.y(), _softmax_axis(v))),
    "Hardmax": row(Stop("piecewise constant")),
    "NegativeLogLikelihoodLoss": row(_nll, _LABELS, _WEIGHTS),
    "SoftmaxCrossEntropyLoss": row(_cross_entropy, _LABELS, _WEIGHTS, outputs=2),
}
