"""Ops whose CUDA kernels in onnxruntime round to the low type between their steps: sums of rows, means, norms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.attributes import float_attribute, int_attribute
from amp_rewrite.ir.dataflow import axes_of, number
from amp_rewrite.ir.op_classes import RECURRENT
from amp_rewrite.ir.shapes import Shape, elements
from amp_rewrite.rewrite.device_arithmetic.low_op import LowBuilder, LowOp, Recipe
from amp_rewrite.rewrite.device_arithmetic.recurrent import layer

_WARP, _THREADS, _BLOCKS, _LOADS = 32, 512, 512, 4
"""Of a sum over leading axes: columns and threads of a block, blocks of a grid, rows that a thread loads, at most."""


def conv(b: LowBuilder, site: LowOp) -> list[str] | None:
    """Conv with a bias: the sum is rounded before the bias is added."""
    weight = site.shape(1)
    if not site.input(2) or weight is None:
        return None
    total = b.low("Conv", *site.inputs[:2], **site.attributes())
    return [b.low("Add", total, b.shaped(site.input(2), [-1, *[1] * (len(weight) - 2)]))]


def instance_norm(b: LowBuilder, site: LowOp) -> list[str] | None:
    """InstanceNormalization of several samples: statistics in float32, then each step rounded.

    That of one sample is a batch norm, in float32 inside. A run tells how many samples there are, if no shape does.
    """
    shape = site.shape(0)
    if shape is None or len(shape) < 3 or shape[0] == 1:
        return None
    x, axes = site.input(0), list(range(2, len(shape)))
    scale, bias = (b.shaped(site.input(slot), [-1, *[1] * len(axes)]) for slot in (1, 2))
    mean = b.reduce("ReduceMean", x, axes, keepdims=True)
    apart = b.op("Sub", x, mean)
    variance = b.reduce("ReduceMean", b.op("Mul", apart, apart), axes, keepdims=True)
    deviation = b.low(
        "Sqrt", b.low("Add", variance, b.scalar(float_attribute(site.node, "epsilon", 1e-5), DType.FLOAT))
    )
    scaled = b.low("Mul", scale, b.low("Sub", x, b.rounded(mean)))
    result = b.low("Add", b.low("Div", scaled, deviation), bias)
    if shape[0] is None:
        alone = b.op("Equal", b.picked(b.op("Shape", x), 0, 1, 0), b.ints([1]))
        result = b.op("Where", alone, b.rounded(b.like(site.node, site.inputs)[0]), result)
    return [result]


def cum_sum(b: LowBuilder, site: LowOp) -> list[str] | None:
    """CumSum in order; one in reverse starts anew for each result, and is left to float32."""
    shape, axis = site.shape(0), number(site.view, site.op.inputs[1])
    if shape is None or axis is None or int_attribute(site.node, "reverse", 0):
        return None
    along = int(axis) % len(shape)
    exclusive = int_attribute(site.node, "exclusive", 0)

    def step(body: LowBuilder, states: list[str], parts: list[str]) -> list[str]:
        total = body.low("Add", states[0], parts[0])
        return [total, states[0] if exclusive else total]

    first = b.op("Gather", site.input(0), b.constant(np.array(0, np.int64)), axis=along)
    _, sums = b.scan([b.zeros(b.op("Shape", first))], [(site.input(0), along)], step, len(shape) - 1)
    order = [*range(1, along + 1), 0, *range(along + 1, len(shape))]
    return [b.op("Transpose", sums, perm=order) if along else sums]


def log_sum(b: LowBuilder, site: LowOp) -> list[str] | None:
    """ReduceLogSum: the sum is rounded."""
    axes = _reduced_axes(site)
    if not axes:
        return None
    total = b.rounded(b.reduce("ReduceSum", site.input(0), axes, keepdims=_kept(site)))
    return [b.low("Log", total)]


def log_sum_exp(b: LowBuilder, site: LowOp) -> list[str] | None:
    """ReduceLogSumExp: the largest value is subtracted first and added last, each step rounded."""
    axes, x = _reduced_axes(site), site.input(0)
    if not axes:
        return None
    powers = b.low("Exp", b.low("Sub", x, b.reduce("ReduceMax", x, axes, keepdims=True)))
    total = b.rounded(b.reduce("ReduceSum", powers, axes, keepdims=_kept(site)))
    return [b.low("Add", b.low("Log", total), b.reduce("ReduceMax", x, axes, keepdims=_kept(site)))]


def _reduced_axes(site: LowOp) -> list[int]:
    """Return the axes of a reduction; an empty list if they are not known, or none is reduced."""
    shape, axes = site.shape(0), axes_of(site.view, site.op)
    if shape is None or (not axes and (site.input(1) or int_attribute(site.node, "noop_with_empty_axes", 0))):
        return []
    return sorted({axis % len(shape) for axis in axes or range(len(shape))})


def _kept(site: LowOp) -> bool:
    return bool(int_attribute(site.node, "keepdims", 1))


def matrix_sum(b: LowBuilder, site: LowOp) -> list[str] | None:
    """ReduceSum and ReduceMean over leading or trailing axes: a rounded sum, which a mean divides by a rounded count.

    Over leading axes, blocks of rows add up in the low type. The device adds a block when it ends; here the last comes
    first. Over other axes a library sums in float32.
    """
    shape, axes = site.shape(0), _reduced_axes(site)
    if shape is None or not axes:
        return None
    taken = [axis in axes for axis, size in enumerate(shape) if size != 1]
    leads, trails = taken == sorted(taken, reverse=True), taken == sorted(taken)
    if not any(taken) or not (leads or trails):
        return None
    blocks, height = _grid(shape, axes) if leads else (1, 1)
    mean = site.op.op_type == "ReduceMean"
    if blocks == 1 and not mean:
        return None
    plain = b.reduce("ReduceSum", site.input(0), axes, keepdims=_kept(site))
    total = b.rounded(plain) if blocks == 1 else _by_blocks(b, site, axes, (blocks, height))
    if blocks > 1:
        total = b.op("Reshape", total, b.op("Shape", plain))
    return [b.low("Div", total, _count(b, site, axes)) if mean else total]


def _grid(shape: Shape, axes: Sequence[int]) -> tuple[int, int]:
    """Return how many blocks of rows a sum over leading axes has, and how many rows are neighbors in a block."""
    m, n = (elements([size for axis, size in enumerate(shape) if (axis in axes) is led]) for led in (True, False))
    if m is None or n is None:
        return 1, 1
    width = _power_above(min(n, _WARP))
    height = _power_above(min(_THREADS // width, m // _LOADS))
    across = max(1, min(n // width, _BLOCKS))
    return max(1, min(_BLOCKS // across, m // height // _LOADS)), height


def _power_above(number: int) -> int:
    return 1 << (max(1, number) - 1).bit_length()


def _by_blocks(b: LowBuilder, site: LowOp, axes: Sequence[int], grid: tuple[int, int]) -> str:
    """Return a sum over leading axes: rows go to blocks in turn, blocks add up in float32, and then in the low type."""
    rows = elements([(site.shape(0) or ())[axis] for axis in axes])
    assert rows is not None, "a grid of blocks is that of a known number of rows"
    blocks, height = grid
    turned = b.op("Transpose", b.shaped(site.input(0), [rows, -1]), perm=[1, 0])
    parts = b.shaped(b.filled(turned, rows, blocks * height), [0, -1, blocks, height])
    sums = b.rounded(b.reduce("ReduceSum", parts, [1, 3], keepdims=False))
    backward = b.op("Gather", sums, b.ints(range(blocks)[::-1]), axis=1)
    start = b.zeros(b.op("Shape", b.picked(sums, 0, 1, 1)))

    def added(body: LowBuilder, states: list[str], parts: list[str]) -> list[str]:
        return [body.low("Add", states[0], parts[0])]

    return b.scan([start], [(b.unsqueeze(backward, [1]), 2)], added, 2)[0]


def _count(b: LowBuilder, site: LowOp, axes: Sequence[int]) -> str:
    count = elements([(site.shape(0) or ())[axis] for axis in axes])
    if count is not None:
        return b.number(count)
    found = b.op("Gather", b.op("Shape", site.input(0)), b.ints(axes), axis=0)
    return b.rounded(b.op("Cast", b.reduce("ReduceProd", found, [0], keepdims=False), to=DType.FLOAT.code))


# -- functions of one value ------------------------------------------------------------------------


def softplus(b: LowBuilder, site: LowOp) -> list[str]:
    """A logarithm of one plus an exponential, on the side where that does not overflow."""
    x, one = site.input(0), b.number(1.0)
    below = b.low("Log", b.low("Add", one, b.low("Exp", x)))
    above = b.low("Add", x, b.low("Log", b.low("Add", one, b.low("Exp", b.op("Neg", x)))))
    return [b.op("Where", b.op("Greater", x, b.number(0.0)), above, below)]


def hard_swish(b: LowBuilder, site: LowOp) -> list[str]:
    """A line between 0 and 1 whose slope is a quotient, times x."""
    x, one, zero = site.input(0), b.number(1.0), b.number(0.0)
    line = b.low("Add", b.low("Div", x, b.number(6.0)), b.number(0.5))
    return [b.low("Mul", x, b.op("Max", zero, b.op("Min", one, line)))]


def elu(b: LowBuilder, site: LowOp) -> list[str]:
    """An exponential less one below zero."""
    x, alpha = site.input(0), b.number(float_attribute(site.node, "alpha", 1.0))
    below = b.low("Mul", alpha, b.low("Sub", b.low("Exp", x), b.number(1.0)))
    return [b.op("Where", b.op("Less", x, b.number(0.0)), below, x)]


# -- operators without a kernel on the CPU -----------------------------------------------------------


def split_gelu(b: LowBuilder, site: LowOp) -> list[str] | None:
    """BiasSplitGelu: the sum is rounded, and the product of its halves."""
    width = (site.static(1) or (0,))[0]
    if not width:
        return None
    total = b.low("Add", *site.inputs)
    left, right = b.split(total, [width // 2, width // 2], -1, results=2)
    erf = b.op("Erf", b.op("Div", right, b.scalar(math.sqrt(2), DType.FLOAT)))
    half = b.op("Mul", right, b.scalar(0.5, DType.FLOAT))
    return [b.low("Mul", left, b.op("Mul", half, b.op("Add", erf, b.scalar(1, DType.FLOAT))))]


def group_norm(b: LowBuilder, site: LowOp) -> list[str]:
    """GroupNorm and SkipGroupNorm: sums are rounded, statistics are float32, the variance a difference of means."""
    stated = site.attributes()
    total, gamma, beta, skip, bias = (site.input(slot) for slot in range(5))
    if bias:
        total = b.low("Add", total, bias)
    if skip:
        flat = len(site.shape(3) or ()) == 2
        total = b.low("Add", total, b.shaped(skip, [0, 1, 1, -1]) if flat else skip)
    apart = b.shaped(total, [0, 0, 0, stated["groups"], -1])
    mean = b.reduce("ReduceMean", apart, [1, 2, 4], keepdims=True)
    squares = b.reduce("ReduceMean", b.op("Mul", apart, apart), [1, 2, 4], keepdims=True)
    variance = b.op("Sub", squares, b.op("Mul", mean, mean))
    deviation = b.op("Sqrt", b.op("Add", variance, b.scalar(stated.get("epsilon", 1e-5), DType.FLOAT)))
    normal = b.op("Reshape", b.op("Div", b.op("Sub", apart, mean), deviation), b.op("Shape", total))
    y = b.op("Add", b.op("Mul", normal, gamma), beta)
    return [b.rounded(b.op("Mul", y, b.op("Sigmoid", y)) if stated["activation"] else y), total]


# -- the recipes -----------------------------------------------------------------------------------


CUDA_ALONE: Mapping[str, Recipe] = {
    "com.microsoft::BiasSplitGelu": split_gelu,
    "com.microsoft::GroupNorm": group_norm,
    "com.microsoft::SkipGroupNorm": group_norm,
}
"""Recipes of operators that no float32 kernel of the CPU stands for."""
CUDA: Mapping[str, Recipe] = {
    **CUDA_ALONE,
    **dict.fromkeys(RECURRENT, layer),
    **dict.fromkeys(("ReduceMean", "ReduceSum"), matrix_sum),
    "Conv": conv,
    "CumSum": cum_sum,
    "Elu": elu,
    "HardSwish": hard_swish,
    "InstanceNormalization": instance_norm,
    "ReduceLogSum": log_sum,
    "ReduceLogSumExp": log_sum_exp,
    "Softplus": softplus,
}
"""Recipes by kind of op, after the kernels of onnxruntime's CUDA provider 1.31.1; other ops are float32 inside."""
