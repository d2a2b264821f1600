"""Bounds of convolutions and pools."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from onnx import TensorProto

from amp_rewrite.decide.bounds.arithmetic import gamma
from amp_rewrite.decide.bounds.context import OpContext, Table
from amp_rewrite.decide.bounds.state import MOST_OF_MAPS, State, box, by_channel, lengths, reduced, unknown, varies
from amp_rewrite.decide.bounds.uniform_constants import number_throughout
from amp_rewrite.decide.bounds.weights import largest
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.attributes import attribute

_PART = 1 << 19


@dataclass(frozen=True, slots=True)
class _SlidingWindow:
    """A window that moves over maps: lengths, steps, distances and paddings by axis."""

    kernel: Sequence[int]
    strides: Sequence[int]
    dilations: Sequence[int]
    before: Sequence[int]
    after: Sequence[int]

    @classmethod
    def of(cls, context: OpContext, kernel: Sequence[int], result: Sequence[int] | None) -> _SlidingWindow | None:
        """Return the window of an op; None if its padding is unknown. `result`: lengths of the result."""
        rank = len(kernel)
        strides = context.integers("strides") or [1] * rank
        dilations = context.integers("dilations") or [1] * rank
        stated = attribute(context.op.node, "auto_pad")
        auto = stated.s if stated is not None else b"NOTSET"
        pads = context.integers("pads") or [0] * (2 * rank)
        if auto in (b"SAME_UPPER", b"SAME_LOWER"):
            sizes = lengths(context.shape(0), tuple(range(-rank, 0)))
            if sizes is None or result is None:
                return None
            total = [
                max(0, (n - 1) * s + (k - 1) * d + 1 - size)
                for n, s, k, d, size in zip(result, strides, kernel, dilations, sizes, strict=True)
            ]
            small, large = [t // 2 for t in total], [t - t // 2 for t in total]
            return cls(kernel, strides, dilations, *((small, large) if auto == b"SAME_UPPER" else (large, small)))
        if auto == b"VALID":
            pads = [0] * (2 * rank)
        return cls(kernel, strides, dilations, pads[:rank], pads[rank:])

    @property
    def padded(self) -> bool:
        """True if windows reach over the edges."""
        return any(self.before) or any(self.after)

    def places(self, array: Array, fill: float, result: Sequence[int]) -> Iterator[Array]:
        """Yield the numbers at each place of the window, for all windows. `result`: lengths of the result."""
        rank = len(self.kernel)
        spans = [
            (n - 1) * s + (k - 1) * d + 1
            for n, s, k, d in zip(result, self.strides, self.kernel, self.dilations, strict=True)
        ]
        pads = [(0, 0)] * (array.ndim - rank) + [
            (b, max(0, span - size - b)) for b, span, size in zip(self.before, spans, array.shape[-rank:], strict=True)
        ]
        wide = np.pad(array, pads, constant_values=fill)
        for place in itertools.product(*(range(k) for k in self.kernel)):
            index: tuple[Any, ...] = tuple(
                slice(p * d, p * d + (n - 1) * s + 1, s)
                for p, d, n, s in zip(place, self.dilations, result, self.strides, strict=True)
            )
            yield wide[(..., *index)]


def _maps(context: OpContext, state: State, rank: int) -> tuple[Array, Array, tuple[int, ...]] | None:
    """Return both ends for each place of a map; None if there are too many, or their number is unknown."""
    axes = tuple(range(-rank, 0))
    sizes, result = lengths(context.shape(0), axes), lengths(context.result(), axes)
    shape = np.broadcast_shapes(state.lo.shape, state.hi.shape)
    if sizes is None or result is None:
        return None
    channels = shape[-rank - 1] if len(shape) > rank else 1
    leading = math.prod(shape[: -rank - 1]) if len(shape) > rank else 1
    if leading != 1 or channels * math.prod(s + 8 for s in sizes) > MOST_OF_MAPS:
        return None
    full = (channels, *sizes)
    lo, hi = (
        np.broadcast_to(a.reshape((-1, *a.shape[-rank:])) if a.ndim > rank else a, full) for a in (state.lo, state.hi)
    )
    return lo, hi, result


def _varies(state: State, count: int) -> bool:
    """True if bounds differ along one of the last axes."""
    return any(varies(end, axis) for end in (state.lo, state.hi) for axis in range(-count, 0))


# -- convolutions ------------------------------------------------------------------------------------


def _convolved(context: OpContext) -> State:
    """Bound a Conv: by the sizes of its terms, and by the norms of patch and filter."""
    dims = context.dims(context.op.inputs[1])
    x = context.at(0)
    if dims is None or not all(isinstance(d, int) for d in dims):
        return unknown("a convolution with weights of unknown shape")
    shape = [int(d) for d in dims]  # type: ignore[arg-type]
    rank = len(shape) - 2
    number = number_throughout(context.view, context.op.inputs[1])
    bias = context.at(2) if context.has(2) else box(0.0, 0.0)
    bias = replace(bias, lo=by_channel(bias.lo, rank), hi=by_channel(bias.hi, rank))
    window = _SlidingWindow.of(context, shape[2:], lengths(context.result(), tuple(range(-rank, 0))))
    if number is not None:
        total = _uniform(context, x, shape, number, window)
    else:
        value = context.op.inputs[1]
        tensor = context.view.constant(value)
        if value is not None and tensor is not None and context.frugal and not _narrow(x):
            total = _unfiltered(x, shape, largest(context.view, value))
        else:
            exact = _filtered(context, x, shape, tensor, window) if tensor is not None else None
            total = exact if exact is not None else _unfiltered(x, shape, context.at(1).absmax)
    if not bias.known:
        return unknown("a bias that is not bounded")
    return box(total.lo + bias.lo, total.hi + bias.hi, total.why)


def _uniform(context: OpContext, x: State, shape: Sequence[int], number: float, window: _SlidingWindow | None) -> State:
    """Bound a convolution whose weights are one number: it sums the patch."""
    rank, groups = len(shape) - 2, max(context.integer("group", 1), 1)
    taps, channels = math.prod(shape[2:]), shape[1]
    maps = None
    if context.spatial and window is not None and x.known and (window.padded or _varies(x, rank + 1)):
        maps = _maps(context, x, rank)
    if maps is not None and window is not None:
        lo, hi = (_over_channels(end, shape, groups) for end in maps[:2])
        ends = [np.add.reduce(list(window.places(end, 0.0, maps[2]))) * number for end in (lo, hi)]
        size = np.add.reduce(list(window.places(np.maximum(-lo, hi), 0.0, maps[2]))) * abs(number)
    else:
        low, high = x.lo, x.hi
        for axis in (*range(-rank, 0), -rank - 1):
            low, high = reduced(low, (axis,), np.min), reduced(high, (axis,), np.max)
        if window is None or window.padded:
            low, high = np.minimum(low, 0.0), np.maximum(high, 0.0)
        terms = channels * taps
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            return unknown("a convolution of numbers that are not bounded")
        ends = [end * terms * number for end in (low, high)]
        size = np.maximum(np.abs(ends[0]), np.abs(ends[1]))
    slack = (gamma(channels * taps) + context.arithmetic.unit) * size
    lo, hi = np.minimum(*ends), np.maximum(*ends)
    return box(lo - slack, hi + slack, f"sums of {channels * taps} terms, weights {number:g} throughout")


def _over_channels(end: Array, shape: Sequence[int], groups: int) -> Array:
    """Return the sums over the channels of each group, which may be alike, for each channel of the result."""
    outputs, inputs = shape[:2]
    if len(end) == 1 or groups == 1:
        total: Array = end.sum(axis=0, keepdims=True)
        return total * inputs if len(end) == 1 else total
    sums = end.reshape(groups, inputs, *end.shape[1:]).sum(axis=1)
    return np.repeat(sums, outputs // groups, axis=0)


def _filtered(
    context: OpContext, x: State, shape: Sequence[int], tensor: TensorProto, window: _SlidingWindow | None
) -> State | None:
    """Bound a convolution with constant filters, which are read once. None if the operand is open."""
    rank, groups = len(shape) - 2, max(context.integer("group", 1), 1)
    outputs, inputs, taps = shape[0], shape[1], math.prod(shape[2:])
    padded = window is None or window.padded
    channels = inputs * groups
    ends = [_by_channel(end, rank, channels, by) for end, by in ((x.lo, np.min), (x.hi, np.max))]
    lo, hi = ends
    if lo is None or hi is None:
        return None
    if padded:
        lo, hi = np.minimum(lo, 0.0), np.maximum(hi, 0.0)
    scale, radius = np.ones(channels), math.inf
    ball = x.ball
    if ball is not None and -rank - 1 in ball.axes:
        inner = [axis for axis in ball.axes if axis >= -rank]
        if ball.center is None and ball.scale is not None:
            own = _by_channel(ball.scale, rank, channels, np.max)
            scale, radius = (scale, math.inf) if own is None else (own, float(np.max(ball.radius)))
        else:
            radius = float(np.max(ball.zeroed().radius))
        if len(inner) < rank:  # one ball for each place, and a patch has several
            radius *= math.sqrt(taps)
    if not (np.isfinite(lo).all() and np.isfinite(hi).all()) and not math.isfinite(radius):
        return None
    finite = bool(np.isfinite(lo).all() and np.isfinite(hi).all())
    middle, half = ((lo + hi) / 2, (hi - lo) / 2) if finite else (np.zeros(channels), np.full(channels, math.inf))
    row = inputs * taps
    count = max(1, _PART // max(row, 1))
    centers, widths, most, squares = (np.zeros(outputs) for _ in range(4))
    at = 0
    for chunk in context.view.model.chunks(tensor, count * row):
        w = chunk.astype(np.float64).reshape(-1, inputs, taps)
        to = slice(at, at + len(w))
        own = np.arange(at, at + len(w)) // max(outputs // groups, 1)
        at += len(w)
        sums, sizes = w.sum(axis=2), np.abs(w).sum(axis=2)
        square = np.einsum("oit,oit->oi", w, w)
        for group in np.unique(own):
            mine, part = own == group, slice(group * inputs, (group + 1) * inputs)
            place = np.arange(to.start, to.stop)[mine]
            if finite:
                centers[place] = sums[mine] @ middle[part]
                widths[place] = sizes[mine] @ half[part]
                most[place] = sizes[mine] @ np.maximum(-lo[part], hi[part])
            squares[place] = square[mine] @ np.square(scale[part])
    reach = radius * np.sqrt(squares) if math.isfinite(radius) else np.full(outputs, math.inf)
    if not finite:
        centers, widths, most = np.zeros(outputs), np.full(outputs, math.inf), np.full(outputs, math.inf)
    size = np.minimum(most, reach)
    error = (gamma(row) + context.arithmetic.unit) * size + context.arithmetic.least * row * (
        float(np.max(np.maximum(-lo, hi))) if finite else radius
    )
    low = np.maximum(centers - widths, -reach) - error
    high = np.minimum(centers + widths, reach) + error
    tight = np.max(reach) < np.max(np.abs(centers) + widths)
    return box(by_channel(low, rank), by_channel(high, rank), "‖patch‖·‖w‖ (Cauchy–Schwarz)" if tight else "Σ|w||x|")


def _by_channel(end: Array, rank: int, channels: int, by: Callable[..., Array]) -> Array | None:
    row = reduced(end, (*range(-rank, 0), *range(-end.ndim, -rank - 1)), by).reshape(-1)
    return np.broadcast_to(row, channels) if row.size in (1, channels) else None


def _narrow(x: State) -> bool:
    """True if the box is little more than the numbers of one map."""
    return x.known and float((x.hi - x.lo).sum()) <= 1e-2 * float(x.size.sum())


def _unfiltered(x: State, shape: Sequence[int], largest: float) -> State:
    """Bound a convolution by the sizes of its terms, with filters of numbers that are at most `largest`."""
    terms = math.prod(shape[1:])
    if not x.known or not math.isfinite(largest):
        return unknown("a convolution of numbers that are not bounded")
    most = x.absmax * largest * terms * (1 + gamma(terms))
    return box(-most, most, "terms · |x| · |w|")


def _transposed(context: OpContext) -> State:
    """Bound a ConvTranspose: each result sums at most all taps of the channels of a group."""
    dims, x, w = context.dims(context.op.inputs[1]), context.at(0), context.at(1)
    if dims is None or not all(isinstance(d, int) for d in dims) or not (x.known and w.known):
        return unknown("a convolution of numbers that are not bounded")
    shape = [int(d) for d in dims]  # type: ignore[arg-type]
    strides = context.integers("strides") or [1] * (len(shape) - 2)
    spread = context.integers("dilations") or [1] * (len(shape) - 2)
    taps = [k if d > 1 else math.ceil(k / s) for k, s, d in zip(shape[2:], strides, spread, strict=True)]
    terms = shape[0] // max(context.integer("group", 1), 1) * math.prod(taps)
    bias = context.at(2).absmax if context.has(2) else 0.0
    number = number_throughout(context.view, context.op.inputs[1])
    size = x.absmax * w.absmax * terms * (1 + gamma(terms) + context.arithmetic.unit)
    if number is not None and context.spatial and bias == 0.0 and x.lo.size == 1 == x.hi.size:
        counts = _taps(context, shape[2:], strides, spread)
        if counts is not None:
            ends = [float(end.reshape(-1)[0]) * number * (terms // math.prod(taps)) * counts for end in (x.lo, x.hi)]
            return box(np.minimum(*ends), np.maximum(*ends), f"sums of terms, weights {number:g} throughout")
    return box(-size - bias, size + bias, "terms · |x| · |w|")


def _taps(context: OpContext, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> Array | None:
    """Return how many taps of a ConvTranspose reach each place; None if lengths or paddings are unknown."""
    rank = len(kernel)
    axes = tuple(range(-rank, 0))
    sizes, result = lengths(context.shape(0), axes), lengths(context.result(), axes)
    stated = [attribute(context.op.node, name) for name in ("auto_pad", "output_shape")]
    if sizes is None or result is None or any(stated) or math.prod(result) > MOST_OF_MAPS:
        return None
    counts: Array = np.ones(())
    pads = context.integers("pads") or [0] * rank
    for n, k, s, d, pad, length in zip(sizes, kernel, strides, dilations, pads, result, strict=False):
        places = np.add.outer(np.arange(n) * s, np.arange(k) * d).reshape(-1) - pad
        inside = places[(places >= 0) & (places < length)]
        counts = np.multiply.outer(counts, np.bincount(inside, minlength=length))
    return counts


# -- pools -------------------------------------------------------------------------------------------


def _pooled(context: OpContext) -> State | list[State]:
    kernel = context.integers("kernel_shape") or []
    rank, mean = len(kernel), context.op.kind == "AveragePool"
    x = context.at(0) if mean else context.masked(0)
    window = _SlidingWindow.of(context, kernel, lengths(context.result(), tuple(range(-rank, 0)))) if rank else None
    why = "a mean of the numbers" if mean else "one of the numbers"
    maps = _maps(context, x, rank) if window is not None and _varies(x, rank) and context.spatial else None
    if maps is not None and window is not None:
        lo, hi, result = maps
        if mean:
            count: Array | int = math.prod(kernel)
            if not context.integer("count_include_pad", 0):
                inside = np.ones((1, *lo.shape[-rank:]))
                count = np.maximum(np.add.reduce(list(window.places(inside, 0.0, result))), 1.0)
            ends = [np.add.reduce(list(window.places(end, 0.0, result))) / count for end in (lo, hi)]
        else:
            ends = [np.maximum.reduce(list(window.places(end, -math.inf, result))) for end in (lo, hi)]
        slack = gamma(math.prod(kernel)) * np.maximum(np.abs(ends[0]), np.abs(ends[1])) if mean else 0.0
        return [box(ends[0] - slack, ends[1] + slack, why), unknown("an index")]
    low, high = x.lo, x.hi
    for axis in range(-max(rank, 1), 0):
        low, high = reduced(low, (axis,), np.min), reduced(high, (axis,), np.max)
    if mean and (window is None or window.padded):
        low, high = np.minimum(low, 0.0), np.maximum(high, 0.0)
    slack = gamma(math.prod(kernel)) * np.maximum(-low, high) if mean else 0.0
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        slack = 0.0
    # A window with gaps may lie in the padding alone: its maximum is the lowest number.
    empty = not mean and any(d > 1 for d in context.integers("dilations") or ()) and (window is None or window.padded)
    return [replace(box(low - slack, high + slack, why), fills=x.fills or empty), unknown("an index")]


def _whole(context: OpContext) -> State:
    """Bound a pool over whole maps."""
    x, dims = context.at(0), context.shape(0)
    if dims is None:
        return x.hull("a mean of the numbers")
    axes = tuple(range(2 - len(dims), 0))
    mean = context.op.kind == "GlobalAveragePool"
    lo, hi = (reduced(end, axes, np.mean if mean else np.max) for end in (x.lo, x.hi))
    sizes = lengths(dims, axes)
    slack = gamma(math.prod(sizes) if sizes is not None else None) * reduced(x.size, axes, np.max) if mean else 0.0
    return box(lo - slack, hi + slack, "a mean of the numbers" if mean else "one of the numbers")


def _resized(context: OpContext) -> State:
    """Bound a Resize: interpolation is a mean, unless it is cubic."""
    stated, x = attribute(context.op.node, "mode"), context.at(0)
    mode = stated.s if stated is not None else b"nearest"
    edge = attribute(context.op.node, "coordinate_transformation_mode")
    hull = x.hull()
    if edge is not None and edge.s == b"tf_crop_and_resize":
        value = context.number("extrapolation_value", 0.0)
        hull = box(np.minimum(hull.lo, value), np.maximum(hull.hi, value))
    if mode == b"cubic":
        most = hull.absmax * _cubic_weight(context) ** _resized_axes(context)
        return box(-most, most, "a mean of the numbers, by cubic weights")
    slack = gamma(64) * hull.size if hull.known else 0.0
    return box(hull.lo - slack, hull.hi + slack, "a mean of the numbers")


def _cubic_weight(context: OpContext) -> float:
    """Return the largest sum of the sizes of cubic weights along an axis.

    Outer weights at t in [0, 1] sum to a·t·(1 − t), inner ones make up for it; for a ≤ 0 these are not negative.
    """
    a = context.number("cubic_coeff_a", -0.75)
    rescaled = context.integer("exclude_outside", 0) or context.integer("antialias", 0)
    return 1 - a / 2 if a <= 0 and not rescaled else 1 + 2 * abs(a)


def _resized_axes(context: OpContext) -> int:
    """Return how many axes a Resize interpolates along, at most."""
    dims, edge = context.shape(0), attribute(context.op.node, "coordinate_transformation_mode")
    scales = context.numbers(2 if len(context.op.inputs) > 2 else 1)
    if scales is not None and scales.size and (edge is None or edge.s != b"tf_crop_and_resize"):
        return int(np.count_nonzero(scales != 1))
    return len(dims) if dims is not None else 4


def _sampled(context: OpContext) -> State:
    """Bound a GridSample or RoiAlign: a mean or one of the numbers, and zeros outside."""
    x, mode = context.at(0).hull(), attribute(context.op.node, "mode")
    most = 1.375**2 if mode is not None and b"cubic" in mode.s else 1.0  # cubic weights of −¾ along two axes
    low, high = (x.lo, x.hi) if most == 1.0 else (-x.size * most, x.size * most)
    slack = gamma(64) * x.size if x.known else 0.0
    return box(np.minimum(low, 0.0) - slack, np.maximum(high, 0.0) + slack, "a mean of the numbers, or 0")


TABLE: Table = {
    **dict.fromkeys(("GridSample", "RoiAlign"), _sampled),
    **dict.fromkeys(("AveragePool", "MaxPool"), _pooled),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool"), _whole),
    "Conv": _convolved,
    "ConvTranspose": _transposed,
    "Resize": _resized,
}
