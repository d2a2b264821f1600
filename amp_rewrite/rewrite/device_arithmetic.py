"""Expansion of float16 ops into the steps of onnxruntime's CUDA kernels, with rounding in between."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from onnx import NodeProto

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.attributes import float_attribute, int_attribute
from amp_rewrite.ir.dataflow import number, reduction_axes
from amp_rewrite.ir.op_classes import RECURRENT
from amp_rewrite.ir.shapes import Shape, elements
from amp_rewrite.ir.view import Op, View
from amp_rewrite.rewrite.rounding_builder import EmulatedOp, Recipe, RoundingBuilder

_WARP, _THREADS, _BLOCKS, _LOADS = 32, 512, 512, 4
"""Limits of CUDA's sum over leading axes: columns per block, threads per block, blocks per grid, rows per thread."""


# -- sums, means and norms ----------------------------------------------------------------------------


def conv(b: RoundingBuilder, source: EmulatedOp) -> list[str] | None:
    """Expand a Conv with a bias: the sum is rounded before the bias is added."""
    weight = source.shape(1)
    if not source.input(2) or weight is None:
        return None
    total = b.low("Conv", *source.node.input[:2], **source.attributes())
    return [b.low("Add", total, b.reshaped(source.input(2), [-1, *[1] * (len(weight) - 2)]))]


def instance_norm(b: RoundingBuilder, source: EmulatedOp) -> list[str] | None:
    """Expand an InstanceNormalization of several samples: statistics in float32, then each step rounded.

    For a single sample, onnxruntime runs its batch norm kernel, in float32. If the number of samples is unknown, it is
    tested at run time.
    """
    shape = source.shape(0)
    if shape is None or len(shape) < 3 or shape[0] == 1:
        return None
    x, axes = source.input(0), list(range(2, len(shape)))
    scale, bias = (b.reshaped(source.input(slot), [-1, *[1] * len(axes)]) for slot in (1, 2))
    mean = b.reduce("ReduceMean", x, axes, keepdims=True)
    centered = b.op("Sub", x, mean)
    variance = b.reduce("ReduceMean", b.op("Mul", centered, centered), axes, keepdims=True)
    epsilon = b.scalar(float_attribute(source.node, "epsilon", 1e-5), DType.FLOAT)
    deviation = b.low("Sqrt", b.low("Add", variance, epsilon))
    scaled = b.low("Mul", scale, b.low("Sub", x, b.rounded(mean)))
    result = b.low("Add", b.low("Div", scaled, deviation), bias)
    if shape[0] is None:
        single = b.op("Equal", b.slice(b.op("Shape", x), 0, 1, 0), b.ints([1]))
        result = b.op("Where", single, b.rounded(b.like(source.node, source.node.input)[0]), result)
    return [result]


def cum_sum(b: RoundingBuilder, source: EmulatedOp) -> list[str] | None:
    """Expand a CumSum in forward order. In reverse, the kernel starts a new float32 sum for each result."""
    shape, axis = source.shape(0), number(source.view, source.op.inputs[1])
    if shape is None or axis is None or int_attribute(source.node, "reverse", 0):
        return None
    along = int(axis) % len(shape)
    exclusive = int_attribute(source.node, "exclusive", 0)

    def step(body: RoundingBuilder, states: list[str], parts: list[str]) -> list[str]:
        total = body.low("Add", states[0], parts[0])
        return [total, states[0] if exclusive else total]

    first = b.op("Gather", source.input(0), b.constant(np.array(0, np.int64)), axis=along)
    _, sums = b.scan([b.zeros(b.op("Shape", first))], [(source.input(0), along)], step, len(shape) - 1)
    order = [*range(1, along + 1), 0, *range(along + 1, len(shape))]
    return [b.op("Transpose", sums, perm=order) if along else sums]


def log_sum(b: RoundingBuilder, source: EmulatedOp) -> list[str] | None:
    """Expand a ReduceLogSum: the sum is rounded."""
    axes = _reduced_axes(source)
    if not axes:
        return None
    return [b.low("Log", b.rounded(b.reduce("ReduceSum", source.input(0), axes, keepdims=_keepdims(source))))]


