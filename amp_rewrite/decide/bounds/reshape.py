"""Bounds of elements that are relabelled: Reshape, Transpose and the like."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from amp_rewrite.decide.bounds.state import MOST, Ball, State, reduced, varies
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.shapes.symbolic import Dim


class AxisGroup(NamedTuple):
    """Consecutive axes of an operand and those of the result with the same elements; `known`: in known order."""

    before: range
    after: range
    known: bool


def groups(before: Sequence[Dim], after: Sequence[Dim]) -> list[AxisGroup]:
    """Return how the axes of two shapes of the same elements correspond."""
    first = 0
    while first < min(len(before), len(after)) and before[first] is not None and before[first] == after[first]:
        first += 1
    start = [AxisGroup(range(i, i + 1), range(i, i + 1), True) for i in range(first)]
    i, j = len(before), len(after)
    end: list[AxisGroup] = []
    while i > first and j > first:
        match = _last(before[first:i], after[first:j])
        if match is None:
            break
        end.insert(0, AxisGroup(range(i - match[0], i), range(j - match[1], j), True))
        i, j = i - match[0], j - match[1]
    if i == first == j:
        return [*start, *end]
    ones = all(d == 1 for d in (*before[first:i], *after[first:j]))
    return [*start, AxisGroup(range(first, i), range(first, j), ones), *end]


def _last(before: Sequence[Dim], after: Sequence[Dim]) -> tuple[int, int] | None:
    """Return how many last axes of two shapes have the same elements."""
    i, j = 1, 1
    a, b = before[-1], after[-1]
    if a == b and a is not None:
        return 1, 1
    while isinstance(a, int) and isinstance(b, int):
        if a == b:
            return i, j
        if a < b:
            i += 1
            more = before[-i] if i <= len(before) else None
            a = a * more if isinstance(more, int) else None
        else:
            j += 1
            more = after[-j] if j <= len(after) else None
            b = b * more if isinstance(more, int) else None
    return None


def reshaped(state: State, before: Sequence[Dim] | None, after: Sequence[Dim] | None) -> State:
    """Return the state of the same elements in another shape."""
    if before is None or after is None:
        return state.hull()
    parts = groups(before, after)
    lo = _relabelled(state.lo, before, after, parts, np.min)
    hi = _relabelled(state.hi, before, after, parts, np.max)
    total, along = _sum_along(state, before, after, parts)
    ball = _ball(state.ball, before, after, parts) if state.ball is not None else None
    return replace(state, lo=lo, hi=hi, ball=ball, total=total, along=along)


def _relabelled(
    array: Array, before: Sequence[Dim], after: Sequence[Dim], parts: Sequence[AxisGroup], by: Callable[..., Array]
) -> Array:
    """Return an array of bounds in the new shape; reduced where the order of elements is unknown."""
    full = array.reshape((1,) * (len(before) - array.ndim) + array.shape)
    shape = list(full.shape)
    result = [1] * len(after)
    for part in parts:
        sizes = [before[axis] for axis in part.before]
        if all(shape[axis] == 1 for axis in part.before):
            continue
        count = math.prod(size for size in sizes if isinstance(size, int))
        if not part.known or not all(isinstance(size, int) for size in sizes) or count > MOST:
            if len(part.before) == len(part.after) == 1 and part.known:
                result[part.after[0]] = shape[part.before[0]]
                continue
            full = by(full, axis=tuple(part.before), keepdims=True)
        else:
            wide = list(full.shape)
            for axis in part.before:
                wide[axis] = before[axis]  # type: ignore[assignment]
            full = np.broadcast_to(full, wide)
            for axis in part.after:
                result[axis] = after[axis]  # type: ignore[assignment]
        shape = list(full.shape)
    return full.reshape(result)


def _sum_along(
    state: State, before: Sequence[Dim], after: Sequence[Dim], parts: Sequence[AxisGroup]
) -> tuple[float, int]:
    """Return the sum and its axis, if that axis is one of the result, too."""
    if state.total < math.inf:
        for part in parts:
            inner = [axis for axis in part.before if before[axis] != 1]
            outer = [axis for axis in part.after if after[axis] != 1]
            if part.known and inner == [len(before) + state.along] and len(outer) == 1:
                return state.total, outer[0] - len(after)
    return math.inf, 0


def _ball(ball: Ball, before: Sequence[Dim], after: Sequence[Dim], parts: Sequence[AxisGroup]) -> Ball | None:
    """Return the ball in the new shape; None where its axes cannot be told from others."""
    if any(-axis > len(before) for axis in ball.axes):
        return None
    inside = {axis + len(before) for axis in ball.axes}
    axes: list[int] = []
    about_zero = ball.zeroed()
    radius, changed = ball.radius, False
    for part in parts:
        mine = [axis for axis in part.before if axis in inside]
        others = [axis for axis in part.before if axis not in inside and before[axis] != 1]
        if not mine:
            continue
        if not all(isinstance(d, int) for d in (*(before[a] for a in part.before), *(after[a] for a in part.after))):
            return None
        if not part.known:
            return None
        if others:  # parts of a longer vector
            radius, changed = about_zero.radius, True
            full = radius.reshape((1,) * (len(before) - radius.ndim) + radius.shape)
            squares = np.square(full)
            for axis in others:
                squares = squares.sum(axis=axis, keepdims=True) * (before[axis] if full.shape[axis] == 1 else 1)
            radius = np.sqrt(squares)
        axes += part.after
    if ball.blocks is not None and (split := _heads(ball, after, parts)) is not None:
        return split
    sizes = tuple(int(after[axis]) for axis in axes)  # type: ignore[arg-type]
    names = tuple(axis - len(after) for axis in axes)
    radius = _relabelled(radius, before, after, parts, np.max)
    if not names or any(radius.shape[axis] != 1 for axis in axes):
        return None
    if changed:
        return Ball(names, sizes, radius)
    center = None if ball.center is None else _relabelled(ball.center, before, after, parts, np.max)
    scale = None if ball.scale is None else _relabelled(ball.scale, before, after, parts, np.max)
    if ball.center is not None and not _equal(center, _relabelled(ball.center, before, after, parts, np.min)):
        return Ball(names, sizes, _relabelled(about_zero.radius, before, after, parts, np.max))
    blocks = ball.blocks if names == ball.axes and sizes == ball.sizes else None
    return Ball(names, sizes, radius, center, scale, blocks)


def _heads(ball: Ball, after: Sequence[Dim], parts: Sequence[AxisGroup]) -> Ball | None:
    """Return the ball of each head, where blocks of the last axis become an axis of their own."""
    last = parts[-1]
    if ball.axes != (-1,) or ball.blocks is None or len(last.before) != 1 or len(last.after) != 2:
        return None
    count, length = after[-2], after[-1]
    if not isinstance(count, int) or not isinstance(length, int) or ball.scale is not None:
        return None
    if ball.blocks.size % count:
        return None
    radius = np.sqrt(np.square(ball.blocks.reshape(count, -1)).sum(axis=1)).reshape(count, 1)
    # Each head is also a part of the whole.
    radius = np.minimum(radius, np.max(ball.radius))
    center = None if ball.center is None else np.broadcast_to(ball.center.reshape(-1), count * length)
    center = None if center is None else center.reshape(count, length)
    return Ball((-1,), (length,), radius, center)


def transposed(state: State, perm: Sequence[int] | None, rank: int | None) -> State:
    """Return the state of a transposed value."""
    if rank is None or (perm is not None and len(perm) != rank):
        return state.hull() if state.lo.size > 1 or state.hi.size > 1 else state.plain()
    order = tuple(perm) if perm is not None else tuple(reversed(range(rank)))

    def moved(array: Array | None) -> Array | None:
        return None if array is None else array.reshape((1,) * (rank - array.ndim) + array.shape).transpose(order)

    lo, hi = moved(state.lo), moved(state.hi)
    assert lo is not None and hi is not None
    ball = state.ball
    if ball is not None:
        axes = tuple(order.index(axis + rank) - rank for axis in ball.axes)
        radius = moved(ball.radius)
        assert radius is not None
        blocks = ball.blocks if axes == ball.axes else None
        ball = Ball(axes, ball.sizes, radius, moved(ball.center), moved(ball.scale), blocks)
    along = order.index(state.along + rank) - rank if state.total < math.inf else 0
    return replace(state, lo=lo, hi=hi, ball=ball, along=along)


def without_axis(state: State, axis: int, added: int) -> State:
    """Return the state after an axis, counted from the end, gave way to some others, along which no bound differs."""

    def moved(array: Array | None, by: Callable[..., Array]) -> Array | None:
        if array is None or -axis > array.ndim:
            return array
        flat = reduced(array, (axis,), by)
        at = flat.ndim + axis
        return flat.reshape(flat.shape[:at] + (1,) * added + flat.shape[at + 1 :])

    lo, hi = moved(state.lo, np.min), moved(state.hi, np.max)
    assert lo is not None and hi is not None
    ball = state.ball
    if ball is not None and axis in ball.axes:
        ball = None
    if ball is not None:
        plain = ball.zeroed() if any(varies(a, axis) for a in (ball.center, ball.scale)) else ball
        radius = moved(plain.radius, np.max)
        assert radius is not None
        axes = tuple(a if a > axis else a - added + 1 for a in ball.axes)
        ball = Ball(axes, ball.sizes, radius, moved(plain.center, np.max), moved(plain.scale, np.max), plain.blocks)
    along, total = state.along, state.total
    if total < math.inf:
        along, total = (0, math.inf) if along == axis else (along if along > axis else along - added + 1, total)
    return replace(state, lo=lo, hi=hi, ball=ball, along=along, total=total)


def _equal(a: Array | None, b: Array | None) -> bool:
    return a is not None and b is not None and np.array_equal(a, b)
