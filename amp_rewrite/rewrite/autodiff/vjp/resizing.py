"""VJP of Resize, linear in its input with a matrix per axis: what the op itself makes of the unit vectors."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.builder import restate
from amp_rewrite.rewrite.autodiff.vjp.rule import Call, Family, Stop, positive, row

_SCALES, _SIZES = 2, 3
_REPEATING = {
    ("half_pixel", "round_prefer_floor"),
    ("half_pixel", "round_prefer_ceil"),
    ("asymmetric", "floor"),
}
"""Coordinates and rounding by which whole scales repeat each element."""


def _resize(v: Call, slot: int) -> str:
    """Multiply each axis by its transposed matrix; for whole repeats of elements, sum instead."""
    if v.attr("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise v.error("no gradient with keep_aspect_ratio_policy; compute the sizes, and set it to 'stretch'")
    resized = _resized(v)
    if _repeats(v) and all(scale is not None and scale == round(scale) for scale in resized.values()):
        return _summed(v, {axis: round(scale or 1) for axis, scale in resized.items()})
    rank, gradient = v.rank(), v.g
    for axis in resized:
        perm = [*(a for a in range(rank) if a != axis), axis]
        last = v.do("Transpose", gradient, perm=perm) if axis != rank - 1 else gradient
        product = v.do("MatMul", last, v.do("Transpose", _matrix(v, axis), perm=[1, 0]))
        gradient = v.do("Transpose", product, perm=[int(i) for i in np.argsort(perm)]) if axis != rank - 1 else product
    return gradient


def _axes(v: Call) -> list[int]:
    return [positive(a, v.rank()) for a in v.attr("axes") or range(v.rank())]


def _resized(v: Call) -> dict[int, float | None]:
    """Scale of each axis that may be resized; None if only a run tells it."""
    constant, own = v.constant(_SCALES), v.shape(0) or ()
    if constant is not None and constant.size:
        scales = dict(zip(_axes(v), map(float, constant), strict=True))
        crops = v.attr("coordinate_transformation_mode") == "tf_crop_and_resize"
        return {axis: scale for axis, scale in scales.items() if scale != 1 or crops}
    out = v.out_shape or (None,) * v.rank()
    pairs = {axis: (own[axis], out[axis]) for axis in _axes(v)}
    known = {axis: m / n for axis, (n, m) in pairs.items() if isinstance(n, int) and isinstance(m, int) and n}
    return {axis: known.get(axis) for axis, (n, m) in pairs.items() if n is None or n != m}


def _matrix(v: Call, axis: int) -> str:
    """Rows of the inputs and columns of the outputs of an axis, by the op itself in two dimensions."""
    b, node, at = v.b, clone(v.op.node), v.b.ints([_axes(v).index(axis)])
    restate(node, "axes")
    restate(node, "extrapolation_value")
    size = b.op("Gather", b.shape_of(v.x(0)), b.ints([axis]))
    places = v.counted(b.op("Squeeze", size))
    dtype = DType.FLOAT if v.dtype().low else v.dtype()
    unit = b.op("Cast", b.op("Equal", b.unsqueeze(places, [1]), places), to=dtype.code)
    slot = _SIZES if v.has(_SIZES) else _SCALES
    first = size if slot == _SIZES else b.constant(np.ones(1, np.float32))
    inputs = [unit, *node.input[1:slot], b.op("Concat", first, b.op("Gather", v.x(slot), at), axis=0)]
    if v.attr("coordinate_transformation_mode") == "tf_crop_and_resize":
        starts, ends = (b.op("Gather", half, at) for half in b.split(v.x(1), [len(_axes(v))] * 2, 0, results=2))
        whole = [b.op("CastLike", b.constant(np.array([edge], np.float32)), v.x(1)) for edge in (0, 1)]
        inputs[1] = b.op("Concat", whole[0], starts, whole[1], ends, axis=0)
    return b.cast(b.like(node, inputs)[0], v.dtype(), of=dtype)


def _repeats(v: Call) -> bool:
    """True if whole scales repeat each element, for any length of the axis."""
    rounding = v.attr("nearest_mode", "round_prefer_floor")
    nearest = v.attr("mode", "nearest") == "nearest"
    return nearest and (v.attr("coordinate_transformation_mode", "half_pixel"), rounding) in _REPEATING


def _summed(v: Call, times: Mapping[int, int]) -> str:
    """Reshape the gradient to (dim, repeats) along each axis and sum over the repeats."""
    b, shape = v.b, v.b.shape_of(v.x(0))
    dims, repeats = list[str](), list[int]()
    for axis in range(v.rank()):
        dims.append(b.op("Gather", shape, b.ints([axis])))
        if axis in times:
            repeats.append(len(dims))
            dims.append(b.ints([times[axis]]))
    return b.reduce("ReduceSum", b.reshape(v.g, b.op("Concat", *dims, axis=0)), repeats, keepdims=False)


_SETTINGS = Stop("regions, scales and sizes are settings")

ROWS: Family = {"Resize": row(_resize, _SETTINGS, _SETTINGS, _SETTINGS)}