def log_sum_exp(b: RoundingBuilder, source: EmulatedOp) -> list[str] | None:
    """Expand a ReduceLogSumExp: the maximum is subtracted first and added last, with each step rounded."""
    axes, x = _reduced_axes(source), source.input(0)
    if not axes:
        return None
    powers = b.low("Exp", b.low("Sub", x, b.reduce("ReduceMax", x, axes, keepdims=True)))
    total = b.rounded(b.reduce("ReduceSum", powers, axes, keepdims=_keepdims(source)))
    return [b.low("Add", b.low("Log", total), b.reduce("ReduceMax", x, axes, keepdims=_keepdims(source)))]


def _reduced_axes(source: EmulatedOp) -> list[int]:
    """Return the axes of a reduction; an empty list if they are unknown or if there are none."""
    shape, axes = source.shape(0), reduction_axes(source.view, source.op)
    if shape is None or (not axes and (source.input(1) or int_attribute(source.node, "noop_with_empty_axes", 0))):
        return []
    return sorted({axis % len(shape) for axis in axes or range(len(shape))})


def _keepdims(source: EmulatedOp) -> bool:
    return bool(int_attribute(source.node, "keepdims", 1))


def matrix_sum(b: RoundingBuilder, source: EmulatedOp) -> list[str] | None:
    """Expand a ReduceSum or ReduceMean over leading or trailing axes.

    The sum is rounded; for a mean, it is divided by a rounded count. Over leading axes, the sums of blocks of rows are
    added in the low type. The device adds them in the order in which the blocks finish; this recipe adds the last block
    first. Over other axes, a library sums in float32.
    """
    shape, axes = source.shape(0), _reduced_axes(source)
    if shape is None or not axes:
        return None
    reduced = [axis in axes for axis, size in enumerate(shape) if size != 1]
    leading, trailing = reduced == sorted(reduced, reverse=True), reduced == sorted(reduced)
    if not any(reduced) or not (leading or trailing):
        return None
    blocks, height = _grid(shape, axes) if leading else (1, 1)
    mean = source.op.op_type == "ReduceMean"
    if blocks == 1 and not mean:
        return None
    unrounded = b.reduce("ReduceSum", source.input(0), axes, keepdims=_keepdims(source))
    rows = elements([shape[axis] for axis in axes])
    if blocks == 1:
        total = b.rounded(unrounded)
    else:
        assert rows is not None, "several blocks are only used for a known number of rows"
        total = b.op("Reshape", _blockwise_sum(b, source, rows, blocks, height), b.op("Shape", unrounded))
    if not mean:
        return [total]
    if rows is not None:
        return [b.low("Div", total, b.number(rows))]
    dims = b.op("Gather", b.op("Shape", source.input(0)), b.ints(axes), axis=0)
    count = b.op("Cast", b.reduce("ReduceProd", dims, [0], keepdims=False), to=DType.FLOAT.code)
    return [b.low("Div", total, b.rounded(count))]


