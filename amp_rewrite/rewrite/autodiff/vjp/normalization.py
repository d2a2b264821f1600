"""VJPs of softmax, norms over the last axes, and Dropout; `lowering` has bodies of the other norms.

Let x̂ = (x − m)·r with r = 1/√(var + ε) over some axes, and s the gradient of x̂. Then
dx = r·(s − mean(s) − x̂·mean(s·x̂)), with means over the same axes (Ba et al., Layer Normalization, 2016; derived for
a batch by Ioffe & Szegedy, Batch Normalization, 2015). Without centring, the term mean(s) is absent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from amp_rewrite.dtypes import DType
from amp_rewrite.rewrite.autodiff.vjp.rule import Call, Family, Stop, row


def _softmax(v: Call, slot: int) -> str:
    """y·(g − Σ g·y)."""
    weighted = v.do("Mul", v.g, v.y())
    total = v.b.reduce("ReduceSum", weighted, [v.axis(-1)], keepdims=True)
    return v.do("Sub", weighted, v.do("Mul", v.y(), total))


def _log_softmax(v: Call, slot: int) -> str:
    """g − exp(y)·Σ g."""
    total = v.b.reduce("ReduceSum", v.g, [v.axis(-1)], keepdims=True)
    return v.do("Sub", v.g, v.do("Mul", v.do("Exp", v.y()), total))


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
    "Softmax": row(_softmax),
    "LogSoftmax": row(_log_softmax),
    "Hardmax": row(Stop("piecewise constant")),
    "LayerNormalization": row(_norm_x, _norm_scale, lambda v, slot: v.sum_to(v.g, slot)),
    "RMSNormalization": row(_norm_x, _norm_scale),
    "Dropout": row(_dropout, _SETTINGS, _SETTINGS),
}
