"""VJPs of normalizations, and of Dropout.

All share one form. Let x̂ = (x − m)·r with r = 1/√(var + ε) over some axes, and s the gradient of x̂. Then
dx = r·(s − mean(s) − x̂·mean(s·x̂)), with means over the same axes (Ba et al., Layer Normalization, 2016; derived for
a batch by Ioffe & Szegedy, Batch Normalization, 2015). Without centring, the term mean(s) is absent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from amp_rewrite.dtypes import DType
from amp_rewrite.train.vjp.row import Call, Family, Stop, row


@dataclass(frozen=True, slots=True)
class _Norm:
    """x̂ and r of an op, their type, and the axes of the statistics."""

    v: Call
    axes: Sequence[int]
    xh: str
    r: str
    dtype: DType
    centred: bool

    def dx(self, s: str) -> str:
        """Gradient of x from that of x̂."""
        v = self.v
        along = v.b.reduce("ReduceMean", v.do("Mul", s, self.xh), self.axes, keepdims=True)
        rest = v.do("Sub", s, v.do("Mul", self.xh, along))
        if self.centred:
            rest = v.do("Sub", rest, v.b.reduce("ReduceMean", s, self.axes, keepdims=True))
        return v.do("Mul", self.r, rest)


def _inverse_root(v: Call, variance: str, epsilon: float, dtype: DType) -> str:
    """1/√(variance + ε)."""
    return v.do("Reciprocal", v.do("Sqrt", v.do("Add", variance, v.b.scalar(epsilon, dtype))))


def _computed(v: Call, axes: Sequence[int], epsilon: float, dtype: DType, *, centred: bool) -> _Norm:
    """Recompute x̂ and r from x."""
    x = v.b.cast(v.x(0), dtype)
    if centred:
        x = v.do("Sub", x, v.b.reduce("ReduceMean", x, axes, keepdims=True))
    variance = v.b.reduce("ReduceMean", v.do("Mul", x, x), axes, keepdims=True)
    r = _inverse_root(v, variance, epsilon, dtype)
    return _Norm(v, axes, v.do("Mul", x, r), r, dtype, centred)


# -- LayerNormalization, RMSNormalization --------------------------------------------------------------------


def _layer(v: Call) -> _Norm:
    """Use the op's outputs 1 and 2; recompute for float64, since the standard gives them in float32 at most."""
    axes = range(v.axis(-1), v.rank(0))
    if v.dtype(0) is DType.DOUBLE:
        return _computed(v, axes, v.attr("epsilon", 1e-5), DType.DOUBLE, centred=True)
    dtype = DType(v.attr("stash_type", DType.FLOAT.code))
    mean, r = v.y(1), v.y(2)
    xh = v.do("Mul", v.do("Sub", v.b.cast(v.x(0), dtype), mean), r)
    return _Norm(v, axes, xh, r, dtype, centred=True)


def _rms(v: Call) -> _Norm:
    dtype = v.dtype(0) if v.dtype(0) is DType.DOUBLE else DType(v.attr("stash_type", DType.FLOAT.code))
    return _computed(v, range(v.axis(-1), v.rank(0)), v.attr("epsilon", 1e-5), dtype, centred=False)


def _trailing_x(norm: _Norm) -> str:
    """dx for a scale of the shape of the last axes."""
    v = norm.v
    s = v.do("Mul", _wide(norm, v.g), _wide(norm, v.x(1)))
    return _narrow(norm, norm.dx(s))


def _trailing_scale(norm: _Norm) -> str:
    v = norm.v
    return _narrow(norm, v.sum_to(v.do("Mul", _wide(norm, v.g), norm.xh), 1))


def _wide(norm: _Norm, x: str) -> str:
    return x if norm.v.dtype(0) is norm.dtype else norm.v.b.op("Cast", x, to=norm.dtype.code)


def _narrow(norm: _Norm, x: str) -> str:
    own = norm.v.dtype(0)
    return x if own is norm.dtype else norm.v.b.op("Cast", x, to=own.code)


# -- LpNormalization -----------------------------------------------------------------------------------------


def _lp(v: Call, slot: int) -> str:
    """(g − d·Σ g·y)/|x|, where d is the slope of the norm: y for p = 2, the sign for p = 1."""
    p, axes = v.attr("p", 2), [v.axis(-1)]
    norm = v.b.reduce(f"ReduceL{p}", v.x(0), axes, keepdims=True)
    slope = v.y() if p == 2 else v.do("Sign", v.x(0))
    along = v.b.reduce("ReduceSum", v.do("Mul", v.g, v.y()), axes, keepdims=True)
    safe = v.do("Where", v.do("Equal", norm, 0.0), 1.0, norm)  # the gradient of a zero vector is 0
    return v.do("Div", v.do("Sub", v.g, v.do("Mul", slope, along)), safe)


# -- InstanceNormalization -----------------------------------------------------------------------------------


def _instance(v: Call) -> _Norm:
    return _computed(v, range(2, v.rank(0)), v.attr("epsilon", 1e-5), v.dtype(0), centred=True)


def _by_channel(v: Call, x: str) -> str:
    """Reshape a value per channel to broadcast with x of shape [N, C, d…]."""
    return v.b.reshape(x, [-1, *[1] * (v.rank(0) - 2)])


def _to_channels(v: Call, x: str) -> str:
    """Sum over all axes but the channels."""
    return v.b.reduce("ReduceSum", x, [0, *range(2, v.rank(0))], keepdims=False)


