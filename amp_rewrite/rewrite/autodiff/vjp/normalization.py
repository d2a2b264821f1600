"""VJPs of softmax, label losses, norms over the last axes, and Dropout; `lowering` has bodies of the other norms.

Let x̂ = (x − m)·r with r = 1/√(var + ε) over some axes, and s the gradient of x̂. Then
dx = r·(s − mean(s) − x̂·mean(s·x̂)), with means over the same axes (Ba et al., Layer Normalization, 2016; derived for
a batch by Ioffe & Szegedy, Batch Normalization, 2015). Without centring, the term mean(s) is absent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

_SOFTMAX: Family = {
    "Softmax": row(_softmax),
    "LogSoftmax": row(lambda v, slot: _of_log_softmax(v, v.g, v.y(), _softmax_axis(v))),
    "Hardmax": row(Stop("piecewise constant")),
    "NegativeLogLikelihoodLoss": row(_nll, _LABELS, _WEIGHTS),
    "SoftmaxCrossEntropyLoss": row(_cross_entropy, _LABELS, _WEIGHTS, outputs=2),
}


@dataclass(frozen=True, slots=True)
class _Norm:
    """x̂ and r of a norm over the last axes, and their type."""

    v: Call
    axes: Sequence[int]
    xh: str
    r: str
    dtype: DType
    centred: bool

    def wide(self, x: str) -> str:
        return self.v.b.cast(x, self.dtype, of=self.v.dtype())

    def narrow(self, x: str) -> str:
        return self.v.b.cast(x, self.v.dtype(), of=self.dtype)

    def dx(self, s: str) -> str:
        """Gradient of x from that of x̂."""
        v = self.v
        along = v.b.reduce("ReduceMean", v.do("Mul", s, self.xh), self.axes, keepdims=True)
        rest = v.do("Sub", s, v.do("Mul", self.xh, along))
        if self.centred:
            rest = v.do("Sub", rest, v.b.reduce("ReduceMean", s, self.axes, keepdims=True))
        return v.do("Mul", self.r, rest)


def _norm(v: Call) -> _Norm:
    """Use outputs 1 and 2 of a LayerNormalization; for float64 recompute, since they are float32 at most."""
    axes, centred = range(v.axis(-1), v.rank(0)), v.op.op_type == "LayerNormalization"
    double = v.dtype(0) is DType.DOUBLE
    dtype = DType.DOUBLE if double else DType(v.attr("stash_type", DType.FLOAT.code))
    x = v.b.cast(v.x(0), dtype)
    if centred and not double:
        r = v.y(2)
        return _Norm(v, axes, v.do("Mul", v.do("Sub", x, v.y(1)), r), r, dtype, centred)
    if centred:
        x = v.do("Sub", x, v.b.reduce("ReduceMean", x, axes, keepdims=True))
    variance = v.b.reduce("ReduceMean", v.do("Mul", x, x), axes, keepdims=True)
    epsilon = v.b.scalar(v.attr("epsilon", 1e-5), dtype)
    r = v.do("Reciprocal", v.do("Sqrt", v.do("Add", variance, epsilon)))
    return _Norm(v, axes, v.do("Mul", x, r), r, dtype, centred)


def _norm_x(v: Call, slot: int) -> str:
    norm = _norm(v)
    return norm.narrow(norm.dx(v.do("Mul", norm.wide(v.g), norm.wide(v.x(1)))))


def _norm_scale(v: Call, slot: int) -> str:
    norm = _norm(v)
    return norm.narrow(v.sum_to(v.do("Mul", norm.wide(v.g), norm.xh), slot))


def _dropout(v: Call, slot: int) -> str:
    """g/(1 − ratio) where the mask is set; g outside training mode."""
    training = v.constant(2) if v.has(2) else False
    if training is not None and not training:
        return v.g
    ratio = v.b.cast(v.x(1), v.dtype(0)) if v.has(1) else v.number(0.5)
    grown = v.do("Where", v.y(1), v.do("Div", v.g, v.do("Sub", 1.0, ratio)), 0.0)
    return grown if training is not None else v.b.op("Where", v.x(2), grown, v.g)


_SETTINGS = Stop("ratio and mode are settings")


ROWS: Family = {
    **_SOFTMAX,
    "LayerNormalization": row(_norm_x, _norm_scale, lambda v, slot: v.sum_to(v.g, slot)),
    "RMSNormalization": row(_norm_x, _norm_scale),
    "Dropout": row(_dropout, _SETTINGS, _SETTINGS),
}
