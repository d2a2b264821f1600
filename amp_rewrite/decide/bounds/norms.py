"""Bounds of normalizations, softmax and reductions.

The n deviations of a vector, divided by the root of their mean square, have the norm √n, whatever the vector; an
epsilon makes it less. So each result is at most √n·|g| + |b|, and the whole lies in a ball of radius √n about b.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from amp_rewrite.decide.bounds.arithmetic import gamma
from amp_rewrite.decide.bounds.context import OpContext, Table
from amp_rewrite.decide.bounds.elementwise import added
from amp_rewrite.decide.bounds.state import (
    Axes,
    Ball,
    Sizes,
    State,
    box,
    by_channel,
    floored,
    lengths,
    norm,
    reduced,
    unknown,
)
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.versions import FIRST_ROW_SOFTMAX

IN_FLOAT32 = 2.0**-20
"""More than the roundings inside one operator, which computes in float32, add to a norm."""


def unit(dims: Sizes, axes: Axes, slack: float = IN_FLOAT32, joint: Axes = ()) -> State:
    """Return the state of a vector along `axes` over the root of its mean square; the ball is along `joint`, too.

    `slack`: what roundings between the vector and the result add, relative.
    """
    sizes = lengths(dims, axes)
    if sizes is None:
        return unknown("a norm over an axis of unknown length")
    n = math.prod(sizes)
    most = math.sqrt(n) * (1 + gamma(n) + slack)
    every = tuple(sorted({*axes, *joint}))
    more = lengths(dims, every)
    ball = None
    if more is not None:
        radius = np.full((1,) * -min(every), most * math.sqrt(math.prod(more) / max(n, 1)))
        ball = Ball(every, more, radius)
    return box(-most, most, f"√{n}", ball)


def scaled(state: State, gain: State, bias: State | None, slack: float) -> State:
    """Return the state of g·n + b for a normalized n."""
    if not gain.known or (bias is not None and not bias.known):
        return unknown("a norm with a gain or bias that is not bounded")
    ball = state.ball
    most = float(state.absmax)
    size = gain.size * most
    low, high = (bias.lo, bias.hi) if bias is not None else (np.zeros(()), np.zeros(()))
    error = slack * (size + (bias.size if bias is not None else 0.0))
    why = f"{state.why}·|g|" + (" + |b|" if bias is not None else "")
    if ball is not None:
        scale = floored(np.broadcast_to(gain.size, gain.size.shape))
        radius = ball.radius
        center = None
        if bias is not None and (low.any() or high.any()):
            center = (low + high) / 2
            radius = radius + ball.norm((slack * bias.size + (high - low) / 2) / scale)
        radius = radius * (1 + slack)
        ball = Ball(ball.axes, ball.sizes, radius, center, scale)
    return box(low - size - error, high + size + error, why, ball)


def _along(state: State, count: int) -> State:
    """Return the state of a gain per channel, for a value with that many axes behind the channels."""
    return replace(state, lo=by_channel(state.lo, count), hi=by_channel(state.hi, count))


def _layer(context: OpContext) -> Sequence[State]:
    """Bound LayerNormalization and RMSNormalization."""
    axis, dims = context.axis(-1), context.shape(0)
    if axis is None and context.integer("axis", -1) >= 0:
        return [unknown("a norm over an unknown number of axes")]
    return [normalized(context, context.at(1), context.at(2) if context.has(2) else None, axis or -1, dims)]


def normalized(context: OpContext, gain: State, bias: State | None, axis: int, dims: Sizes) -> State:
    """Return the state of a norm over the axes from `axis` on."""
    n = unit(dims, tuple(range(axis, 0)))
    return scaled(n, gain, bias, context.arithmetic.unit) if n.known else n


def _skipped(context: OpContext) -> Sequence[State]:
    """Bound SkipLayerNormalization: the norm of a sum, and the sum."""
    simplified = "Simplified" in context.op.op_type
    at = 3 if simplified else 4
    total = added(context, context.at(0), context.at(1))
    if context.has(at):
        total = added(context, total, context.at(at))
    dims = context.shape(0)
    bias = context.at(3) if not simplified and context.has(3) else None
    result = normalized(context, context.at(2), bias, -1, dims)
    return [result, unknown("a statistic"), unknown("a statistic"), replace(total, why="a sum")]


def _per_channel(context: OpContext) -> State:
    """Bound InstanceNormalization: a norm of each map."""
    dims = context.shape(0)
    if dims is None:
        return unknown("a norm over an axis of unknown length")
    rank = len(dims)
    axes = tuple(range(2 - rank, 0))
    n = unit(dims, axes, joint=(1 - rank,))
    if not n.known:
        return n
    return scaled(n, _along(context.at(1), rank - 2), _along(context.at(2), rank - 2), context.arithmetic.unit)


def _grouped(context: OpContext) -> State:
    """Bound GroupNormalization: a norm of each group of maps."""
    dims, count = context.shape(0), context.integer("num_groups", context.integer("groups", 0))
    last = context.op.domain != "" and context.integer("channels_last", 1) == 1
    if dims is None or count <= 0:
        return unknown("a norm over an axis of unknown length")
    rank = len(dims)
    every = tuple(range(1 - rank, 0))
    sizes = lengths(dims, every)
    if sizes is None:
        return unknown("a norm over an axis of unknown length")
    n = math.prod(sizes) // count
    most = math.sqrt(n) * (1 + gamma(n) + IN_FLOAT32)
    ball = Ball(every, sizes, np.full((1,) * (rank - 1), most * math.sqrt(count)))
    state = box(-most, most, f"√{n}", ball)
    gain, bias = (_widened(context.at(slot), dims, last) for slot in (1, 2))
    result = scaled(state, gain, bias, context.arithmetic.unit)
    if context.op.domain and context.integer("activation", 0):
        result = box(np.minimum(result.lo, -0.279), np.maximum(result.hi, 0.0), result.why)
    return result


def _widened(state: State, dims: Sizes, last: bool) -> State:
    """Return a gain per channel, or per group, in the shape of the value."""
    assert dims is not None
    channels = dims[-1] if last else dims[1]
    size = max(state.lo.size, state.hi.size)
    if size > 1 and isinstance(channels, int) and channels != size:
        state = replace(state, lo=np.repeat(state.lo, channels // size), hi=np.repeat(state.hi, channels // size))
    return state if last else _along(state, len(dims) - 2)


def _batch(context: OpContext) -> Sequence[State]:
    """Bound a BatchNormalization of known statistics: x·f + (b − m·f)."""
    if context.integer("training_mode", 0):
        return [unknown("statistics of the batch")]
    dims = context.shape(0)
    x, gain, bias, mean, variance = (context.at(slot) for slot in range(5))
    if dims is None or not (variance.lo >= 0).all():
        return [unknown("a variance that is not constant")]
    rank = len(dims)
    deviation = (
        np.sqrt(variance.lo + context.number("epsilon", 1e-5)),
        np.sqrt(variance.hi + context.number("epsilon", 1e-5)),
    )
    with np.errstate(all="ignore"):
        ends = [g / d for g in (gain.lo, gain.hi) for d in deviation]
        low, high = np.minimum.reduce(ends), np.maximum.reduce(ends)
        shift = [m * f for m in (mean.lo, mean.hi) for f in (low, high)]
        lo, hi = bias.lo - np.maximum.reduce(shift), bias.hi - np.minimum.reduce(shift)
        factors = [by_channel(f, rank - 2) for f in (low, high)]
        terms = [f * e for f in factors for e in (x.lo, x.hi)]
        least, most = np.minimum.reduce(terms), np.maximum.reduce(terms)
        size = np.maximum(-least, most) + 2 * by_channel(np.maximum.reduce([np.abs(s) for s in shift]), rank - 2)
    slack = 4 * context.arithmetic.unit * size
    return [box(least + by_channel(lo, rank - 2) - slack, most + by_channel(hi, rank - 2) + slack, "|x|·f + |b|")]


def _local(context: OpContext) -> State:
    """Bound LRN: x / (k + a · Σx²)^β is largest for a single x; for β > ½ it peaks at x = √(k / (a · (2β − 1)))."""
    x, k, beta = context.at(0), context.number("bias", 1.0), context.number("beta", 0.75)
    size = max(context.integer("size", 1), 1)
    a = context.number("alpha", 1e-4) / size
    if not (k > 0 and a > 0 and beta >= 0):
        return unknown("unusual attributes")
    reach = x.size
    with np.errstate(all="ignore"):
        peak = np.minimum(reach, math.sqrt(k / (a * (2 * beta - 1)))) if beta > 0.5 else reach
        most = peak / (k + a * np.square(peak)) ** beta
        least = np.maximum(x.lo, 0.0) / (k + a * size * x.absmax**2) ** beta * (1 - 1e-6)
    return box(np.where(x.lo >= 0, np.nan_to_num(least), -most), most, "x / (k + a·x²)^β")


def _standardized(context: OpContext) -> State:
    axes, dims = context.integers("axes") or [0, 2, 3], context.shape(0)
    if dims is None:
        return unknown("a norm over an axis of unknown length")
    return unit(dims, tuple(sorted(axis % len(dims) - len(dims) for axis in axes)))


# -- softmax -----------------------------------------------------------------------------------------


def softmax(axis: int | None, terms: int | None, *, fills: bool) -> State:
    """Return the state of a softmax. A row that is masked entirely by −∞ is NaN, and has no numbers to bound."""
    why = "a softmax lies in [0, 1]" + ("; rows masked entirely are unknown" if fills else "")
    state = box(0.0, 1.0, why)
    return state if axis is None else replace(state, total=1 + gamma(terms), along=axis)


def _softmax(context: OpContext) -> State:
    dims = context.shape(0)
    opset = context.view.opsets.get("", FIRST_ROW_SOFTMAX)
    axis = context.axis(-1 if opset >= FIRST_ROW_SOFTMAX else 1)
    if opset < FIRST_ROW_SOFTMAX and axis != -1:
        return softmax(None, None, fills=context.masked(0).fills)
    known = lengths(dims, (axis,)) if axis is not None else None
    return softmax(axis, known[0] if known else None, fills=context.masked(0).fills)


def _log_softmax(context: OpContext) -> State:
    x = context.at(0)
    width = float(x.hull().hi - x.hull().lo)
    dims, axis = context.shape(0), context.axis(-1)
    known = lengths(dims, (axis,)) if axis is not None else None
    if known is None or not math.isfinite(width) or context.view.opsets.get("", FIRST_ROW_SOFTMAX) < FIRST_ROW_SOFTMAX:
        return box(-math.inf, 0.0, "a logarithm of a softmax is at most 0")
    return box(-(width + math.log(max(known[0], 1))) * (1 + 1e-5) - 1e-5, 1e-5, "log n + the width of the scores")


# -- reductions --------------------------------------------------------------------------------------


def _mean(context: OpContext) -> State:
    x, axes = context.at(0), context.axes()
    return x.hull("a mean") if axes is None else _reduced(context, x, axes, "a mean")


def _reduced(context: OpContext, x: State, axes: Axes, why: str) -> State:
    """Bound a mean or an extreme along axes."""
    mean = context.op.kind in ("ReduceMean", "GlobalAveragePool")
    by = (np.mean, np.mean) if mean else (np.max, np.max) if "Max" in context.op.kind else (np.min, np.min)
    lo, hi = reduced(x.lo, axes, by[0]), reduced(x.hi, axes, by[1])
    sizes = lengths(context.shape(0), axes)
    error = gamma(None if sizes is None else math.prod(sizes)) if mean else 0.0
    slack = error * reduced(x.size, axes, np.max)
    low = np.where(lo >= 0, np.maximum(lo - slack, 0.0), lo - slack)
    result = replace(box(low, hi + slack, why), fills=x.fills)
    return _without(context, result, axes)


def _without(context: OpContext, state: State, axes: Axes) -> State:
    """Return a reduced state without the reduced axes, if the op leaves them out."""
    if context.integer("keepdims", 1) or "Global" in context.op.kind:
        return state
    return replace(state, lo=_squeezed(state.lo, axes), hi=_squeezed(state.hi, axes))


def _squeezed(array: Array, axes: Axes) -> Array:
    return np.squeeze(array, axis=tuple(axis for axis in axes if -axis <= array.ndim))


def _extreme(context: OpContext) -> State:
    x, axes = context.masked(0), context.axes()
    return x.hull("one of the numbers") if axes is None else _reduced(context, x, axes, "one of the numbers")


def _sum(context: OpContext) -> State:
    """Bound a sum over axes of known lengths, of numbers, their sizes or their squares."""
    x, axes = context.at(0), context.axes()
    sizes = lengths(context.shape(0), axes) if axes is not None else None
    if context.op.kind == "ReduceL2" and axes is not None and len(axes) == 1:
        most = norm(x, axes[0], context.shape(0)) * (1 + gamma(sizes[0] if sizes else None))
        return _without(context, box(0.0, most, "the norm"), axes)
    if x.total < math.inf and axes == (x.along,) and context.op.kind == "ReduceSum":
        return _without(context, box(0.0, x.total, "the sum of a softmax"), axes)
    if axes is None or sizes is None:
        return unknown("a sum over an axis of unknown length")
    lo, hi, n = x.lo, x.hi, math.prod(sizes)
    if context.op.kind in ("ReduceL1", "ReduceSumSquare", "ReduceL2"):
        least = np.where((lo <= 0) & (hi >= 0), 0.0, np.minimum(np.abs(lo), np.abs(hi)))
        lo, hi = (least, x.size) if context.op.kind == "ReduceL1" else (np.square(least), np.square(x.size))
    shape = np.broadcast_shapes(lo.shape, hi.shape)
    times = n // math.prod(shape[axis] for axis in axes if -axis <= len(shape))
    lo, hi = (reduced(np.broadcast_to(a, shape), axes, np.sum) * times for a in (lo, hi))
    slack = gamma(n) * np.maximum(np.abs(lo), np.abs(hi))
    if context.op.kind == "ReduceSum":
        slack = gamma(n) * reduced(np.broadcast_to(x.size, shape), axes, np.sum) * times
    state = box(np.where(lo >= 0, np.maximum(lo - slack, 0.0), lo - slack), hi + slack, f"a sum of {n} terms")
    if context.op.kind == "ReduceL2":
        state = box(np.sqrt(state.lo), np.sqrt(state.hi), "the norm")
    return _without(context, state, axes)


def _running(context: OpContext) -> State:
    """Bound a CumSum along an axis of known length."""
    x, dims, at = context.at(0), context.shape(0), context.numbers(1)
    axis = None if dims is None or at is None else int(at.reshape(-1)[0]) % len(dims) - len(dims)
    sizes = lengths(dims, (axis,)) if axis is not None else None
    if axis is None or sizes is None:
        return unknown("a sum over an axis of unknown length")
    least = 0 if context.integer("exclusive", 0) else 1
    n = sizes[0]
    lo, hi = reduced(x.lo, (axis,), np.min), reduced(x.hi, (axis,), np.max)
    low, high = lo * np.where(lo < 0, n, least), hi * np.where(hi > 0, n, least)
    slack = gamma(n) * np.maximum(np.abs(low), np.abs(high))
    return box(low - slack, high + slack, f"sums of up to {n} terms")


def _log_sum(context: OpContext) -> State:
    """Bound a ReduceLogSumExp, which rises with each number."""
    x, axes = context.at(0), context.axes()
    sizes = lengths(context.shape(0), axes) if axes is not None else None
    if axes is None or sizes is None:
        return unknown("a sum over an axis of unknown length")
    ends = [_log_sum_exp(end, axes, math.prod(sizes)) for end in (x.lo, x.hi)]
    margin = [1e-5 * (1 + np.abs(end)) for end in ends]
    return _without(context, box(ends[0] - margin[0], ends[1] + margin[1], "log Σ eˣ"), axes)


def _log_sum_exp(end: Array, axes: Axes, count: int) -> Array:
    """Return log Σ eˣ over axes with so many elements, along which the array may be broadcast."""
    times = count // math.prod(end.shape[axis] for axis in axes if -axis <= end.ndim)
    top = reduced(end, axes, np.max)
    total: Array = top + np.log(reduced(np.exp(end - top), axes, np.sum) * times)
    return np.where(np.isfinite(top), total, top)


def _embedded(context: OpContext) -> Sequence[State]:
    """Bound EmbedLayerNormalization: a norm of sums of rows of tables."""
    table = context.shape(2)
    dims = None if table is None else (None, None, table[-1])
    return [normalized(context, context.at(5), context.at(6), -1, dims)]


TABLE: Table = {
    **dict.fromkeys(("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"), _layer),
    **dict.fromkeys(
        ("com.microsoft::SkipLayerNormalization", "com.microsoft::SkipSimplifiedLayerNormalization"), _skipped
    ),
    **dict.fromkeys(("GroupNormalization", "com.microsoft::GroupNorm"), _grouped),
    **dict.fromkeys(("ReduceMax", "ReduceMin"), _extreme),
    **dict.fromkeys(("ReduceSum", "ReduceL1", "ReduceL2", "ReduceSumSquare"), _sum),
    "BatchNormalization": _batch,
    "CumSum": _running,
    "InstanceNormalization": _per_channel,
    "LRN": _local,
    "LogSoftmax": _log_softmax,
    "LpNormalization": lambda _: box(-1.0, 1.0, "a part of its norm"),
    "MeanVarianceNormalization": _standardized,
    "ReduceLogSumExp": _log_sum,
    "ReduceMean": _mean,
    "Softmax": _softmax,
    "com.microsoft::EmbedLayerNormalization": _embedded,
}
