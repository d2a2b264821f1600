"""The VJP of Resize: interpolation is linear in its input, with a constant matrix per axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from amp_rewrite.files.casting import Array
from amp_rewrite.rewrite.autodiff.vjp.row import Call, Family, Refuse, positive, row

Places = Callable[[Array, float, int, int], Array]
"""Input coordinates of outputs, from output indices, scale, input length and output length."""

_PLACES: Mapping[str, Places] = {
    "half_pixel": lambda o, s, n, m: (o + 0.5) / s - 0.5,
    "pytorch_half_pixel": lambda o, s, n, m: (o + 0.5) / s - 0.5 if m > 1 else o * 0,
    "align_corners": lambda o, s, n, m: o * (n - 1) / (m - 1) if m > 1 else o * 0,
    "asymmetric": lambda o, s, n, m: o / s,
    "half_pixel_symmetric": lambda o, s, n, m: n / 2 * (1 - m / (s * n)) + (o + 0.5) / s - 0.5,
}
_COORDINATES = ("coordinate_transformation_mode", "half_pixel")
_ROUNDED: Mapping[str, Callable[[Array], Array]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


def _resize(v: Call, slot: int) -> str:
    """Multiply each axis by its transposed matrix; for integer repeats of elements, sum instead."""
    scales = _scales(v)
    if all(_repeats(v, s) for s in scales.values()):
        return _summed(v, {axis: round(s) for axis, s in scales.items()})
    rank, own, out = v.rank(0), v.shape(0) or (), v.out_shape or ()
    gradient = v.g
    for axis, scale in scales.items():
        n, m = own[axis], out[axis]
        if not isinstance(n, int) or not isinstance(m, int):
            raise v.error(f"its gradient along axis {axis} needs fixed dims; declare them")
        matrix = _matrix(v, scale, n, m).astype(v.dtype(0).numpy)
        if axis == rank - 1:
            gradient = v.do("MatMul", gradient, v.b.constant(matrix))
        else:
            perm = [a for a in range(rank) if a != axis] + [axis]
            product = v.do("MatMul", v.do("Transpose", gradient, perm=perm), v.b.constant(matrix))
            gradient = v.do("Transpose", product, perm=[int(i) for i in np.argsort(perm)])
    return gradient


def _scales(v: Call) -> dict[int, float]:
    """Scale of each resized axis."""
    for name, default in (("antialias", 0), ("keep_aspect_ratio_policy", "stretch")):
        if v.attr(name, default) != default:
            raise v.error(f"no gradient with {name} {v.attr(name)!r}; set it to {default!r}")
    if v.attr(*_COORDINATES) not in _PLACES:
        raise v.error("no gradient of a crop; use Slice before Resize")
    axes = [positive(a, v.rank(0)) for a in v.attr("axes") or range(v.rank(0))]
    constant = v.constant(2)
    if constant is not None and constant.size:
        return {a: float(s) for a, s in zip(axes, constant, strict=True) if s != 1}
    own, out = v.shape(0), v.out_shape
    scales = {}
    for axis in axes:
        n, m = (own or {axis: None})[axis], (out or {axis: None})[axis]
        if not isinstance(n, int) or not isinstance(m, int):
            raise v.error("its gradient needs fixed dims, or constant scales; declare them")
        if n != m:
            scales[axis] = m / n
    return scales


def _repeats(v: Call, scale: float) -> bool:
    """True if each element is repeated `scale` times, for any length of the axis."""
    even = v.attr(*_COORDINATES) in ("half_pixel", "asymmetric")  # treats every element alike
    if v.attr("mode", "nearest") != "nearest" or scale != round(scale) or not even:
        return False
    times, n = round(scale), 3
    return bool((_matrix(v, scale, n, n * times) == np.repeat(np.eye(n), times, axis=0)).all())


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


def _matrix(v: Call, scale: float, n: int, m: int) -> Array:
    """Interpolation matrix [outputs, inputs]: the weight of each input in each output."""
    coordinates = _PLACES[v.attr(*_COORDINATES)]
    x = coordinates(np.arange(m, dtype=np.float64), scale, n, m)
    mode = v.attr("mode", "nearest")
    if mode == "nearest":
        rounded = _ROUNDED[v.attr("nearest_mode", "round_prefer_floor")](x)
        return _spread(rounded[:, None], np.ones((m, 1)), n)
    below = np.floor(x)
    part = (x - below)[:, None]
    if mode == "linear":
        return _spread(below[:, None] + [0, 1], np.hstack([1 - part, part]), n)
    places = below[:, None] + [-1, 0, 1, 2]
    weights = _cubic(np.abs(x[:, None] - places), float(v.attr("cubic_coeff_a", -0.75)))
    if v.attr("exclude_outside", 0):
        weights = np.where((places >= 0) & (places < n), weights, 0)
        weights = weights / weights.sum(1, keepdims=True)
    return _spread(places, weights, n)


def _spread(places: Array, weights: Array, n: int) -> Array:
    """Matrix with weights at their places; places outside count for the nearest edge."""
    matrix = np.zeros((len(places), n))
    inside = np.clip(places, 0, n - 1).astype(np.int64)
    for output, (there, share) in enumerate(zip(inside, weights, strict=True)):
        np.add.at(matrix[output], there, share)
    return matrix


def _cubic(distance: Array, a: float) -> Array:
    """Keys, Cubic Convolution Interpolation for Digital Image Processing, 1981, with the free parameter a."""
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((distance - 5) * distance + 8) * a * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0))


_SIZES = Refuse("regions, scales and sizes have no gradient rule")

ROWS: Family = {"Resize": row(_resize, _SIZES, _SIZES, _SIZES)}
