"""Bounds of activations and other functions of one number."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from amp_rewrite.decide.bounds.context import OpContext, Step, Table
from amp_rewrite.decide.bounds.state import ZERO_OR_ONE, Ball, State, box, unknown
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.op_classes import PERIODIC

Function = Callable[[Array], Array]
GELU_LEAST, _MISH_LEAST, _HARD_SWISH_LEAST, _SWISH_LEAST = -0.17005, -0.30885, -0.37501, -0.27847


def contracted(x: State) -> Ball | None:
    """Return the ball of f(x) where |f(x)| ≤ |x|."""
    ball = x.ball
    if ball is None or x.fills:
        return None
    return replace(ball, blocks=None) if ball.center is None else ball.zeroed()


def _rising(function: Function, x: State, *, contracts: bool = False) -> State:
    """Return the state of a function that never falls."""
    with np.errstate(all="ignore"):
        lo, hi = function(x.lo), function(x.hi)
    return box(lo, hi, ball=contracted(x) if contracts else None)


def _unary(function: Function, why: str = "", *, contracts: bool = False) -> Step:
    def step(context: OpContext) -> State:
        return replace(_rising(function, context.at(0), contracts=contracts), why=why or context.op.op_type)

    return step


def _within(least: float, most: float, function: Function | None = None) -> Step:
    """Return the step of a function with values in [least, most], which never falls if `function` computes it."""

    def step(context: OpContext) -> State:
        x = context.at(0)
        why = f"{context.op.op_type} lies in [{least:g}, {most:g}]"
        if function is None:
            return box(least, most, why)
        inside = _rising(function, x)
        margin = 1e-6  # kernels approximate such functions
        lo, hi = np.clip(inside.lo - margin, least, most), np.clip(inside.hi + margin, least, most)
        return box(lo, hi, why)

    return step


def bell(x: State, least: float, function: Function) -> State:
    """Return the state of x·g(x) with g from 0 to 1, rising from its minimum on: GELU, Swish and Mish."""
    with np.errstate(all="ignore"):
        top = np.maximum(np.nan_to_num(function(x.hi), nan=0.0, posinf=math.inf), 0.0)
        low = np.where(x.lo >= 0, np.nan_to_num(function(np.maximum(x.lo, 0.0)), nan=0.0, posinf=math.inf), least)
    margin = 1e-3 * np.minimum(np.abs(x.hi), 1.0)  # the form with tanh differs from that with erf by 5e-4
    top = np.minimum(top + np.maximum(margin, 1e-3), np.maximum(x.hi, 0.0) + 1e-6)
    low = np.where(x.lo >= 0, np.maximum(low - 1e-3, 0.0), np.maximum(low - 1e-3, x.lo))
    return box(low, top, "0 ≤ f(x) ≤ x for x ≥ 0, small below", contracted(x))


def erf(x: Array) -> Array:
    """Return the error function."""
    return np.asarray(np.vectorize(math.erf, otypes=[np.float64])(np.clip(x, -10, 10)))


def gelu(x: Array) -> Array:
    """Return x·Φ(x)."""
    return np.asarray(x * (1 + erf(x / math.sqrt(2))) / 2)


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + e⁻ˣ)."""
    return np.asarray(1 / (1 + np.exp(-np.clip(x, -700, 700))))


def swish(x: Array) -> Array:
    """Return x·sigmoid(x)."""
    return x * sigmoid(x)


def _bell(least: float, function: Function) -> Step:
    return lambda context: bell(context.at(0), least, function)


def _swish(default: float) -> Step:
    def step(context: OpContext) -> State:
        """Bound x·sigmoid(α·x), which is swish(α·x) / α."""
        alpha, x = context.number("alpha", default), context.at(0)
        if alpha <= 0:
            return unknown("no slope, or a negative one")
        return bell(x, _SWISH_LEAST / alpha, lambda a: swish(alpha * a) / alpha)

    return step


def even(x: State, top: Function) -> State:
    """Return the state of a function of |x| that rises with |x|."""
    least = np.where((x.lo <= 0) & (x.hi >= 0), 0.0, np.minimum(np.abs(x.lo), np.abs(x.hi)))
    with np.errstate(all="ignore"):
        return box(top(least), top(x.size))


def _absolute(context: OpContext) -> State:
    x = context.masked(0)
    return replace(even(x, lambda a: a), ball=contracted(x), fills=x.fills, whole=x.whole, why="|x|")


def _negated(context: OpContext) -> State:
    x = context.masked(0)
    ball = None if x.ball is None else replace(x.ball, center=None if x.ball.center is None else -x.ball.center)
    return replace(x.plain("−x"), lo=-x.hi, hi=-x.lo, ball=ball)


def _root(context: OpContext) -> State:
    x = context.at(0)
    with np.errstate(all="ignore"):
        return box(np.sqrt(np.maximum(x.lo, 0.0)), np.sqrt(np.maximum(x.hi, 0.0)), "√x")


def _logarithm(context: OpContext) -> State:
    x = context.at(0)
    if not (x.lo > 0).all():
        return unknown("the logarithm of numbers near 0")
    with np.errstate(all="ignore"):
        return box(np.log(x.lo) - 1e-6, np.log(x.hi) + 1e-6, "log x")


