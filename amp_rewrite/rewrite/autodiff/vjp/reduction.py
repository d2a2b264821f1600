"""VJPs of reductions, running sums, global pools, softmax, norms over the last axes, and Dropout.

Other norms have function bodies in `lowering`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from amp_rewrite.dtypes import DType
from amp_rewrite.rewrite.autodiff.builder import fixed_dims
from amp_rewrite.rewrite.autodiff.vjp.rule import Call, Rows, Stop, from_front, row


def _axes(v: Call) -> Sequence[int] | str | None:
    """Return the reduced axes: numbers, the name of a value, or None for all axes of a tensor of unknown rank."""
    if v.op.op_type.startswith("Global"):
        return range(2, v.rank(0))
    axes = v.attr("axes")
    if v.has(1):
        constant = v.constant(1)
        if constant is None:
            return v.x(1)
        axes = [int(a) for a in constant.ravel()]
    shape = v.shape(0)
    if axes:
        return tuple(axes) if shape is None else tuple(sorted(from_front(a, len(shape)) for a in axes))
    if v.attr("noop_with_empty_axes", 0):
        return ()
    return None if shape is None else tuple(range(len(shape)))


def _kept(v: Call, x: str) -> str:
    """Insert the reduced axes, as dims of 1, into a value with the output's shape."""
    axes = () if v.attr("keepdims", 1) else _axes(v)
    return x if axes is None else v.b.unsqueeze(x, axes)  # a scalar broadcasts to any rank


def _reduce_same_axes(v: Call, op_type: str, x: str) -> str:
    return v.b.reduce(op_type, x, _axes(v), keepdims=True)


def _expanded(v: Call, gradient: str) -> str:
    return v.b.expand(gradient, v.b.shape_of(v.x(0)))


def _count(v: Call) -> int | str:
    """Return the number of elements reduced into one: an int, or the name of a value with the dims to multiply."""
    axes, shape = _axes(v), v.shape(0)
    if axes is None:
        return v.b.shape_of(v.x(0))
    if not isinstance(axes, str) and shape is not None:
        dims = fixed_dims(tuple(shape[a] for a in axes))
        if dims is not None:
            return max(math.prod(dims), 1)  # an empty gradient can be divided by any number
    index = axes if isinstance(axes, str) else v.b.ints(axes)
    return v.b.op("Gather", v.b.shape_of(v.x(0)), index)


def _mean(v: Call, slot: int) -> str:
    return _expanded(v, v.divided(_kept(v, v.g), _count(v)))


def _extreme(v: Call, slot: int) -> str:
    """Split the gradient equally among the elements with the extreme value, as torch.amax does.

    For torch.max along an axis, the first of these elements receives the whole gradient.
    """
    axes = _axes(v)
    if v.torch_op in ("max.dim", "min.dim") and isinstance(axes, tuple) and len(axes) == 1:
        (axis,) = axes
        first = v.do("ArgMax" if v.torch_op == "max.dim" else "ArgMin", v.x(0), axis=axis, keepdims=1)
        count = v.b.op("Gather", v.b.shape_of(v.x(0)), v.b.scalar(axis, DType.INT64))
        positions = v.b.unsqueeze(v.arange(count), range(1, v.rank(0) - axis))
        return v.do("Where", v.b.op("Equal", positions, first), _kept(v, v.g), 0.0)
    is_extreme = v.do("Equal", v.x(0), _kept(v, v.y()))
    ties = _reduce_same_axes(v, "ReduceSum", v.typed(is_extreme))
    return v.do("Where", is_extreme, v.do("Div", _kept(v, v.g), ties), 0.0)


def _product(v: Call, slot: int) -> str:
    """Multiply by the product of all other elements, even if some elements are zero."""
    zero = v.do("Equal", v.x(0), 0.0)
    nonzero = v.do("Where", zero, 1.0, v.x(0))
    product = _reduce_same_axes(v, "ReduceProd", nonzero)
    zeros = _reduce_same_axes(v, "ReduceSum", v.typed(zero))
    at_zero = v.do("Where", v.do("Equal", zeros, 1.0), product, 0.0)
    elsewhere = v.do("Where", v.do("Equal", zeros, 0.0), v.do("Div", product, nonzero), 0.0)
    return v.do("Mul", _kept(v, v.g), v.do("Where", zero, at_zero, elsewhere))


def _l2(v: Call, slot: int) -> str:
    """Append g·x/|x|, and 0 at the origin, as in torch.linalg.vector_norm."""
    norm = _kept(v, v.y())
    origin = v.do("Equal", norm, 0.0)
    unit = v.do("Div", v.x(0), v.do("Where", origin, 1.0, norm))
    return v.do("Mul", _kept(v, v.g), unit)


def _softmax(v: Call, slot: int) -> str:
    """Append y·(g − Σ g·y)."""
    weighted = v.do("Mul", v.g, v.y())
    total = v.b.reduce("ReduceSum", weighted, [v.axis(-1)], keepdims=True)
    return v.do("Sub", weighted, v.do("Mul", v.y(), total))


def _log_softmax(v: Call, slot: int) -> str:
    """Append g − exp(y)·Σ g."""
    total = v.b.reduce("ReduceSum", v.g, [v.axis(-1)], keepdims=True)
    return v.do("Sub", v.g, v.do("Mul", v.do("Exp", v.y()), total))


