"""Facts about the elements of a value: a box, a ball, a sum, and marks.

Arrays line up with the value from its last axis, as in numpy's broadcasting; along an axis of length 1 one bound holds
for all elements. Axes are counted from the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from amp_rewrite.files.casting import Array
from amp_rewrite.ir.shapes.symbolic import Dim

Axes = tuple[int, ...]
Sizes = Sequence[Dim] | None
"""The dimensions of a value; None if its rank is unknown."""

MOST = 1 << 17
"""Elements of an array of bounds; larger ones are reduced along their first axes."""
MOST_OF_MAPS = 1 << 21
"""The same for a walk that follows what differs from place to place of a map."""
_LEAST_SCALE = 2.0**-10
"""Scales of a ball are at least this part of the largest, so that roundings stay small beside them."""


@dataclass(frozen=True, slots=True)
class Ball:
    """‖(x − center) / scale‖₂ ≤ radius over `axes` of the lengths `sizes`, for each place along the others.

    `radius` has length 1 along `axes`. `blocks`: radii of consecutive parts along the last axis, which is the only
    one, each about the same center and in the same scale.
    """

    axes: Axes
    sizes: tuple[int, ...]
    radius: Array
    center: Array | None = None
    scale: Array | None = None
    blocks: Array | None = None

    def norm(self, array: Array) -> Array:
        """Return the norm over the axes of an array that broadcasts along them."""
        squares = square_sum(array, self.axes, self.sizes)
        return np.sqrt(squares)

    def zeroed(self) -> Ball:
        """Return a ball about zero, in scale 1, that holds this one."""
        largest = 1.0 if self.scale is None else reduced(self.scale, self.axes, np.max)
        blocks = self.blocks if self.center is None and self.blocks is not None else None
        radius = self.radius * largest
        if blocks is not None:
            blocks = blocks * np.max(largest)
        if self.center is not None:
            radius = radius + self.norm(self.center)
        return Ball(self.axes, self.sizes, radius, blocks=blocks)


@dataclass(frozen=True, slots=True)
class State:
    """The elements of a value: numbers in [lo, hi], and perhaps `fills`, extreme numbers or infinities of a mask.

    `total`: elements are not negative, and sum to at most this along the axis `along`. `whole`: integers. `why`: the
    step of the proof.
    """

    lo: Array
    hi: Array
    ball: Ball | None = None
    total: float = math.inf
    along: int = 0
    fills: bool = False
    whole: bool = False
    why: str = ""

    @property
    def known(self) -> bool:
        """True if all elements are bounded."""
        return bool(np.isfinite(self.lo).all() and np.isfinite(self.hi).all())

    @property
    def size(self) -> Array:
        """The largest magnitudes."""
        return np.maximum(-self.lo, self.hi)

    @property
    def absmax(self) -> float:
        """The largest magnitude of all."""
        return float(np.max(self.size, initial=0.0))

    @property
    def least(self) -> float:
        """The largest magnitude that some element is sure to have."""
        return float(np.max(np.maximum(self.lo, -self.hi), initial=0.0))

    def plain(self, why: str = "") -> State:
        """Return the box alone, for a result that has the same numbers in other places."""
        return State(self.lo, self.hi, fills=self.fills, whole=self.whole, why=why or self.why)

    def hull(self, why: str = "") -> State:
        """Return one interval for all elements."""
        lo, hi = np.min(self.lo, initial=math.inf), np.max(self.hi, initial=-math.inf)
        return replace(box(lo, hi, why or self.why), fills=self.fills, whole=self.whole)


def box(lo: float | Array, hi: float | Array, why: str = "", ball: Ball | None = None) -> State:
    """Return a state of an interval, open where an end is NaN."""
    low, high = np.asarray(lo, np.float64), np.asarray(hi, np.float64)
    if np.isnan(low).any() or np.isnan(high).any():
        low, high = np.where(np.isnan(low), -math.inf, low), np.where(np.isnan(high), math.inf, high)
    return State(low, high, ball, why=why)


def unknown(why: str) -> State:
    """Return the state of an unknown value."""
    return box(-math.inf, math.inf, why)


ZERO_OR_ONE = replace(box(0.0, 1.0, "0 or 1"), whole=True)


def reduced(array: Array, axes: Sequence[int], by: object) -> Array:
    """Reduce an array along axes counted from the end, and keep them; axes that it lacks have one bound already."""
    present = tuple(axis for axis in axes if -axis <= array.ndim)
    return by(array, axis=present, keepdims=True) if present else array  # type: ignore[operator]


def varies(array: Array | None, axis: int) -> bool:
    """True if an array has several numbers along an axis counted from the end."""
    return array is not None and -axis <= array.ndim and array.shape[axis] > 1


def by_channel(array: Array, count: int) -> Array:
    """Return numbers per channel for a value with so many axes behind the channels."""
    return array.reshape(array.shape + (1,) * count) if array.size > 1 else array.reshape(())


def square_sum(array: Array, axes: Axes, sizes: Sequence[int]) -> Array:
    """Return the sum of squares over axes of these lengths, along which the array may be broadcast."""
    with np.errstate(over="ignore"):
        total = reduced(np.square(array), axes, np.sum)
    times = 1
    for axis, size in zip(axes, sizes, strict=True):
        if not varies(array, axis):
            times *= size
    return total * times


def lengths(dims: Sizes, axes: Axes) -> tuple[int, ...] | None:
    """Return the lengths of axes counted from the end; None if one is unknown."""
    if dims is None or any(-axis > len(dims) for axis in axes):
        return None
    sizes = [dims[axis] for axis in axes]
    known = [size for size in sizes if isinstance(size, int)]
    return tuple(known) if len(known) == len(sizes) else None


def keeps_length(before: Sizes, after: Sizes, axis: int) -> bool:
    """True if an axis, counted from the end, has the same known length in two shapes."""
    if before is None or after is None or not 0 < -axis <= min(len(before), len(after)):
        return False
    return before[axis] is not None and before[axis] == after[axis]


def norm(state: State, axis: int, dims: Sizes) -> Array:
    """Return a bound on the Euclidean norm along one axis."""
    best: Array = np.asarray(math.inf)
    if state.fills:
        return best
    sizes = lengths(dims, (axis,))
    if sizes is not None:
        best = np.sqrt(square_sum(state.size, (axis,), sizes))
    ball = state.ball
    if ball is not None and axis in ball.axes:
        best = np.minimum(best, ball.zeroed().radius)
    if state.total < math.inf and state.along == axis:
        # The squares of numbers in [0, h] that sum to t sum to at most t·h.
        best = np.minimum(best, np.sqrt(state.total * reduced(np.maximum(state.hi, 0.0), (axis,), np.max)))
    return best


def small(state: State, most: int = MOST) -> State:
    """Return a state whose arrays have at most `most` elements; along first axes they are reduced."""
    if max(state.lo.size, state.hi.size) <= most:
        return state
    lo, hi = np.broadcast_arrays(state.lo, state.hi)
    for axis in range(-lo.ndim, 0):
        if lo.size > most:
            lo, hi = reduced(lo, (axis,), np.min), reduced(hi, (axis,), np.max)
    ball = state.ball
    parts = () if ball is None else (ball.radius, ball.center, ball.scale)
    if any(part is not None and part.size > most for part in parts):
        ball = None
    return replace(state, lo=lo, hi=hi, ball=ball)


def join(a: State, b: State, why: str) -> State:
    """Return the state of a value that is one of two."""
    x, y = (a, b) if fit(a, b) else (a.hull(), b.hull())
    joined = box(np.minimum(x.lo, y.lo), np.maximum(x.hi, y.hi), why)
    return replace(joined, fills=a.fills or b.fills, whole=a.whole and b.whole)


def fit(a: State, b: State) -> bool:
    """True if the arrays of two states broadcast."""
    try:
        np.broadcast_shapes(a.lo.shape, a.hi.shape, b.lo.shape, b.hi.shape)
    except ValueError:
        return False
    return True


def floored(scale: Array) -> Array:
    """Return scales of which none is far below the largest."""
    return np.maximum(scale, max(_LEAST_SCALE * float(np.max(scale, initial=0.0)), 1e-30))
