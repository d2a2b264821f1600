"""Products of two values, neither of them a constant matrix."""

from __future__ import annotations

import math

import numpy as np

from amp_rewrite.decide.bounds.arithmetic import gamma
from amp_rewrite.decide.bounds.state import Ball, Sizes, State, box, lengths, norm, reduced
from amp_rewrite.files.casting import Array


def multiplied(a: State, b: State, before: Sizes, after: Sizes) -> State:
    """Return the state of a·b, sums over the last axis of a and the last but one of b, of these dimensions."""
    if a.fills or b.fills:
        return box(-math.inf, math.inf, "a mask's fill is multiplied")
    terms = _terms(before, after)
    if a.total < math.inf and a.along == -1:
        return _mixed(a.total, b, terms)
    if b.total < math.inf and b.along == -2 and a.lo.ndim:
        mixed = _mixed(b.total, box(_swapped(a.lo), _swapped(a.hi)), terms)
        return box(_swapped(mixed.lo), _swapped(mixed.hi), mixed.why)
    cauchy = norm(a, -1, before) * norm(b, -2, after)
    x = (reduced(a.lo, (-1,), np.min), reduced(a.hi, (-1,), np.max))
    y = (reduced(b.lo, (-2,), np.min), reduced(b.hi, (-2,), np.max))
    with np.errstate(invalid="ignore"):
        products = [np.nan_to_num(p * q, nan=math.inf) for p in x for q in y]
        low, high = np.minimum.reduce(products), np.maximum.reduce(products)
    times = math.inf if terms is None else terms
    with np.errstate(invalid="ignore"):
        least, most = np.nan_to_num(low * times, nan=0.0, posinf=math.inf, neginf=-math.inf), high * times
        most = np.nan_to_num(most, nan=0.0, posinf=math.inf, neginf=-math.inf)
    lo, hi = np.maximum(least, -cauchy), np.minimum(most, cauchy)
    size = np.minimum(np.maximum(-least, most), cauchy)
    error = gamma(terms) * np.where(np.isfinite(size), np.maximum(size, _sizes(x, y, times, cauchy)), 0.0)
    tight = np.max(cauchy) <= np.max(np.maximum(-least, most))
    why = "‖a‖·‖b‖ (Cauchy–Schwarz)" if tight else "terms · |a| · |b|"
    return box(lo - error, hi + error, why)


def _sizes(x: tuple[Array, Array], y: tuple[Array, Array], times: float, cauchy: Array) -> Array:
    """Return a bound on Σ|a|·|b|."""
    with np.errstate(invalid="ignore"):
        total = np.maximum(-x[0], x[1]) * np.maximum(-y[0], y[1]) * times
    return np.minimum(np.nan_to_num(total, nan=math.inf), cauchy)


def _terms(before: Sizes, after: Sizes) -> int | None:
    known = lengths(before, (-1,)) or lengths(after, (-2,))
    return known[0] if known else None


def _mixed(total: float, b: State, terms: int | None) -> State:
    """Return the state of a mixture of rows of b with weights that are not negative and sum to at most `total`."""
    most = total * (1 + gamma(terms))
    lo = np.minimum(reduced(b.lo, (-2,), np.min), 0.0) * most
    hi = np.maximum(reduced(b.hi, (-2,), np.max), 0.0) * most
    ball = b.ball
    if ball is not None and ball.axes == (-1,):
        about = ball.zeroed()
        radius = reduced(about.radius, (-2,), np.max) * most
        blocks = None if about.blocks is None else about.blocks * most
        ball = Ball(ball.axes, ball.sizes, radius, blocks=blocks)
    else:
        ball = None
    return box(lo, hi, "a mixture of rows, weights sum to 1", ball)


def _swapped(array: Array) -> Array:
    return np.swapaxes(array, -1, -2) if array.ndim > 1 else array.reshape(array.shape + (1,) * (array.ndim == 1))