# -- norms: x̂ = (x − m)·r with r = 1/√(var + ε) over some axes, and s the gradient of x̂ ---------------
# dx = r·(s − mean(s) − x̂·mean(s·x̂)), with means over the same axes (Ba et al., Layer Normalization, 2016; derived for
# a batch by Ioffe & Szegedy, Batch Normalization, 2015). Without centering, the term mean(s) is absent.


def _normalized(v: Call, axes: Sequence[int]) -> tuple[str, str, DType]:
    """Return x̂, r and their type.

    Outputs 1 and 2 of a LayerNormalization are the mean and r, but at most in float32: for float64 they are recomputed.
    """
    centered, double = v.op.op_type == "LayerNormalization", v.dtype(0) is DType.DOUBLE
    dtype = DType.DOUBLE if double else DType(v.attr("stash_type", DType.FLOAT.code))
    x = v.b.cast(v.x(0), dtype)
    if centered and not double:
        return v.do("Mul", v.do("Sub", x, v.y(1)), v.y(2)), v.y(2), dtype
    if centered:
        x = v.do("Sub", x, v.b.reduce("ReduceMean", x, axes, keepdims=True))
    variance = v.b.reduce("ReduceMean", v.do("Mul", x, x), axes, keepdims=True)
    epsilon = v.b.scalar(v.attr("epsilon", 1e-5), dtype)
    r = v.do("Reciprocal", v.do("Sqrt", v.do("Add", variance, epsilon)))
    return v.do("Mul", x, r), r, dtype


def _norm_x(v: Call, slot: int) -> str:
    axes = range(v.axis(-1), v.rank(0))
    xh, r, dtype = _normalized(v, axes)
    s = v.do("Mul", *[v.b.cast(x, dtype, of=v.dtype()) for x in (v.g, v.x(1))])
    projection = v.b.reduce("ReduceMean", v.do("Mul", s, xh), axes, keepdims=True)
    residual = v.do("Sub", s, v.do("Mul", xh, projection))
    if v.op.op_type == "LayerNormalization":
        residual = v.do("Sub", residual, v.b.reduce("ReduceMean", s, axes, keepdims=True))
    return v.b.cast(v.do("Mul", r, residual), v.dtype(), of=dtype)


def _norm_scale(v: Call, slot: int) -> str:
    xh, _, dtype = _normalized(v, range(v.axis(-1), v.rank(0)))
    product = v.do("Mul", v.b.cast(v.g, dtype, of=v.dtype()), xh)
    return v.b.cast(v.sum_to(product, slot), v.dtype(), of=dtype)


def _dropout(v: Call, slot: int) -> str:
    """Append g/(1 − ratio) where the mask is set; outside training mode, return g."""
    training = v.constant(2) if v.has(2) else False
    if training is not None and not training:
        return v.g
    ratio = v.b.cast(v.x(1), v.dtype(0)) if v.has(1) else v.number(0.5)
    scaled = v.do("Where", v.y(1), v.do("Div", v.g, v.do("Sub", 1.0, ratio)), 0.0)
    return scaled if training is not None else v.b.op("Where", v.x(2), scaled, v.g)


_SETTINGS = Stop("ratio and mode are settings")
_AXES = Stop("axes are integers")

ROWS: Rows = {
    "ReduceSum": row(lambda v, slot: _expanded(v, _kept(v, v.g)), _AXES),
    "ReduceMean": row(_mean, _AXES),
    "GlobalAveragePool": row(_mean),
    "ReduceMax": row(_extreme, _AXES),
    "ReduceMin": row(_extreme, _AXES),
    "GlobalMaxPool": row(_extreme),
    "ReduceProd": row(_product, _AXES),
    "ReduceL1": row(lambda v, slot: v.do("Mul", _kept(v, v.g), v.do("Sign", v.x(0))), _AXES),
    "ReduceL2": row(_l2, _AXES),
    "ReduceSumSquare": row(lambda v, slot: v.do("Mul", v.do("Mul", _kept(v, v.g), 2.0), v.x(0)), _AXES),
    "ReduceLogSum": row(lambda v, slot: _expanded(v, v.do("Div", _kept(v, v.g), v.do("Exp", _kept(v, v.y())))), _AXES),
    "ReduceLogSumExp": row(
        lambda v, slot: v.do("Mul", _kept(v, v.g), v.do("Exp", v.do("Sub", v.x(0), _kept(v, v.y())))), _AXES
    ),
    "CumSum": row(
        lambda v, slot: v.do("CumSum", v.g, v.x(1), exclusive=v.attr("exclusive", 0), reverse=1 - v.attr("reverse", 0)),
        _AXES,
    ),
    "Softmax": row(_softmax),
    "LogSoftmax": row(_log_softmax),
    "Hardmax": row(Stop("piecewise constant")),
    "LayerNormalization": row(_norm_x, _norm_scale, lambda v, slot: v.sum_to(v.g, slot)),
    "RMSNormalization": row(_norm_x, _norm_scale),
    "Dropout": row(_dropout, _SETTINGS, _SETTINGS),
}
