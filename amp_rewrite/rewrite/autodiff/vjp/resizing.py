"""VJPs of Resize, linear in its input with a matrix per axis, and of sampling at places that are computed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from amp_rewrite.dtypes import DType
from amp_rewrite.rewrite.autodiff.builder import Builder
from amp_rewrite.rewrite.autodiff.vjp.indexing import Positions, scattered
from amp_rewrite.rewrite.autodiff.vjp.rule import Call, Family, Refuse, positive, row


@dataclass(frozen=True, slots=True)
class _Corner:
    """One corner of each sample point's cell.

    `index`: its position, int64 [batch, points…, axes]. `weights`: its weight along each axis, [batch, points…, 1].
    `signs`: the sign of each weight's slope. `inside`: 0 beyond the edge, else 1.
    """

    index: str
    weights: Sequence[str]
    signs: Sequence[int]
    inside: str

    def weight(self, v: Call, without: int | None = None) -> str:
        """Product of the weights of all axes except `without`."""
        product = self.inside
        for axis, part in enumerate(self.weights):
            product = product if axis == without else v.do("Mul", product, part)
        return product


def _places(v: Call) -> tuple[list[str], list[str]]:
    """Coordinates of the sample points along each image axis, outermost first, and their slopes by the grid."""
    rank = v.rank(0) - 2
    last = v.b.split(v.x(1), [1] * rank, -1, results=rank)[::-1]  # the grid has the innermost axis first
    sizes = [v.b.cast(_size(v, axis), v.dtype(0)) for axis in range(rank)]
    aligned = bool(v.attr("align_corners", 0))
    places, slopes = [], []
    for coordinate, size in zip(last, sizes, strict=True):
        ends = v.do("Sub", size, 1.0)
        scale = v.do("Mul", ends if aligned else size, 0.5)
        place = v.do("Add", v.do("Mul", coordinate, scale), v.do("Mul", ends, 0.5))
        place, slope = _bounded(v, place, ends, aligned)
        places.append(place)
        slopes.append(v.do("Mul", slope, scale) if slope else scale)
    return places, slopes


def _size(v: Call, axis: int) -> str:
    return v.b.op("Gather", v.b.shape_of(v.x(0)), v.b.scalar(2 + axis, DType.INT64))


def _bounded(v: Call, place: str, ends: str, aligned: bool) -> tuple[str, str | None]:
    """Apply padding_mode to a coordinate; return it with its slope, None for slope 1."""
    mode, slope = v.attr("padding_mode", "zeros"), None
    if mode == "zeros":
        return place, None
    if mode == "reflection":
        low = 0.0 if aligned else -0.5
        span = v.do("Max", v.do("Sub", ends, 2 * low), v.dtype(0).tiny)
        off, round_trip = v.do("Sub", place, low), v.do("Mul", span, 2.0)
        trips = v.do("Floor", v.do("Div", v.do("Abs", off), round_trip))
        since = v.do("Sub", v.do("Abs", off), v.do("Mul", trips, round_trip))
        beyond = v.do("Greater", since, span)
        folded = v.do("Where", beyond, v.do("Sub", round_trip, since), since)
        slope = v.do("Mul", v.do("Sign", off), v.do("Where", beyond, -1.0, 1.0))
        place = v.do("Add", folded, low)
    within = v.do("And", v.do("Greater", place, 0.0), v.do("Less", place, ends))
    held = v.do("Where", within, slope or 1.0, 0.0)
    return v.do("Max", v.do("Min", place, ends), 0.0), held


def _corners(v: Call) -> tuple[list[_Corner], list[str]]:
    mode = v.attr("mode", "linear")
    places, slopes = _places(v)
    if mode == "nearest":
        return [_corner(v, [v.do("Round", p) for p in places], (), ())], slopes
    if mode not in ("linear", "bilinear"):
        raise v.error(f"no gradient with mode {mode!r}, only with linear and nearest; change the mode")
    below = [v.do("Floor", p) for p in places]
    parts = [v.do("Sub", p, f) for p, f in zip(places, below, strict=True)]
    corners = []
    for upper in itertools.product((False, True), repeat=len(places)):
        at = [v.do("Add", f, 1.0) if up else f for f, up in zip(below, upper, strict=True)]
        weights = [part if up else v.do("Sub", 1.0, part) for part, up in zip(parts, upper, strict=True)]
        corners.append(_corner(v, at, weights, [1 if up else -1 for up in upper]))
    return corners, slopes


def _corner(v: Call, at: Sequence[str], weights: Sequence[str], signs: Sequence[int]) -> _Corner:
    inside, whole = "", []
    for axis, place in enumerate(at):
        ends = v.do("Sub", v.b.cast(_size(v, axis), v.dtype(0)), 1.0)
        held = v.do("And", v.do("GreaterOrEqual", place, 0.0), v.do("LessOrEqual", place, ends))
        inside = v.do("And", inside, held) if inside else held
        # clamped as integers, so that a NaN is in range too
        number = v.do("Cast", place, to=DType.INT64.code)
        last = v.b.op("Sub", _size(v, axis), v.b.scalar(1, DType.INT64))
        whole.append(v.b.op("Max", v.b.op("Min", number, last), v.b.scalar(0, DType.INT64)))
    return _Corner(v.do("Concat", *whole, axis=-1), weights, signs, v.typed(inside))


def _last(v: Call, x: str, *, back: bool = False) -> str:
    """Transpose the channels to the last axis, or back to the second."""
    rank = v.rank(0)
    perm = [0, rank - 1, *range(1, rank - 1)] if back else [0, *range(2, rank), 1]
    return v.do("Transpose", x, perm=perm)


def _image(v: Call, slot: int) -> str:
    """Gradient of the image: scatter-add each corner's share of the gradient."""
    g, shape = _last(v, v.g), v.b.shape_of(v.x(0))
    rank = v.rank(0)
    order = v.b.op("Gather", shape, v.b.ints([0, *range(2, rank), 1]))
    indices, shares = [], []
    for corner in _corners(v)[0]:
        batch = v.b.op("Gather", shape, v.b.scalar(0, DType.INT64))
        first = v.b.unsqueeze(v.counted(batch), range(1, rank))
        spot = v.part(v.b.op("Shape", corner.index), 0, -1)
        item = v.b.op("Expand", first, v.b.op("Concat", spot, v.b.ints([1]), axis=0))
        indices.append(v.b.op("Concat", item, corner.index, axis=-1))
        shares.append(v.do("Mul", g, corner.weight(v)))
    index, share = v.joined(indices, 0), v.joined(shares, 0)
    return _last(v, scattered(v, Positions("ScatterND", index), order, share, repeats=True), back=True)


