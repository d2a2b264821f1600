"""VJP of Resize, linear in its input with a matrix per axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from amp_rewrite.dtypes import DType
from amp_rewrite.rewrite.autodiff.builder import Builder
from amp_rewrite.rewrite.autodiff.vjp.rule import Call, Family, Refuse, positive, row

Places = Callable[[Any, Any, Any, Any, Any], Any]
"""Input coordinates of outputs, from output indices, scale, input length, output length, and 1 for one output, else 0.

Numbers and arrays may be values of a graph.
"""

_PLACES: Mapping[str, Places] = {
    "half_pixel": lambda o, s, n, m, one: (o + 0.5) / s - 0.5,
    "pytorch_half_pixel": lambda o, s, n, m, one: ((o + 0.5) / s - 0.5) * (1 - one),
    "align_corners": lambda o, s, n, m, one: o * (n - 1) / (m - 1 + one),
    "asymmetric": lambda o, s, n, m, one: o / s,
    "half_pixel_symmetric": lambda o, s, n, m, one: n / 2 * (1 - m / (s * n)) + (o + 0.5) / s - 0.5,
}
_COORDINATES = ("coordinate_transformation_mode", "half_pixel")
_ROUNDED: Mapping[str, Callable[[Any], Any]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


class _Operand(NDArrayOperatorsMixin):
    """A float64 value of the graph, as an operand of formulas."""

    def __init__(self, b: Builder, name: str) -> None:
        self.b, self.name = b, name

    @classmethod
    def of(cls, b: Builder, x: str) -> _Operand:
        """A value of any type, cast."""
        return cls(b, b.op("Cast", x, to=DType.DOUBLE.code))

    def __array_ufunc__(self, function: np.ufunc, method: str, *operands: Any) -> _Operand:
        names = [x.name if isinstance(x, _Operand) else self.b.scalar(float(x), DType.DOUBLE) for x in operands]
        result = self.b.op(_OPS[function], *names)
        return _Operand.of(self.b, result) if function in _TESTS else _Operand(self.b, result)


_TESTS: Mapping[np.ufunc, str] = {np.equal: "Equal", np.less: "Less", np.greater_equal: "GreaterOrEqual"}
_OPS: Mapping[np.ufunc, str] = {
    np.add: "Add",
    np.subtract: "Sub",
    np.multiply: "Mul",
    np.divide: "Div",
    np.minimum: "Min",
    np.maximum: "Max",
    np.floor: "Floor",
    np.ceil: "Ceil",
    np.absolute: "Abs",
    **_TESTS,
}


def _resize(v: Call, slot: int) -> str:
    """Multiply each axis by its transposed matrix; for integer repeats of elements, sum instead."""
    scales = _scales(v)
    repeats = {axis: round(s) for axis, s in scales.items() if s is not None and _repeats(v, s)}
    if len(repeats) == len(scales):
        return _summed(v, repeats)
    rank, gradient = v.rank(0), v.g
    for axis, scale in scales.items():
        matrix = _transposed(v, axis, scale)
        if axis == rank - 1:
            gradient = v.do("MatMul", gradient, matrix)
        else:
            perm = [a for a in range(rank) if a != axis] + [axis]
            product = v.do("MatMul", v.do("Transpose", gradient, perm=perm), matrix)
            gradient = v.do("Transpose", product, perm=[int(i) for i in np.argsort(perm)])
    return gradient


def _transposed(v: Call, axis: int, scale: float | None) -> str:
    """The matrix of an axis, a constant if its lengths are known, else computed from those of the values."""
    b, n, m = v.b, (v.shape(0) or ())[axis], (v.out_shape or [None] * v.rank(0))[axis]
    if isinstance(n, int) and isinstance(m, int) and scale is not None:
        return b.constant(_matrix(v, scale, np.arange(n), np.arange(m), n, m).astype(v.dtype(0).numpy))

    shapes = b.shape_of(v.x(0)), b.shape_of(v.op.node.output[0])
    sizes = [b.op("Gather", shape, b.scalar(axis, DType.INT64)) for shape in shapes]
    zero, one = (b.scalar(number, DType.INT64) for number in (0, 1))
    indices = [_Operand.of(b, b.op("Range", zero, size, one)) for size in sizes]
    lengths = [_Operand.of(b, size) for size in sizes]
    if scale is not None:
        factor: Any = scale
    elif v.has(3):
        factor = lengths[1] / lengths[0]
    else:
        factor = _Operand.of(b, b.op("Gather", v.x(2), b.scalar(_axes(v).index(axis), DType.INT64)))
    return b.op("Cast", _matrix(v, factor, *indices, *lengths).name, to=v.dtype(0).code)


def _axes(v: Call) -> list[int]:
    return [positive(a, v.rank(0)) for a in v.attr("axes") or range(v.rank(0))]


def _scales(v: Call) -> dict[int, float | None]:
    """Scale of each axis that may be resized; None if only a run tells it."""
    for name, default in (("antialias", 0), ("keep_aspect_ratio_policy", "stretch")):
        if v.attr(name, default) != default:
            raise v.error(f"no gradient with {name} {v.attr(name)!r}; set it to {default!r}")
    if v.attr(*_COORDINATES) not in _PLACES:
        raise v.error("no gradient of a crop; use Slice before Resize")
    axes, constant = _axes(v), v.constant(2)
    if constant is not None and constant.size:
        return {a: float(s) for a, s in zip(axes, constant, strict=True) if s != 1}
    own, out = v.shape(0) or (), v.out_shape or (None,) * v.rank(0)
    scales: dict[int, float | None] = {}
    for axis in axes:
        n, m = own[axis], out[axis]
        if n != m or n is None:
            scales[axis] = m / n if isinstance(n, int) and isinstance(m, int) else None
    return scales


def _repeats(v: Call, scale: float) -> bool:
    """True if each element is repeated `scale` times, for any length of the axis."""
    even = v.attr(*_COORDINATES) in ("half_pixel", "asymmetric")  # treats every element alike
    if v.attr("mode", "nearest") != "nearest" or scale != round(scale) or not even:
        return False
    times, n = round(scale), 3
    return bool(
        (
            _matrix(v, scale, np.arange(n), np.arange(n * times), n, n * times) == np.repeat(np.eye(n), times, axis=0)
        ).all()
    )


def _summed(v: Call, times: Mapping[int, int]) -> str:
    """Reshape the gradient to (dim, repeats) along each axis and sum over the repeats."""
    dims: list[str | int] = []
    repeats = []
    for axis, dim in enumerate(v.shape(0) or ()):
        dims.append(dim if isinstance(dim, int) else v.b.op("Gather", v.b.op("Shape", v.x(0)), v.b.ints([axis])))
        if axis in times:
            repeats.append(len(dims))
            dims.append(times[axis])
    known = [d for d in dims if isinstance(d, int)]
    if len(known) == len(dims):
        shape = v.b.ints(known)
    else:
        shape = v.b.op("Concat", *[v.b.ints([d]) if isinstance(d, int) else d for d in dims], axis=0)
    return v.b.reduce("ReduceSum", v.b.reshape(v.g, shape), repeats, keepdims=False)


def _matrix(v: Call, scale: Any, inputs: Any, outputs: Any, n: Any, m: Any) -> Any:
    """Interpolation matrix [outputs, inputs]: the weight of each input in each output. Places outside are the edge's.

    `inputs`, `outputs`: indices; `n`, `m`: their numbers.
    """
    x = _PLACES[v.attr(*_COORDINATES)](_column(outputs), scale, n, m, np.equal(m, 1))
    mode = v.attr("mode", "nearest")
    if mode == "nearest":
        terms = [(_ROUNDED[v.attr("nearest_mode", "round_prefer_floor")](x), 1.0)]
    elif mode == "linear":
        below = np.floor(x)
        terms = [(below, 1 - (x - below)), (below + 1, x - below)]
    else:
        places = [np.floor(x) + k for k in (-1, 0, 1, 2)]
        terms = [(place, _cubic(np.absolute(x - place), float(v.attr("cubic_coeff_a", -0.75)))) for place in places]
        if v.attr("exclude_outside", 0):
            terms = [(p, w * np.greater_equal(p, 0) * np.less(p, n)) for p, w in terms]
            total = sum(w for _, w in terms)
            terms = [(p, w / total) for p, w in terms]
    return sum(np.equal(np.minimum(np.maximum(place, 0), n - 1), inputs) * weight for place, weight in terms)


def _column(x: Any) -> Any:
    return _Operand(x.b, x.b.unsqueeze(x.name, [1])) if isinstance(x, _Operand) else x[:, None].astype(np.float64)


def _cubic(distance: Any, a: float) -> Any:
    """Keys, Cubic Convolution Interpolation for Digital Image Processing, 1981, with the free parameter a.

    Each piece is 0 at its ends.
    """
    near, far = np.minimum(distance, 1), np.minimum(np.maximum(distance, 1), 2)
    return ((a + 2) * near - (a + 3)) * near * near + 1 + ((far - 5) * far + 8) * a * far - 4 * a


_SIZES = Refuse("regions, scales and sizes have no gradient rule")

ROWS: Family = {"Resize": row(_resize, _SIZES, _SIZES, _SIZES)}
