"""Bounds of ops that move numbers, and of those that state them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from amp_rewrite.decide.bounds.context import OpContext, Table
from amp_rewrite.decide.bounds.reshape import reshaped, transposed, without_axis
from amp_rewrite.decide.bounds.state import (
    MOST,
    ZERO_OR_ONE,
    Ball,
    State,
    box,
    join,
    keeps_length,
    lengths,
    reduced,
    unknown,
    varies,
)
from amp_rewrite.decide.bounds.weights import BLOCK, EXTREME
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.attributes import attribute
from amp_rewrite.ir.op_classes import RELABELS, SCATTERS


def _relabelled(context: OpContext) -> State:
    return reshaped(context.masked(0), context.shape(0), context.result())


def _transposed(context: OpContext) -> State:
    dims = context.shape(0)
    return transposed(context.masked(0), context.integers("perm"), None if dims is None else len(dims))


def _expanded(context: OpContext) -> State:
    x, before, after = context.masked(0), context.shape(0), context.result()
    if before is None or after is None:
        return x.hull()
    same = x.ball is not None and lengths(after, x.ball.axes) == x.ball.sizes
    total = x.total if keeps_length(before, after, x.along) else math.inf
    return replace(x, ball=x.ball if same else None, total=total)


def _moved(context: OpContext) -> State:
    """Bound an op whose results are numbers of its first input."""
    return context.masked(0).hull()


def _with_zeros(context: OpContext) -> State:
    return join(context.masked(0).hull(), box(0.0, 0.0), "numbers moved, and zeros")


def _written(context: OpContext) -> State:
    """Bound a TensorScatter: numbers of a cache, some of them replaced."""
    return join(context.masked(0).hull(), context.masked(1).hull(), "numbers of two")


def _padded(context: OpContext) -> State:
    mode = attribute(context.op.node, "mode")
    if mode is not None and mode.s not in (b"constant", b""):
        return context.masked(0).hull()
    stated = attribute(context.op.node, "value")
    number = stated.f if stated is not None else 0.0
    value = context.masked(2) if context.has(2) else box(number, number)
    return join(context.masked(0).hull(), value.hull(), "numbers moved, and the padding")


# -- parts -------------------------------------------------------------------------------------------


def _part(x: State, axis: int, start: int, stop: int) -> State:
    """Return the state of places from `start` to `stop` along an axis, counted from the end."""

    def cut(array: Array | None) -> Array | None:
        if array is None or not varies(array, axis):
            return array
        index = [slice(None)] * array.ndim
        index[axis] = slice(start, stop)
        return array[tuple(index)]

    lo, hi = cut(x.lo), cut(x.hi)
    assert lo is not None and hi is not None
    ball = x.ball
    if ball is not None:
        blocks = None
        if ball.blocks is not None and axis == -1 and not start % BLOCK and not stop % BLOCK:
            blocks = ball.blocks[start // BLOCK : stop // BLOCK]
        sizes = tuple(stop - start if a == axis else size for a, size in zip(ball.axes, ball.sizes, strict=True))
        radius = cut(ball.radius)
        assert radius is not None
        if blocks is not None:
            radius = np.minimum(radius, math.sqrt(float(np.square(blocks).sum())))
        ball = Ball(ball.axes, sizes, radius, cut(ball.center), cut(ball.scale), blocks)
    return replace(x, lo=lo, hi=hi, ball=ball)


def _blurred(x: State, axis: int) -> State:
    """Return a state that holds for any places along an axis."""
    lo, hi = reduced(x.lo, (axis,), np.min), reduced(x.hi, (axis,), np.max)
    ball = x.ball
    if ball is not None and (axis in ball.axes or any(varies(a, axis) for a in (ball.center, ball.scale))):
        ball = None
    elif ball is not None:
        ball = replace(ball, radius=reduced(ball.radius, (axis,), np.max))
    total = x.total if x.along != axis else math.inf
    return replace(x, lo=lo, hi=hi, ball=ball, total=total)


def _sliced(context: OpContext) -> State:
    x, dims = context.masked(0), context.shape(0)
    if dims is None:
        return x.hull()
    named = [context.integers("starts"), context.integers("ends"), context.integers("axes"), None]
    fed = [context.numbers(slot) for slot in (1, 2, 3, 4)]
    starts, ends, axes, steps = (
        a if a is not None else None if b is None else [int(i) for i in b.reshape(-1)]
        for a, b in zip(named, fed, strict=True)
    )
    if context.op.inputs[3:4] and context.op.inputs[3] is not None and axes is None:
        return x.hull()
    if axes is None:
        axes = list(range(len(starts))) if starts is not None else list(range(len(dims)))
    for at, axis in enumerate(axes):
        place = axis % len(dims) - len(dims)
        size, step = dims[place], 1
        if len(context.op.inputs) > 4 and context.op.inputs[4] is not None:
            step = steps[at] if steps is not None else 0
        if starts is not None and ends is not None and isinstance(size, int) and step == 1:
            first, last, _ = slice(starts[at], ends[at]).indices(size)
            x = _part(x, place, first, max(first, last))
        else:
            x = _blurred(x, place)
    return x


def _split(context: OpContext) -> Sequence[State]:
    x, dims, axis = context.masked(0), context.shape(0), context.axis(0)
    if dims is None or axis is None:
        return [x.hull()] * len(context.op.outputs)
    states, at = [], 0
    for slot in range(len(context.op.outputs)):
        size = lengths(context.result(slot), (axis,))
        known = size is not None and at >= 0
        states.append(_part(x, axis, at, at + size[0]) if known and size is not None else _blurred(x, axis))
        at = at + size[0] if known and size is not None else -1
    return states


def _gathered(context: OpContext) -> State:
    x, dims, chosen = context.masked(0), context.shape(0), context.shape(1)
    if dims is None or chosen is None:
        return x.hull()
    axis = context.axis(0)
    assert axis is not None
    index = context.numbers(1)
    if index is not None and index.size == 1 and isinstance(dims[axis], int):
        at = int(index.reshape(-1)[0]) % int(dims[axis])  # type: ignore[arg-type]
        x = _part(x, axis, at, at + 1)
        if x.ball is not None and axis in x.ball.axes:
            x = replace(x, ball=None)
    return without_axis(_blurred(x, axis), axis, len(chosen))


def _concatenated(context: OpContext) -> State:
    states = [context.masked(slot) for slot in range(len(context.states))]
    dims, result = [context.shape(slot) for slot in range(len(states))], context.result()
    stated = context.axis(0)
    if result is None or stated is None or any(d is None for d in dims):
        return reduce(lambda a, b: join(a, b, "one of several"), (s.hull() for s in states))
    axis = stated
    sizes = [lengths(d, (axis,)) for d in dims]
    fills, whole = any(s.fills for s in states), all(s.whole for s in states)
    balls = _joined_balls(states, axis)
    known = [size[0] for size in sizes if size is not None]
    if len(known) == len(states) and sum(known) <= MOST:
        lo, hi = (_beside([(s.lo, s.hi)[end] for s in states], known, axis, len(result)) for end in (0, 1))
        together = box(lo, hi, "side by side", balls)
    else:
        together = replace(reduce(lambda a, b: join(a, b, ""), (_blurred(s, axis) for s in states)), ball=balls)
    return replace(together, fills=fills, whole=whole, why="side by side")


def _beside(arrays: Sequence[Array], sizes: Sequence[int], axis: int, rank: int) -> Array:
    full = [a.reshape((1,) * (rank - a.ndim) + a.shape) for a in arrays]
    if all(a.shape[axis] == 1 for a in full) and all(np.array_equal(a, full[0]) for a in full):
        return full[0]
    shape = list(np.broadcast_shapes(*((*a.shape[:axis], 1, *a.shape[axis:][1:]) for a in full)))
    parts = []
    for array, size in zip(full, sizes, strict=True):
        shape[axis] = size
        parts.append(np.broadcast_to(array, shape))
    return np.concatenate(parts, axis=axis)


def _joined_balls(states: Sequence[State], axis: int) -> Ball | None:
    """Return the ball of values side by side: of parts of a vector, or of several vectors."""
    balls = [s.ball for s in states if s.ball is not None and not s.fills]
    if len(balls) < len(states) or len({ball.axes for ball in balls}) > 1:
        return None
    about = [ball.zeroed() for ball in balls]
    first = about[0]
    if axis not in first.axes:
        if len({ball.sizes for ball in about}) > 1:
            return None
        radius = reduce(np.maximum, (reduced(ball.radius, (axis,), np.max) for ball in about))
        return Ball(first.axes, first.sizes, radius)
    radius = np.sqrt(reduce(np.add, (np.square(ball.radius) for ball in about)))
    at = first.axes.index(axis)
    if len({(*ball.sizes[:at], *ball.sizes[at + 1 :]) for ball in about}) > 1:
        return None
    size = sum(ball.sizes[at] for ball in about)
    blocks = None
    if all(ball.blocks is not None for ball in about) and axis == -1:
        blocks = np.concatenate([ball.blocks for ball in about if ball.blocks is not None])
    return Ball(first.axes, (*first.sizes[:at], size, *first.sizes[at + 1 :]), radius, blocks=blocks)


# -- numbers that an op states -------------------------------------------------------------------------


def _filled(context: OpContext) -> State:
    stated = attribute(context.op.node, "value")
    numbers = context.view.model.array(stated.t) if stated is not None else np.zeros(1)
    value = float(numbers.reshape(-1)[0])
    if not abs(value) < EXTREME:
        return replace(box(0.0, 0.0, "a fill"), fills=True)
    return replace(box(value, value, f"{value:g} throughout"), whole=value == int(value))


def _chosen(context: OpContext) -> State:
    values = context.masked(2).hull()
    return replace(values, why="one of two numbers")


def _scattered(context: OpContext) -> State:
    reduction = attribute(context.op.node, "reduction")
    if reduction is not None and reduction.s not in (b"none", b"", b"max", b"min"):
        return unknown("a sum of scattered numbers")
    return join(context.masked(0).hull(), context.masked(2).hull(), "numbers moved")


def _one_of_several(context: OpContext) -> State:
    count = 2 if context.op.kind == "SequenceInsert" else len(context.states)
    return reduce(lambda a, b: join(a, b, "one of several"), [context.masked(i).hull() for i in range(count)])


def _counted(context: OpContext) -> State:
    first, limit = context.masked(0), context.masked(1)
    return join(first.hull(), limit.hull(), "a range between two numbers")


def _largest(context: OpContext) -> Sequence[State]:
    return [context.masked(0).hull("some of the numbers"), unknown("an index")]


def _drawn(context: OpContext) -> State:
    low, high = context.number("low", 0.0), context.number("high", 1.0)
    return box(low, high, "random numbers in a range")


TABLE: Table = {
    **dict.fromkeys(RELABELS - {"Identity"}, _relabelled),
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth", "GatherElements", "GatherND", "Compress", "Tile"), _moved),
    **dict.fromkeys(("ReverseSequence", "Unique", "SequenceAt", "ConcatFromSequence", "Upsample"), _moved),
    **dict.fromkeys(("SequenceConstruct", "SequenceInsert"), _one_of_several),
    **dict.fromkeys(SCATTERS, _scattered),
    **dict.fromkeys(("Trilu", "MaxUnpool", "CenterCropPad"), _with_zeros),
    **dict.fromkeys(("EyeLike", "Bernoulli", "Hardmax"), lambda _: ZERO_OR_ONE),
    "Concat": _concatenated,
    "ConstantOfShape": _filled,
    "Expand": _expanded,
    "Gather": _gathered,
    "OneHot": _chosen,
    "Pad": _padded,
    "RandomUniform": _drawn,
    "RandomUniformLike": _drawn,
    "Range": _counted,
    "Slice": _sliced,
    "Split": _split,
    "TensorScatter": _written,
    "TopK": _largest,
    "Transpose": _transposed,
}