def _grid(v: Call, slot: int) -> str:
    """Gradient of the grid: per axis, upper corners minus lower corners, times the slope of the coordinate."""
    if v.attr("mode", "linear") == "nearest":
        return v.zeros(1)
    g, image = _last(v, v.g), _last(v, v.x(0))
    corners, slopes = _corners(v)
    held = [v.b.op("GatherND", image, corner.index, batch_dims=1) for corner in corners]
    along = [v.b.reduce("ReduceSum", v.do("Mul", g, h), [-1], keepdims=True) for h in held]
    gradients = []
    for axis, slope in enumerate(slopes):
        terms = [v.do("Mul", a, c.weight(v, without=axis)) for a, c in zip(along, corners, strict=True)]
        signed = [t if c.signs[axis] > 0 else v.do("Neg", t) for t, c in zip(terms, corners, strict=True)]
        gradients.append(v.do("Mul", v.do("Sum", *signed), slope))
    # without sample points, onnxruntime's ReduceSum keeps the last axis
    return v.b.reshape_like(v.do("Concat", *gradients[::-1], axis=-1), v.x(1))


_SAMPLING: Family = {"GridSample": row(_image, _grid)}


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

ROWS: Family = {**_SAMPLING, "Resize": row(_resize, _SIZES, _SIZES, _SIZES)}