def _exponential(context: OpContext) -> State:
    x = context.at(0)
    with np.errstate(all="ignore"):
        return box(np.exp(x.lo) * (1 - 1e-6), np.exp(x.hi) * (1 + 1e-6), "eˣ")


def inverse(y: State) -> State:
    """Return the state of 1 / y; open if y may be 0."""
    if y.fills or not ((y.lo > 0) | (y.hi < 0)).all():
        return unknown("a divisor that may be 0")
    with np.errstate(all="ignore"):
        return box(1 / y.hi, 1 / y.lo)


def _exponential_unit(gain: float, alpha: float, context: OpContext) -> State:
    """Bound γ·x, for x < 0 γ·α·(eˣ − 1); Celu divides the exponent by α."""
    alpha, gain = context.number("alpha", alpha), context.number("gamma", gain)
    width = alpha if context.op.kind == "Celu" else 1.0
    x = context.at(0)
    if alpha <= 0 or gain <= 0:
        return unknown("no slope, or a negative one")
    with np.errstate(all="ignore"):
        ends = [gain * np.where(e > 0, e, alpha * np.expm1(np.minimum(e, 0.0) / width)) for e in (x.lo, x.hi)]
    return box(ends[0] - 1e-6, ends[1] + 1e-6, "at least −γ·α")


def _dropped(context: OpContext) -> State:
    training = context.numbers(2) if context.has(2) else np.zeros(1)
    x = context.masked(0)
    return x if training is not None and not training.any() else unknown("a Dropout in training")


def _thresholded(context: OpContext) -> State:
    """Bound a ThresholdedRelu: 0, or a number beyond α."""
    x, alpha = context.at(0), context.number("alpha", 1.0)
    low = np.minimum(np.maximum(x.lo, alpha), 0.0)
    return box(low, np.maximum(x.hi, 0.0), "x, or 0", contracted(x))


def _shrunk(context: OpContext) -> State:
    """Bound a Shrink: 0, or a number beyond λ, moved by the bias."""
    x, limit, bias = context.at(0), context.number("lambd", 0.5), context.number("bias", 0.0)
    if limit < 0:
        return unknown("a negative limit")
    above, below = x.hi > limit, x.lo < -limit
    left = [np.where(below, end + bias, 0.0) for end in (x.lo, np.minimum(x.hi, -limit))]
    right = [np.where(above, end - bias, 0.0) for end in (np.maximum(x.lo, limit), x.hi)]
    every = np.broadcast_arrays(*left, *right, np.zeros(()))
    return box(np.minimum.reduce(every), np.maximum.reduce(every), "x ∓ bias, or 0")


def _hard_sigmoid(context: OpContext) -> State:
    x, alpha, beta = context.at(0), context.number("alpha", 0.2), context.number("beta", 0.5)
    if alpha < 0:
        return box(0.0, 1.0, "HardSigmoid lies in [0, 1]")
    return replace(_rising(lambda a: np.clip(alpha * a + beta, 0, 1), x), why="HardSigmoid lies in [0, 1]")


TABLE: Table = {
    **dict.fromkeys(("And", "Or", "Xor", "Not", "IsNaN", "IsInf", "Equal", "Less", "Greater"), lambda _: ZERO_OR_ONE),
    **dict.fromkeys(("LessOrEqual", "GreaterOrEqual"), lambda _: ZERO_OR_ONE),
    **dict.fromkeys(PERIODIC, _within(-1, 1)),
    **dict.fromkeys(("Gelu", "com.microsoft::Gelu"), _bell(GELU_LEAST, gelu)),
    "Swish": _swish(1.0),
    "com.microsoft::QuickGelu": _swish(1.702),
    "Abs": _absolute,
    "Asin": _within(-math.pi / 2, math.pi / 2, lambda x: np.arcsin(np.clip(x, -1, 1))),
    "Asinh": _unary(np.arcsinh, contracts=True),
    "Atan": _within(-math.pi / 2, math.pi / 2, np.arctan),
    "Ceil": _unary(np.ceil),
    "Celu": partial(_exponential_unit, 1.0, 1.0),
    "Dropout": _dropped,
    "Elu": partial(_exponential_unit, 1.0, 1.0),
    "Erf": _within(-1, 1, erf),
    "Exp": _exponential,
    "Floor": _unary(np.floor),
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _bell(_HARD_SWISH_LEAST, lambda x: x * np.clip(x / 6 + 0.5, 0, 1)),
    "Log": _logarithm,
    "Mish": _bell(_MISH_LEAST, lambda x: x * np.tanh(np.logaddexp(0, np.minimum(x, 700)))),
    "Neg": _negated,
    "Reciprocal": lambda context: inverse(context.at(0)),
    "Relu": _unary(lambda x: np.maximum(x, 0.0), "x, or 0", contracts=True),
    "Round": _unary(np.round),
    "Selu": partial(_exponential_unit, 1.0507, 1.67327),
    "Sigmoid": _within(0, 1, sigmoid),
    "Shrink": _shrunk,
    "Sign": _within(-1, 1, np.sign),
    "Softplus": _within(0, math.inf, lambda x: np.logaddexp(0, x)),
    "Softsign": _within(-1, 1),
    "Sqrt": _root,
    "Tanh": _within(-1, 1, np.tanh),
    "ThresholdedRelu": _thresholded,
}
"""By op: the step."""