def _grid(shape: Shape, axes: Sequence[int]) -> tuple[int, int]:
    """Return the number of blocks of a sum over leading axes, and the number of adjacent rows in a block."""
    rows = elements([size for axis, size in enumerate(shape) if axis in axes])
    columns = elements([size for axis, size in enumerate(shape) if axis not in axes])
    if rows is None or columns is None:
        return 1, 1
    width = _power_above(min(columns, _WARP))
    height = _power_above(min(_THREADS // width, rows // _LOADS))
    across = max(1, min(columns // width, _BLOCKS))
    return max(1, min(_BLOCKS // across, rows // height // _LOADS)), height


def _power_above(number: int) -> int:
    return 1 << (max(1, number) - 1).bit_length()


def _blockwise_sum(b: RoundingBuilder, source: EmulatedOp, rows: int, blocks: int, height: int) -> str:
    """Append a sum over leading axes: float32 sums of interleaved blocks of rows, added in the low type."""
    transposed = b.op("Transpose", b.reshaped(source.input(0), [rows, -1]), perm=[1, 0])
    parts = b.reshaped(b.zero_padded(transposed, rows, blocks * height), [0, -1, blocks, height])
    sums = b.rounded(b.reduce("ReduceSum", parts, [1, 3], keepdims=False))
    backward = b.op("Gather", sums, b.ints(range(blocks)[::-1]), axis=1)
    start = b.zeros(b.op("Shape", b.slice(sums, 0, 1, 1)))

    def added(body: RoundingBuilder, states: list[str], parts: list[str]) -> list[str]:
        return [body.low("Add", states[0], parts[0])]

    return b.scan([start], [(b.unsqueeze(backward, [1]), 2)], added, 2)[0]


# -- activations -----------------------------------------------------------------------------------


def softplus(b: RoundingBuilder, source: EmulatedOp) -> list[str]:
    """Expand a Softplus: log(1 + exp x), without overflow for either sign of x."""
    x, one = source.input(0), b.number(1.0)
    below = b.low("Log", b.low("Add", one, b.low("Exp", x)))
    above = b.low("Add", x, b.low("Log", b.low("Add", one, b.low("Exp", b.op("Neg", x)))))
    return [b.op("Where", b.op("Greater", x, b.number(0.0)), above, below)]


def hard_swish(b: RoundingBuilder, source: EmulatedOp) -> list[str]:
    """Expand a HardSwish: x times (x / 6 + 0.5) clipped to [0, 1], with a division for the slope."""
    x, one, zero = source.input(0), b.number(1.0), b.number(0.0)
    line = b.low("Add", b.low("Div", x, b.number(6.0)), b.number(0.5))
    return [b.low("Mul", x, b.op("Max", zero, b.op("Min", one, line)))]


def elu(b: RoundingBuilder, source: EmulatedOp) -> list[str]:
    """Expand an Elu: alpha (exp x − 1) below zero."""
    x, alpha = source.input(0), b.number(float_attribute(source.node, "alpha", 1.0))
    below = b.low("Mul", alpha, b.low("Sub", b.low("Exp", x), b.number(1.0)))
    return [b.op("Where", b.op("Less", x, b.number(0.0)), below, x)]


# -- recurrent cells as in cuDNN: each step is rounded, and products are rounded after every 16 terms --------

_TERMS = 16
"""Number of terms summed by a tensor core before rounding."""
_LENGTHS, _INITIAL_STATES, _PEEPHOLES = 4, 5, 7
_NEUTRAL: Mapping[str, object] = {
    "clip": 0.0,
    "input_forget": 0,
    "layout": 0,
    "activation_alpha": [],
    "activation_beta": [],
}
"""Unsupported attributes, with their neutral values."""


Formula = Callable[[RoundingBuilder, Sequence[Sequence[str]], Sequence[str]], list[str]]
"""Function to append a step of a cell and return the next states, the output first.

Its arguments are the builder, the terms of each gate, and the states. The terms are the products with the input and
with the state, and a bias for each product.
"""


class _Cell(NamedTuple):
    gates: int
    states: int
    activations: tuple[bytes, ...]
    formula: Formula


def _sigmoid(b: RoundingBuilder, x: str) -> str:
    one = b.number(1.0)
    return b.low("Div", one, b.low("Add", one, b.low("Exp", b.op("Neg", x))))


def _tanh(b: RoundingBuilder, x: str) -> str:
    """Append 2 sigmoid(2x) − 1, with 10 bits after the binary point for positive x."""
    two = b.number(2.0)
    return b.low("Sub", b.op("Mul", two, _sigmoid(b, b.low("Mul", two, x))), b.number(1.0))


def _multiply_add(b: RoundingBuilder, x: str, y: str, z: str) -> str:
    return b.low("Add", b.op("Mul", x, y), z)


def _lstm(b: RoundingBuilder, gates: Sequence[Sequence[str]], states: Sequence[str]) -> list[str]:
    i, o, f = (_sigmoid(b, b.total(*gate)) for gate in gates[:3])
    cell = _multiply_add(b, f, states[1], b.low("Mul", i, _tanh(b, b.total(*gates[3]))))
    return [b.low("Mul", o, _tanh(b, cell)), cell]


def _gru(b: RoundingBuilder, gates: Sequence[Sequence[str]], states: Sequence[str]) -> list[str]:
    """Append a step, with gates in the order z, r, h, and the reset after the product."""
    z, r = (_sigmoid(b, b.total(*gate)) for gate in gates[:2])
    outer, inner, outer_bias, inner_bias = gates[2]
    inner, outer = b.total(inner, inner_bias), b.total(outer, outer_bias)
    new = _tanh(b, _multiply_add(b, r, inner, outer))
    return [_multiply_add(b, b.low("Sub", b.number(1.0), z), new, b.low("Mul", z, states[0]))]


_CELLS = {
    "LSTM": _Cell(4, 2, (b"sigmoid", b"tanh", b"tanh"), _lstm),
    "GRU": _Cell(3, 1, (b"sigmoid", b"tanh"), _gru),
    "RNN": _Cell(1, 1, (b"tanh",), lambda b, gates, states: [_tanh(b, b.total(*gates[0]))]),
}


def recurrent_layer(b: RoundingBuilder, source: EmulatedOp) -> list[str] | None:
    """Expand an LSTM, RNN, or GRU with the reset after the product; with default activations and without lengths."""
    weights, recurrence, cell = source.static(1), source.static(2), _CELLS[source.op.op_type]
    unsupported_inputs = any(source.input(slot) for slot in (_LENGTHS, _PEEPHOLES))
    attributes = source.attributes()
    altered = any(_NEUTRAL.get(name, value) != value for name, value in attributes.items())
    reset_first = source.op.op_type == "GRU" and not attributes.get("linear_before_reset")
    if weights is None or recurrence is None or unsupported_inputs or altered or reset_first:
        return None
    defaults = [*cell.activations] * weights[0]
    if [name.lower() for name in attributes.get("activations", defaults)] != defaults:
        return None
    directions = [_direction(b, source, i, weights[2], recurrence[2]) for i in range(weights[0])]
    sequences, *states = zip(*directions, strict=True)
    return [_stacked(b, sequences, 1), *(_stacked(b, ends, 0) for ends in states)]


def _stacked(b: RoundingBuilder, parts: Sequence[str], axis: int) -> str:
    return b.op("Concat", *(b.unsqueeze(part, [axis]) for part in parts), axis=axis)


def _direction(b: RoundingBuilder, source: EmulatedOp, index: int, width: int, hidden: int) -> list[str]:
    """Append the Scan of one direction; return the outputs of all steps, then the last states."""
    cell, x = _CELLS[source.op.op_type], source.input(0)
    size, index_constant = cell.gates * hidden, b.constant(np.array(index, np.int64))
    steps, batch = (b.slice(b.op("Shape", x), axis, 1, 0) for axis in range(2))
    inputs = [source.input(slot) for slot in range(_INITIAL_STATES + cell.states)]
    slices = ["", *(b.op("Gather", name, index_constant, axis=0) if name else "" for name in inputs[1:])]
    product = _product(b, b.reshaped(x, [-1, width]), width, _blocks(b, slices[1], width, size), size)
    outer = b.op("Reshape", product, b.op("Concat", steps, batch, b.ints([size]), axis=0))
    recurrence = _blocks(b, slices[2], hidden, size)
    biases = [b.slice(slices[3], i * hidden, hidden, 0) if slices[3] else "" for i in range(2 * cell.gates)]

    def step(body: RoundingBuilder, states: list[str], parts: list[str]) -> list[str]:
        inner = _product(body, states[0], hidden, recurrence, size)
        gates = []
        for i in range(cell.gates):
            products = [body.slice(whole, i * hidden, hidden, 1) for whole in (parts[0], inner)]
            gates.append([*products, biases[i], biases[i + cell.gates]])
        updated = cell.formula(body, gates, states)
        return [*updated, updated[0]]

    backward = source.attributes().get("direction") == b"reverse" or index == 1
    initial = [state or b.zeros(batch, b.ints([hidden])) for state in slices[_INITIAL_STATES:]]
    *last, sequence = b.scan(initial, [(outer, 0)], step, 2, backward=backward)
    return [sequence, *last]


def _blocks(b: RoundingBuilder, weight: str, length: int, size: int) -> str:
    terms = b.op("Transpose", b.zero_padded(weight, length, _TERMS), perm=[1, 0])
    return b.reshaped(terms, [-1, _TERMS, size])


def _product(b: RoundingBuilder, rows: str, length: int, blocks: str, size: int) -> str:
    """Append rows times weights: each block of terms is summed in float32, and the blocks in the low type, in order."""
    parts = b.reshaped(b.zero_padded(rows, length, _TERMS), [0, -1, _TERMS])
    start = b.zeros(b.slice(b.op("Shape", rows), 0, 1, 0), b.ints([size]))

    def added(body: RoundingBuilder, states: list[str], parts: list[str]) -> list[str]:
        return [body.low("Add", states[0], body.op("MatMul", *parts))]

    return b.scan([start], [(parts, 1), (blocks, 0)], added, 2)[0]


# -- operators without a kernel on the CPU -----------------------------------------------------------


def split_gelu(b: RoundingBuilder, source: EmulatedOp) -> list[str] | None:
    """Expand a BiasSplitGelu: the sum and the product of its halves are rounded."""
    width = (source.static(1) or (0,))[0]
    if not width:
        return None
    total = b.low("Add", *source.node.input)
    left, right = b.split(total, [width // 2, width // 2], -1, results=2)
    erf = b.op("Erf", b.op("Div", right, b.scalar(math.sqrt(2), DType.FLOAT)))
    half = b.op("Mul", right, b.scalar(0.5, DType.FLOAT))
    return [b.low("Mul", left, b.op("Mul", half, b.op("Add", erf, b.scalar(1, DType.FLOAT))))]


def group_norm(b: RoundingBuilder, source: EmulatedOp) -> list[str]:
    """Expand a GroupNorm or SkipGroupNorm, with rounded sums and float32 statistics: var x = mean x² − (mean x)²."""
    attributes = source.attributes()
    x, gamma, beta, skip, bias = (source.input(slot) for slot in range(5))
    if skip and len(source.shape(3) or ()) == 2:
        skip = b.reshaped(skip, [0, 1, 1, -1])
    total = b.total(x, bias, skip)
    grouped = b.reshaped(total, [0, 0, 0, attributes["groups"], -1])
    mean = b.reduce("ReduceMean", grouped, [1, 2, 4], keepdims=True)
    squares = b.reduce("ReduceMean", b.op("Mul", grouped, grouped), [1, 2, 4], keepdims=True)
    variance = b.op("Sub", squares, b.op("Mul", mean, mean))
    deviation = b.op("Sqrt", b.op("Add", variance, b.scalar(attributes.get("epsilon", 1e-5), DType.FLOAT)))
    normal = b.op("Reshape", b.op("Div", b.op("Sub", grouped, mean), deviation), b.op("Shape", total))
    y = b.op("Add", b.op("Mul", normal, gamma), beta)
    return [b.rounded(b.op("Mul", y, b.op("Sigmoid", y)) if attributes["activation"] else y), total]


# -- the recipes -----------------------------------------------------------------------------------


CUDA_ONLY: Mapping[str, Recipe] = {
    "com.microsoft::BiasSplitGelu": split_gelu,
    "com.microsoft::GroupNorm": group_norm,
    "com.microsoft::SkipGroupNorm": group_norm,
}
"""Recipes of operators without a CPU kernel."""
CUDA: Mapping[str, Recipe] = {
    **CUDA_ONLY,
    **dict.fromkeys(RECURRENT, recurrent_layer),
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
"""Recipes by kind of op, modeled on the kernels of onnxruntime 1.31.1's CUDA provider; other kernels use float32."""


def expanded(
    view: View, recipe: Recipe, op: Op, node: NodeProto, taken: set[str], low_type: DType | None
) -> tuple[list[NodeProto], list[str]] | None:
    """Expand an op; return the nodes and the names of its results, or None if its kernel computes in float32.

    `node` is the op with the twin's inputs. The names of the new nodes are added to `taken`.
    """
    builder = RoundingBuilder(taken, opset=view.opset, region=op.name)
    builder.low_type = low_type
    results = recipe(builder, EmulatedOp(view, op, node))
    return None if results is None else (builder.nodes, results)
