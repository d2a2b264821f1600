"""The VJP of GridSample: linear interpolation between the corners around each sample point, or the nearest one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from amp_rewrite.dtypes import DType
from amp_rewrite.rewrite.autodiff.vjp.indexing import Positions, scattered
from amp_rewrite.rewrite.autodiff.vjp.rule import Call, Family, row


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


ROWS: Family = {"GridSample": row(_image, _grid)}