def _instance_x(v: Call, slot: int) -> str:
    return _instance(v).dx(v.do("Mul", v.g, _by_channel(v, v.x(1))))


def _instance_scale(v: Call, slot: int) -> str:
    return _to_channels(v, v.do("Mul", v.g, _instance(v).xh))


def _channel_bias(v: Call, slot: int) -> str:
    return _to_channels(v, v.g)


# -- BatchNormalization with running statistics; `lowering` decomposes it for batch statistics -----------------


def _batch_r(v: Call) -> str:
    """1/√(var + ε) per channel, in the type of the statistics."""
    return _inverse_root(v, v.x(4), v.attr("epsilon", 1e-5), v.dtype(4))


def _batch_x(v: Call, slot: int) -> str:
    factor = v.do("Mul", _as_statistic(v, v.x(1)), _batch_r(v))
    return v.do("Mul", v.g, _by_channel(v, _as_x(v, factor)))


def _batch_scale(v: Call, slot: int) -> str:
    centred = v.do("Sub", v.x(0), _by_channel(v, _as_x(v, v.x(3))))
    total = _to_channels(v, v.do("Mul", v.g, centred))
    return _as(v, v.do("Mul", _as_statistic(v, total), _batch_r(v)), slot)


def _batch_bias(v: Call, slot: int) -> str:
    return _as(v, _to_channels(v, v.g), slot)


def _batch_mean(v: Call, slot: int) -> str:
    factor = v.do("Mul", _as_statistic(v, v.x(1)), _batch_r(v))
    return v.do("Neg", v.do("Mul", _as_statistic(v, _to_channels(v, v.g)), factor))


def _batch_variance(v: Call, slot: int) -> str:
    """−½·scale·r³·Σ g·(x − mean)."""
    r = _batch_r(v)
    centred = v.do("Sub", v.x(0), _by_channel(v, _as_x(v, v.x(3))))
    total = _as_statistic(v, _to_channels(v, v.do("Mul", v.g, centred)))
    cube = v.do("Mul", r, v.do("Mul", r, r))
    half = v.b.scalar(-0.5, v.dtype(4))
    return v.do("Mul", v.do("Mul", v.do("Mul", total, _as_statistic(v, v.x(1))), cube), half)


def _as(v: Call, x: str, slot: int) -> str:
    """Cast a value to the type of an input if the types of inputs differ."""
    if v.dtype(0) is v.dtype(1) is v.dtype(3):
        return x
    return v.b.op("Cast", x, to=v.dtype(slot).code)


def _as_statistic(v: Call, x: str) -> str:
    return _as(v, x, 4)


def _as_x(v: Call, x: str) -> str:
    return _as(v, x, 0)


# -- Dropout -------------------------------------------------------------------------------------------------


def _dropout(v: Call, slot: int) -> str:
    """g/(1 − ratio) where the mask is set; g outside training mode."""
    training = v.constant(2) if v.has(2) else False
    if training is not None and not training:
        return v.g
    ratio = v.b.cast(v.x(1), v.dtype(0)) if v.has(1) else v.number(0.5)
    grown = v.do("Where", v.y(1), v.do("Div", v.g, v.do("Sub", 1.0, ratio)), 0.0)
    return grown if training is not None else v.b.op("Where", v.x(2), grown, v.g)


_SETTINGS = Stop("ratio and mode are settings")


def _local_response(v: Call, slot: int) -> str:
    """g·d⁻ᵝ − 2αβ/size·x·Σ(g·y/d), for y = x·d⁻ᵝ with d = bias + α/size·Σx² over neighbouring channels."""
    size, alpha, beta, bias = (v.attr(n, d) for n, d in (("size", 1), ("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0)))
    before, after = (size - 1) // 2, size // 2
    square = v.do("Mul", v.x(0), v.x(0))
    d = v.do("Add", v.do("Mul", _near(v, square, before, after), alpha / size), bias)
    direct = v.do("Div", v.g, v.do("Pow", d, beta))
    around = _near(v, v.do("Div", v.do("Mul", v.g, v.y()), d), after, before)
    return v.do("Sub", direct, v.do("Mul", v.do("Mul", v.x(0), around), 2 * alpha * beta / size))


def _near(v: Call, x: str, before: int, after: int) -> str:
    """Sum over each channel with `before` and `after` neighbours."""
    if before + after == 0:
        return x
    none = [0] * (v.rank(0) - 2)
    padded = v.do("Pad", x, v.b.ints([0, before, *none, 0, after, *none]))
    last, axes = before + after, v.b.ints([1])
    ends = [v.b.ints([at - last if at < last else _END]) for at in range(last + 1)]
    return v.do("Sum", *[v.do("Slice", padded, v.b.ints([at]), end, axes) for at, end in enumerate(ends)])


_END = (1 << 63) - 1

ROWS: Family = {
    "LayerNormalization": row(
        lambda v, slot: _trailing_x(_layer(v)),
        lambda v, slot: _trailing_scale(_layer(v)),
        lambda v, slot: v.sum_to(v.g, slot),
    ),
    "RMSNormalization": row(
        lambda v, slot: _trailing_x(_rms(v)),
        lambda v, slot: _trailing_scale(_rms(v)),
    ),
    "LpNormalization": row(_lp),
    "LRN": row(_local_response),
    "InstanceNormalization": row(_instance_x, _instance_scale, _channel_bias),
    "BatchNormalization": row(_batch_x, _batch_scale, _batch_bias, _batch_mean, _batch_variance),
    "Dropout": row(_dropout, _SETTINGS, _SETTINGS),
}
