"""Bounds of elementwise ops of two operands, of choices, and of Casts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce

import numpy as np

from amp_rewrite.decide.bounds.activations import GELU_LEAST, Function, bell, contracted, even, gelu, inverse
from amp_rewrite.decide.bounds.arithmetic import gamma
from amp_rewrite.decide.bounds.context import OpContext, Step, Table
from amp_rewrite.decide.bounds.state import (
    Ball,
    State,
    box,
    floored,
    join,
    keeps_length,
    lengths,
    reduced,
    square_sum,
    unknown,
)
from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.attributes import attribute
from amp_rewrite.ir.dataflow import axes_of, casts_floats
from amp_rewrite.ir.view import Op

_NARROW_INTEGERS = 16
_WRAPS = 2.0**31


def added(context: OpContext, a: State, b: State, sign: float = 1.0) -> State:
    """Return the state of a ± b."""
    if sign < 0:
        b = replace(b, lo=-b.hi, hi=-b.lo, ball=_opposite(b.ball))
    with np.errstate(invalid="ignore"):
        lo, hi = a.lo + b.lo, a.hi + b.hi
    total = box(lo, hi, "a + b")
    fills = a.fills or b.fills
    return replace(total, ball=None if fills else _sum_ball(context, a, b), fills=fills, whole=a.whole and b.whole)


def _opposite(ball: Ball | None) -> Ball | None:
    return ball if ball is None or ball.center is None else replace(ball, center=-ball.center)


def _sum_ball(context: OpContext, a: State, b: State) -> Ball | None:
    if a.ball is None or (b.ball is not None and len(b.ball.axes) > len(a.ball.axes)):
        a, b = b, a
    x = a.ball
    if x is None or lengths(context.result(), x.axes) != x.sizes:
        return None
    y = b.ball
    if y is not None and y.axes == x.axes and (x.scale is None) == (y.scale is None) and x.scale is y.scale:
        center = _plus(x.center, y.center)
        blocks = x.blocks + y.blocks if x.blocks is not None and y.blocks is not None else None
        return Ball(x.axes, x.sizes, x.radius + y.radius, center, x.scale, blocks)
    middle, half = (b.lo + b.hi) / 2, (b.hi - b.lo) / 2
    if not np.isfinite(half).all():
        if y is None or y.axes != x.axes:
            return None
        first, second = x.zeroed(), y.zeroed()
        return Ball(x.axes, x.sizes, first.radius + second.radius)
    if np.max(half) <= 1e-2 * np.max(np.abs(middle)):  # a constant, rounded
        scale = np.ones(()) if x.scale is None else x.scale
        more = x.norm(half / scale)
        blocks = None if x.blocks is None else x.blocks + np.max(more)
        return Ball(x.axes, x.sizes, x.radius + more, _plus(x.center, middle), x.scale, blocks)
    own = x.zeroed().radius
    other = y.zeroed().radius if y is not None and y.axes == x.axes else np.sqrt(square_sum(b.size, x.axes, x.sizes))
    return Ball(x.axes, x.sizes, own + other)


def _plus(a: Array | None, b: Array | None) -> Array | None:
    return a if b is None else b if a is None else a + b


def multiplied(context: OpContext, a: State, b: State) -> State:
    """Return the state of a·b."""
    if a.fills or b.fills:
        return _filled(a, b)
    with np.errstate(invalid="ignore"):
        ends = [np.where((p == 0) | (q == 0), 0.0, p * q) for p in (a.lo, a.hi) for q in (b.lo, b.hi)]
    same = context.op.kind == "Mul" and len(set(context.op.inputs[:2])) == 1
    lo, hi = np.minimum.reduce(ends), np.maximum.reduce(ends)
    if same:
        lo, hi = (
            np.where((a.lo <= 0) & (a.hi >= 0), 0.0, np.minimum(np.square(a.lo), np.square(a.hi))),
            np.maximum(hi, 0),
        )
    return replace(box(lo, hi, "|a|·|b|", _product_ball(context, a, b)), whole=a.whole and b.whole)


def _filled(a: State, b: State) -> State:
    """Return the product of a mask and its fill, or of masked scores and a positive factor."""
    mask, fill = (b, a) if a.fills else (a, b)
    if mask.whole and not mask.fills and not fill.lo.any() and not fill.hi.any():
        return replace(box(0.0, 0.0, "0, or a mask's fill"), fills=True)
    if not mask.fills and (mask.lo > 1e-8).all():
        ends = [p * q for p in (a.lo, a.hi) for q in (b.lo, b.hi)]
        return replace(box(np.minimum.reduce(ends), np.maximum.reduce(ends), "a positive multiple"), fills=True)
    return unknown("a mask's fill is multiplied")


def _product_ball(context: OpContext, a: State, b: State) -> Ball | None:
    balls = []
    for x, y in ((a, b), (b, a)):
        ball = x.ball
        if ball is None or lengths(context.result(), ball.axes) != ball.sizes or not y.known:
            continue
        if np.max(y.hi - y.lo) <= 1e-2 * np.max(y.size):
            balls.append(_scaled(ball, y))
            continue
        about = ball.zeroed()
        most = y.size
        factor = reduced(most, ball.axes, np.max)
        blocks = None if about.blocks is None else about.blocks * float(np.max(most))
        balls.append(Ball(about.axes, about.sizes, about.radius * factor, blocks=blocks))
    return min(balls, key=lambda ball: float(np.max(ball.zeroed().radius)), default=None)


def _scaled(ball: Ball, y: State) -> Ball:
    """Return the ball of x·y for a constant y, rounded."""
    if y.size.size == 1:
        factor = float(y.absmax)
        radius, scale = ball.radius * factor, ball.scale
        blocks = None if ball.blocks is None else ball.blocks * factor
    else:
        scale, radius, blocks = floored(y.size if ball.scale is None else ball.scale * y.size), ball.radius, None
    if ball.center is None:
        return Ball(ball.axes, ball.sizes, radius, None, scale, blocks)
    more = ball.norm(ball.center * (y.hi - y.lo) / 2 / (np.ones(()) if scale is None else scale))
    blocks = None if blocks is None else blocks + np.max(more)
    return Ball(ball.axes, ball.sizes, radius + more, ball.center * ((y.lo + y.hi) / 2), scale, blocks)


def divided(context: OpContext, a: State, b: State) -> State:
    """Return the state of a / b."""
    if a.fills and not b.fills and (b.lo > 0).all():
        return _filled(a, box(1 / b.hi, 1 / b.lo))
    by = inverse(b)
    return replace(multiplied(context, a, by), why="|a| / |b|") if by.known else by


def _quotient(context: OpContext) -> State:
    """Bound a Div; numbers that are not negative, over their own sum, are at most 1, and sum to 1."""
    a, along = context.masked(0), _own_sum(context)
    if along is None or a.fills or not (a.lo >= 0).all():
        return divided(context, a, context.masked(1))
    sizes = lengths(context.shape(0), (along,))
    most = 1 + gamma(sizes[0] if sizes else None) + 2 * context.arithmetic.unit
    state = box(0.0, most, "a part of a sum")
    return replace(state, total=most, along=along)


def _own_sum(context: OpContext) -> int | None:
    """Return the axis over which a divisor sums the numbers that it divides, perhaps with an epsilon; else None."""
    view, value = context.view, context.op.inputs[1]
    dims = context.shape(0)
    while (op := view.producer(value, "Add", "Cast", "Identity", "Unsqueeze", "Expand", "Max", "Clip")) is not None:
        for other in op.inputs[1:] if op.kind in ("Add", "Max") else ():
            least = view.array(other)
            if least is None or not (least >= 0).all():
                return None
        if (op.kind == "Cast" and not casts_floats(view, op)) or (op.kind == "Clip" and has_upper_end(op)):
            return None
        value = op.inputs[0]
    total = view.producer(value, "ReduceSum")
    if total is None or dims is None or total.inputs[0] != context.op.inputs[0]:
        return None
    axes = [axis % len(dims) - len(dims) for axis in axes_of(view, total)]
    shape = context.shape(1)
    if shape is None or len(shape) != len(dims) or len(axes) != 1:
        return None
    rest = [(a, b) for axis, (a, b) in enumerate(zip(shape, dims, strict=True), -len(dims)) if axis != axes[0]]
    return axes[0] if shape[axes[0]] == 1 and all(a == b is not None for a, b in rest) else None


def _pair(function: Callable[[OpContext, State, State], State]) -> Step:
    return lambda context: function(context, context.masked(0), context.masked(1))


def _subtracted(context: OpContext) -> State:
    if len(set(context.op.inputs[:2])) == 1:
        return box(0.0, 0.0, "x − x")
    return added(context, context.masked(0), context.masked(1), -1.0)


def _summed(context: OpContext) -> State:
    return reduce(partial(added, context), map(context.masked, range(len(context.states))))


def _remainder(context: OpContext) -> State:
    """Bound a Mod that keeps the sign of what is divided: no larger than either."""
    x, y = context.at(0), context.at(1)
    if not context.integer("fmod", 0):
        return box(np.minimum(y.lo, 0.0), np.maximum(y.hi, 0.0), "0, or a part of the divisor")
    low, high = np.maximum(np.minimum(x.lo, 0.0), -y.size), np.minimum(np.maximum(x.hi, 0.0), y.size)
    return box(low, high, "a part of both")


def _averaged(context: OpContext) -> State:
    total, count = _summed(context), len(context.states)
    return replace(box(total.lo / count, total.hi / count, "a mean"), fills=total.fills)


def _extreme(by: Callable[..., Array]) -> Step:
    def step(context: OpContext) -> State:
        states = [context.masked(slot) for slot in range(len(context.states))]
        clear = [s for s in states if not s.fills] or states
        if by is np.maximum:  # a maximum is at least as large as each, and a fill of −∞ never counts
            lo = reduce(np.maximum, (s.lo for s in clear))
            hi = reduce(np.maximum, (s.hi for s in states))
        else:
            lo = reduce(np.minimum, (s.lo for s in states))
            hi = reduce(np.minimum, (s.hi for s in clear))
        return replace(
            box(lo, hi, f"one of several, the {'largest' if by is np.maximum else 'smallest'}"),
            fills=any(s.fills for s in states),
        )

    return step


def _clipped(context: OpContext) -> State:
    x = context.masked(0)
    lo, hi = x.lo, x.hi
    clear = []
    for slot, name, by in ((1, "min", np.maximum), (2, "max", np.minimum)):
        stated = attribute(context.op.node, name)
        end = box(stated.f, stated.f) if stated is not None else context.masked(slot) if context.has(slot) else None
        if end is not None and not end.fills:
            lo, hi = by(lo, end.lo), by(hi, end.hi)
            clear.append(end)
    for end in clear if x.fills else ():  # a fill becomes one of the ends
        lo, hi = np.minimum(lo, end.lo), np.maximum(hi, end.hi)
    return replace(box(lo, hi, "clipped"), fills=x.fills and len(clear) < 2, whole=x.whole)


def has_upper_end(clip: Op) -> bool:
    """True if a Clip has a largest number."""
    return attribute(clip.node, "max") is not None or (len(clip.inputs) > 2 and clip.inputs[2] is not None)


def _power(context: OpContext) -> State:
    x, exponent = context.at(0), context.numbers(1)
    if exponent is None or exponent.size != 1:
        return unknown("a power that is not constant")
    p = float(exponent.reshape(-1)[0])
    with np.errstate(all="ignore"):
        if p >= 0 and p == int(p) and int(p) % 2 == 0:
            return replace(even(x, lambda a: a**p), why=f"|x|^{p:g}")
        if p >= 0 and p == int(p):
            return box(x.lo**p, x.hi**p, f"x^{p:g}")
        if p > 0:
            return box(np.maximum(x.lo, 0.0) ** p, np.maximum(x.hi, 0.0) ** p, f"x^{p:g}, x ≥ 0")
        if (x.lo > 0).all():
            return box(x.hi**p, x.lo**p, f"x^{p:g}, x > 0")
    return unknown("a negative power of numbers near 0")


def _selected(context: OpContext) -> State:
    """Bound a Where: one of two values, element by element."""
    a, b = context.masked(1), context.masked(2)
    joined = join(a, b, "one of two")
    for x, y in ((a, b), (b, a)):
        if not y.fills and not x.fills and not y.lo.any() and not y.hi.any():  # zeros in places
            ball = (
                contracted(x) if x.ball is not None and lengths(context.result(), x.ball.axes) == x.ball.sizes else None
            )
            before = context.dims(context.op.inputs[1 if x is a else 2])
            total = x.total if keeps_length(before, context.result(), x.along) else math.inf
            return replace(joined, ball=ball, total=total, along=x.along, why=x.why or joined.why)
    if a.ball is None or b.ball is None or a.fills or b.fills:
        return joined
    first, second = a.ball.zeroed(), b.ball.zeroed()
    if (first.axes, first.sizes) != (second.axes, second.sizes) or lengths(context.result(), first.axes) != first.sizes:
        return joined
    return replace(joined, ball=Ball(first.axes, first.sizes, np.hypot(first.radius, second.radius)))


def _sloped(context: OpContext) -> State:
    """Bound a LeakyRelu or PRelu."""
    x = context.at(0)
    slope = (
        context.at(1)
        if context.op.kind == "PRelu"
        else box(context.number("alpha", 0.01), context.number("alpha", 0.01))
    )
    below = box(np.minimum(x.lo, 0.0), np.minimum(x.hi, 0.0))
    scaled = multiplied(context, below, slope)
    negative, positive = x.lo < 0, x.hi >= 0
    lo = np.minimum(np.where(negative, scaled.lo, math.inf), np.where(positive, np.maximum(x.lo, 0.0), math.inf))
    hi = np.maximum(np.where(negative, scaled.hi, -math.inf), np.where(positive, x.hi, -math.inf))
    return box(lo, hi, "x, or a multiple of it")


def _cast(context: OpContext) -> State:
    x, dtype = context.masked(0), context.dtype
    if dtype is None:
        return unknown("a Cast to an unknown type")
    if dtype is DType.BOOL:
        return replace(box(0.0, 1.0, "0 or 1"), whole=True)
    if dtype.floating:
        return x
    if not dtype.spelling.lstrip("u").startswith("int"):
        return unknown("a Cast to a type that saturates")
    held = integers(dtype)
    span = held or box(-_WRAPS if dtype.spelling.startswith("int") else 0.0, _WRAPS)
    lo, hi = np.floor(x.lo), np.ceil(x.hi)
    if x.fills or not ((lo >= span.lo).all() and (hi <= span.hi).all()):
        return replace(held or unknown("integers that may wrap"), whole=True)
    return replace(box(lo, hi, "rounded to integers"), whole=True)


def integers(dtype: DType | None) -> State | None:
    """Return the state of any value of a narrow integer type; None for other types."""
    if dtype is None or dtype.floating or dtype is DType.BOOL or dtype.bits > _NARROW_INTEGERS:
        return None
    if not dtype.spelling.lstrip("u").startswith("int"):
        return None
    signed = not dtype.spelling.startswith("u")
    low = -(2 ** (dtype.bits - 1)) if signed else 0
    high = 2 ** (dtype.bits - signed) - 1
    return replace(box(float(low), float(high), f"the range of {dtype.spelling}"), whole=True)


def _biased(least: float, function: Function) -> Step:
    def step(context: OpContext) -> State:
        x = context.at(0)
        return bell(added(context, x, context.at(1)) if context.has(1) else x, least, function)

    return step


TABLE: Table = {
    **dict.fromkeys(("Add", "com.microsoft::BiasAdd"), _pair(added)),
    **dict.fromkeys(("com.microsoft::BiasGelu", "com.microsoft::FastGelu"), _biased(GELU_LEAST, gelu)),
    **dict.fromkeys(("LeakyRelu", "PRelu"), _sloped),
    "Cast": _cast,
    "CastLike": _cast,
    "Clip": _clipped,
    "Div": _quotient,
    "Identity": lambda context: context.masked(0),
    "Max": _extreme(np.maximum),
    "Mean": _averaged,
    "Min": _extreme(np.minimum),
    "Mod": _remainder,
    "Mul": _pair(multiplied),
    "Pow": _power,
    "Sub": _subtracted,
    "Sum": _summed,
    "Where": _selected,
}
"""By op: the step. An op without a row has unknown results."""
