"""Sums over axes: many lanes add up in the low type, each a part of the terms in order, then halves meet in a tree."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.shapes.onnx_shapes import elements
from amp_rewrite.ir.versions import FIRST_ROW_SOFTMAX
from amp_rewrite.rewrite.device_arithmetic.activations import Unary, low_exp, low_log
from amp_rewrite.rewrite.device_arithmetic.low_op import LowBuilder, LowOp, Recipe, Step
from amp_rewrite.rewrite.device_arithmetic.products import taken_apart

LANES, LANES_OF_ALL, LANES_OF_POOL = 64, 256, 128
"""Threads that share a sum: of some axes, of all of them, of a global pool."""


@dataclass(frozen=True, slots=True)
class TermRows:
    """Rows of terms: a value of shape [rows, length] and its length, None if that is known at run time alone."""

    name: str
    length: int | None


def lane_sum(b: LowBuilder, row: TermRows, lanes: int, *, combine: str = "Add", whole: bool = False) -> str:
    """Return the sums of rows as [rows, 1]: term k goes to lane k mod `lanes`.

    `whole`: the tree spans all lanes, even those without a term.
    """
    neutral = 1.0 if combine == "Mul" else 0.0
    parts = b.shaped(filled(b, row, lanes, neutral), [0, -1, lanes])
    if row.length is not None and row.length <= lanes:
        total = b.shaped(parts, [0, lanes])
    else:
        start = b.zeros_like(b.op("Gather", parts, b.constant(np.array(0, np.int64)), axis=1), neutral)
        total = b.scan([start], [(parts, 1)], folding(combine), 2)[0]
    left = lanes if whole or row.length is None else min(row.length, lanes)
    while left > 1:
        half, interval = left // 2, -(-left // 2)
        sums = b.low(combine, b.picked(total, 0, half, 1), b.picked(total, interval, half, 1))
        total = b.op("Concat", sums, b.picked(total, half, 1, 1), axis=1) if interval > half else sums
        left = interval
    return b.picked(total, 0, 1, 1) if row.length is not None and row.length <= lanes and not whole else total


def folding(op_type: str) -> Step:
    return lambda body, states, parts: [body.low(op_type, states[0], parts[0])]


def filled(b: LowBuilder, row: TermRows, lanes: int, fill: float) -> str:
    """Return rows that are filled up to a multiple of the lanes."""
    if row.length is not None:
        missing = b.ints([-row.length % lanes]) if row.length % lanes else None
    else:
        size, width = b.picked(b.op("Shape", row.name), 1, 1, 0), b.ints([lanes])
        over = b.op("Sub", size, b.op("Mul", b.op("Div", size, width), width))
        missing = b.op("Sub", width, over)  # a whole turn of fill changes nothing
    if missing is None:
        return row.name
    shape = b.op("Concat", b.picked(b.op("Shape", row.name), 0, 1, 0), missing, axis=0)
    return b.op("Concat", row.name, b.full(shape, fill, DType.FLOAT), axis=1)


def rows_of(b: LowBuilder, site: LowOp, x: str, axes: list[int]) -> TermRows:
    """Return a value as rows over these axes, in the order of memory."""
    shape = site.shape(0) or ()
    kept = [axis for axis in range(len(shape)) if axis not in axes]
    moved = b.op("Transpose", x, perm=[*kept, *axes]) if axes != list(range(len(kept), len(shape))) else x
    length = elements([shape[axis] for axis in axes])
    if length is not None:
        return TermRows(b.shaped(moved, [-1, length]), length)
    if not kept:
        return TermRows(b.shaped(moved, [1, -1]), None)
    inner = b.op("Gather", b.op("Shape", site.input(0)), b.ints(axes), axis=0)
    length_value = b.reduce("ReduceProd", inner, [0], keepdims=True)
    return TermRows(b.op("Reshape", moved, b.op("Concat", b.ints([-1]), length_value, axis=0)), None)


def reduced_axes(site: LowOp) -> list[int] | None:
    """Return the axes of a reduction, ascending; None if they are unknown."""
    shape = site.shape(0)
    if shape is None:
        return None
    stated = site.attribute("axes", site.value(1))
    if stated is None and site.input(1):
        return None
    if stated is None or len(stated) == 0:
        return [] if site.attribute("noop_with_empty_axes", 0) else list(range(len(shape)))
    return sorted({int(axis) % len(shape) for axis in np.asarray(stated).reshape(-1)})


def _squared(b: LowBuilder, x: str) -> str:
    return b.low("Mul", x, x)


def reduction(before: Unary = lambda b, x: x, after: str = "", combine: str = "Add") -> Recipe:
    """Return the recipe of a reduction: `before` on each term, `after` on the sum, both rounded."""

    def build(b: LowBuilder, site: LowOp) -> list[str] | None:
        axes = reduced_axes(site)
        if axes is None:
            return None
        if not axes:
            return [b.rounded(site.plain(b))]
        row = rows_of(b, site, before(b, site.input(0)), axes)
        lanes = LANES_OF_ALL if len(axes) == len(site.shape(0) or ()) else LANES
        total = lane_sum(b, row, lanes, combine=combine)
        if after == "Mean":
            total = b.low("Div", total, _count(b, row))
        elif after:
            total = b.low(after, total)
        return [b.op("Reshape", total, b.op("Shape", site.plain(b)))]

    return build


def _count(b: LowBuilder, row: TermRows) -> str:
    """Return the length of rows in the low type, which may round it, or make it infinite."""
    if row.length is not None:
        return b.number(row.length)
    size = b.picked(b.op("Shape", row.name), 1, 1, 0)
    return b.rounded(b.op("Cast", size, to=DType.FLOAT.code))


REDUCTIONS: dict[str, Recipe] = {
    "ReduceL1": reduction(lambda b, x: b.op("Abs", x)),
    "ReduceL2": reduction(_squared, "Sqrt"),
    "ReduceLogSum": reduction(after="Log"),
    "ReduceLogSumExp": reduction(lambda b, x: b.low("Exp", x), "Log"),
    "ReduceMean": reduction(after="Mean"),
    "ReduceProd": reduction(combine="Mul"),
    "ReduceSum": reduction(),
    "ReduceSumSquare": reduction(_squared),
}


def log_softmax(b: LowBuilder, site: LowOp) -> list[str] | None:
    """LogSoftmax: the ops of its function body, each rounded."""
    shape = site.shape(0)
    if shape is None or site.op.signature is None or site.op.signature.since < FIRST_ROW_SOFTMAX:
        return None
    axis = site.attribute("axis", -1) % len(shape)
    top = b.reduce("ReduceMax", site.input(0), [axis], keepdims=True)
    shifted = b.low("Sub", site.input(0), top)
    total = lane_sum(b, rows_of(b, site, low_exp(b, shifted), [axis]), LANES)
    return [b.low("Sub", shifted, low_log(b, b.op("Reshape", total, b.op("Shape", top))))]


def softmax(b: LowBuilder, site: LowOp) -> list[str] | None:
    """Softmax: each of 64 lanes keeps a largest value and a sum relative to it; a tree merges both."""
    shape = site.shape(0)
    if shape is None or not shape:
        return None
    flat = site.op.signature is not None and site.op.signature.since < FIRST_ROW_SOFTMAX
    axis = site.attribute("axis", 1 if flat else -1) % len(shape)
    axes = list(range(axis, len(shape))) if flat else [axis]
    row = rows_of(b, site, site.input(0), axes)
    width = next((w for w in (4, 2) if row.length is None or row.length % w == 0), 1)
    parts = b.shaped(filled(b, row, LANES * width, -np.inf), [0, -1, LANES, width])
    lane = b.reduce("ReduceMax", parts, [1, 3], keepdims=False)
    states = [b.zeros_like(lane, -65504.0), b.zeros_like(lane)]
    tops, sums = b.scan(states, [(parts, 1)], _gathered(width), 2)
    left = LANES // 2
    while left:
        halves = [(b.picked(value, 0, left, 1), b.picked(value, left, left, 1)) for value in (tops, sums)]
        tops, sums = _merged(b, *halves)
        left //= 2
    shifted = b.low("Sub", row.name, tops)
    result = b.low("Div", low_exp(b, shifted), sums)
    kept = [a for a in range(len(shape)) if a not in axes]
    order = [*kept, *axes]
    moved = b.op("Transpose", site.input(0), perm=order) if order != sorted(order) else site.input(0)
    result = b.op("Reshape", result, b.op("Shape", moved))
    back = [order.index(a) for a in range(len(order))]
    return [b.op("Transpose", result, perm=back) if order != sorted(order) else result]


def _gathered(width: int) -> Step:
    def step(b: LowBuilder, states: list[str], parts: list[str]) -> list[str]:
        top, total = states
        highest = b.op("Max", top, b.reduce("ReduceMax", parts[0], [2], keepdims=False))
        added = b.summed(low_exp(b, b.low("Sub", parts[0], b.shaped(highest, [0, 0, 1]))), width)
        scaled = b.low("Mul", total, low_exp(b, b.low("Sub", top, highest)))
        return [highest, b.low("Add", scaled, added)]

    return step


def _merged(b: LowBuilder, tops: tuple[str, str], sums: tuple[str, str]) -> tuple[str, str]:
    highest = b.op("Max", *tops)
    parts = [b.low("Mul", s, low_exp(b, b.low("Sub", t, highest))) for t, s in zip(tops, sums, strict=True)]
    return highest, b.low("Add", *parts)


def global_average_pool(b: LowBuilder, site: LowOp) -> list[str] | None:
    """GlobalAveragePool: 128 lanes, and a division in the low type."""
    shape = site.shape(0)
    if shape is None or len(shape) < 3:
        return None
    row = rows_of(b, site, site.input(0), list(range(2, len(shape))))
    mean = b.low("Div", lane_sum(b, row, LANES_OF_POOL, whole=True), _count(b, row))
    return [b.op("Reshape", mean, b.op("Shape", site.plain(b)))]


def average_pool(b: LowBuilder, site: LowOp) -> list[str] | None:
    """AveragePool: the values of a window in order, and a division in the low type."""
    shape, kernel = site.shape(0), tuple(site.attribute("kernel_shape", ()))
    if shape is None or len(shape) < 3 or shape[1] is None or site.attribute("ceil_mode", 0):
        return None
    channels, taps = shape[1], prod(kernel)
    plain = site.plain(b)
    parts = b.shaped(taken_apart(b, site, channels, kernel), [0, channels, taps, -1])
    start = b.zeros_like(b.shaped(plain, [0, channels, -1]))
    total = b.op("Reshape", b.scan([start], [(parts, 2)], folding("Add"), 3)[0], b.op("Shape", plain))
    if site.attribute("count_include_pad", 0):
        return [b.low("Div", total, b.number(taps))]
    kept = site.attributes("ceil_mode", "count_include_pad")
    every = b.constant(np.ones((channels, 1, *kernel), np.float32))
    count = b.op("Conv", b.zeros_like(site.input(0), 1.0), every, **kept, group=channels)
    return [b.low("Div", total, count)]


def cum_sum(b: LowBuilder, site: LowOp) -> list[str] | None:
    """CumSum in order; one in reverse starts anew for each result, and is left to float32."""
    shape, axis = site.shape(0), site.value(1)
    if shape is None or axis is None or site.attribute("reverse", 0):
        return None
    along = int(np.asarray(axis).reshape(-1)[0]) % len(shape)
    exclusive = bool(site.attribute("exclusive", 0))

    def step(body: LowBuilder, states: list[str], parts: list[str]) -> list[str]:
        total = body.low("Add", states[0], parts[0])
        return [total, states[0] if exclusive else total]

    first = b.op("Gather", site.input(0), b.constant(np.array(0, np.int64)), axis=along)
    _, sums = b.scan([b.zeros_like(first)], [(site.input(0), along)], step, len(shape) - 1)
    order = [*range(1, along + 1), 0, *range(along + 1, len(shape))]
    return [b.op("Transpose", sums, perm=order) if along else sums]
