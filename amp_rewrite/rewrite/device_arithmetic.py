"""Float16 ops of a twin, written out as CUDA kernels of onnxruntime compute them: rounded between their steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import numpy as np
import onnx.helper
from onnx import NodeProto

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.attributes import float_attribute, int_attribute
from amp_rewrite.ir.dataflow import axes_of, number
from amp_rewrite.ir.op_classes import RECURRENT
from amp_rewrite.ir.shapes import Shape, elements, shape_of
from amp_rewrite.ir.view import Op, View
from amp_rewrite.rewrite.builder import declared
from amp_rewrite.rewrite.node_builder import NodeBuilder

_WARP, _THREADS, _BLOCKS, _LOADS = 32, 512, 512, 4
"""Of a sum over leading axes: columns and threads of a block, blocks of a grid, rows that a thread loads, at most."""


class LowBuilder(NodeBuilder):
    """A builder of float32 nodes with each result rounded to a low type; without one, to none."""

    low_type: DType | None = DType.FLOAT16

    def rounded(self, x: str) -> str:
        """Append Casts to the low type and back."""
        if self.low_type is None:
            return x
        return self.op("Cast", self.op("Cast", x, to=self.low_type.code), to=DType.FLOAT.code)

    def low(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Append an op and round its result."""
        return self.rounded(self.op(op_type, *inputs, **attributes))

    def number(self, value: float) -> str:
        """Return a constant, rounded as by float16."""
        with np.errstate(over="ignore"):
            return self.constant(np.array(value, DType.FLOAT16.numpy).astype(np.float32))

    def shaped(self, x: str, dims: Sequence[int]) -> str:
        """Append a Reshape in which 0 copies the dimension of the input, and -1 takes what is left."""
        return self.op("Reshape", x, self.ints(dims))

    def zeros(self, *sizes: str) -> str:
        """Return zeros of a shape that is made of these lists of sizes."""
        shape = self.op("Concat", *sizes, axis=0) if len(sizes) > 1 else sizes[0]
        return self.full(shape, 0.0, DType.FLOAT)

    def picked(self, x: str, first: int, count: int, axis: int) -> str:
        """Return `count` neighbors along an axis, from `first` on."""
        return self.op("Gather", x, self.ints(range(first, first + count)), axis=axis)

    def filled(self, x: str, length: int, width: int) -> str:
        """Return rows of a known length, filled up with zeros to a multiple of the width."""
        if length % width == 0:
            return x
        rows = self.picked(self.op("Shape", x), 0, 1, 0)
        return self.op("Concat", x, self.zeros(rows, self.ints([-length % width])), axis=1)

    def scan(
        self, states: Sequence[str], parts: Sequence[tuple[str, int]], step: Step, rank: int, *, backward: bool = False
    ) -> list[str]:
        """Append a Scan over slices of `parts`, each a value and the axis along which it is cut.

        `step` gets a builder of the body, the states and the slices; it returns the next states, all of one rank, and
        behind them values of that rank, of which the Scan stacks those of all steps along axis 0. `backward`: from the
        last slice to the first, stacked in the order of the slices.
        """
        inner = LowBuilder(self._taken, opset=self.opset, region=f"{self._region}/step")
        names = [inner.fresh(f"{inner._region}/in") for _ in (*states, *parts)]
        results = step(inner, names[: len(states)], names[len(states) :])
        for slot, result in enumerate(results):  # an output of a body is made in it, and once
            results[slot] = inner.fresh(f"{inner._region}/out")
            inner.name(result, results[slot])
        read = [declared(name, DType.FLOAT, None) for name in names]
        ends = [declared(name, DType.FLOAT, [None] * rank) for name in results]  # onnxruntime wants the rank
        body = onnx.helper.make_graph(inner.nodes, "step", read, ends)
        inputs, axes = (*states, *(name for name, _ in parts)), [axis for _, axis in parts]
        stated: dict[str, Any] = {"body": body, "num_scan_inputs": len(parts), "scan_input_axes": axes}
        if backward:
            stated["scan_input_directions"] = [1] * len(parts)
            stated["scan_output_directions"] = [1] * (len(results) - len(states))
        return list(self.ops("Scan", *inputs, results=len(results), **stated))


Step = Callable[[LowBuilder, list[str], list[str]], list[str]]
"""One step of a Scan: from states and slices to the next states and stacked values."""


@dataclass(frozen=True, slots=True)
class LowOp:
    """A float16 op, and its node with the float32 inputs of the twin."""

    view: View
    op: Op
    node: NodeProto

    def input(self, slot: int) -> str:
        """Return the name of an input, "" if it is absent."""
        return self.node.input[slot] if slot < len(self.node.input) else ""

    def shape(self, slot: int) -> Shape | None:
        return shape_of(self.view, self.op.inputs[slot])

    def static(self, slot: int) -> tuple[int, ...] | None:
        """Return the shape of an input, all dimensions of which are numbers; None for another one."""
        shape = self.shape(slot)
        return None if shape is None or None in shape else tuple(d for d in shape if d is not None)

    def attributes(self) -> dict[str, Any]:
        """Return the node's attributes as keywords."""
        return {a.name: onnx.helper.get_attribute_value(a) for a in self.node.attribute}


Recipe = Callable[[LowBuilder, LowOp], "list[str] | None"]
"""Nodes of one op as a kernel computes it: its outputs, each of float16 values; None if shapes are unknown."""


# -- sums, means and norms ----------------------------------------------------------------------------


def conv(b: LowBuilder, site: LowOp) -> list[str] | None:
    """Conv with a bias: the sum is rounded before the bias is added."""
    weight = site.shape(1)
    if not site.input(2) or weight is None:
        return None
    total = b.low("Conv", *site.node.input[:2], **site.attributes())
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
        result = b.op("Where", alone, b.rounded(b.like(site.node, site.node.input)[0]), result)
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
    return [b.low("Log", b.rounded(b.reduce("ReduceSum", site.input(0), axes, keepdims=_kept(site))))]


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
    rows = elements([shape[axis] for axis in axes])
    if blocks == 1:
        total = b.rounded(plain)
    else:
        assert rows is not None, "a grid of blocks is that of a known number of rows"
        total = b.op("Reshape", _by_blocks(b, site, rows, blocks, height), b.op("Shape", plain))
    if not mean:
        return [total]
    if rows is not None:
        return [b.low("Div", total, b.number(rows))]
    found = b.op("Gather", b.op("Shape", site.input(0)), b.ints(axes), axis=0)
    count = b.op("Cast", b.reduce("ReduceProd", found, [0], keepdims=False), to=DType.FLOAT.code)
    return [b.low("Div", total, b.rounded(count))]


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


def _by_blocks(b: LowBuilder, site: LowOp, rows: int, blocks: int, height: int) -> str:
    """Return a sum over leading axes: rows go to blocks in turn, blocks add up in float32, and then in the low type."""
    turned = b.op("Transpose", b.shaped(site.input(0), [rows, -1]), perm=[1, 0])
    parts = b.shaped(b.filled(turned, rows, blocks * height), [0, -1, blocks, height])
    sums = b.rounded(b.reduce("ReduceSum", parts, [1, 3], keepdims=False))
    backward = b.op("Gather", sums, b.ints(range(blocks)[::-1]), axis=1)
    start = b.zeros(b.op("Shape", b.picked(sums, 0, 1, 1)))

    def added(body: LowBuilder, states: list[str], parts: list[str]) -> list[str]:
        return [body.low("Add", states[0], parts[0])]

    return b.scan([start], [(b.unsqueeze(backward, [1]), 2)], added, 2)[0]


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
    total = b.low("Add", *site.node.input)
    left, right = b.split(total, [width // 2, width // 2], -1, results=2)
    erf = b.op("Erf", b.op("Div", right, b.scalar(math.sqrt(2), DType.FLOAT)))
    half = b.op("Mul", right, b.scalar(0.5, DType.FLOAT))
    return [b.low("Mul", left, b.op("Mul", half, b.op("Add", erf, b.scalar(1, DType.FLOAT))))]


def group_norm(b: LowBuilder, site: LowOp) -> list[str]:
    """GroupNorm and SkipGroupNorm: sums are rounded, statistics are float32, the variance a difference of means."""
    stated = site.attributes()
    x, gamma, beta, skip, bias = (site.input(slot) for slot in range(5))
    if skip and len(site.shape(3) or ()) == 2:
        skip = b.shaped(skip, [0, 1, 1, -1])
    total = _total(b, x, bias, skip)
    apart = b.shaped(total, [0, 0, 0, stated["groups"], -1])
    mean = b.reduce("ReduceMean", apart, [1, 2, 4], keepdims=True)
    squares = b.reduce("ReduceMean", b.op("Mul", apart, apart), [1, 2, 4], keepdims=True)
    variance = b.op("Sub", squares, b.op("Mul", mean, mean))
    deviation = b.op("Sqrt", b.op("Add", variance, b.scalar(stated.get("epsilon", 1e-5), DType.FLOAT)))
    normal = b.op("Reshape", b.op("Div", b.op("Sub", apart, mean), deviation), b.op("Shape", total))
    y = b.op("Add", b.op("Mul", normal, gamma), beta)
    return [b.rounded(b.op("Mul", y, b.op("Sigmoid", y)) if stated["activation"] else y), total]


# -- LSTM, GRU and RNN of cuDNN: products add up 16 terms at a time, and each step of a cell rounds -----

_TERMS = 16
"""Terms that a tensor core adds up before it rounds."""
_LENGTHS, _STATES, _PEEPHOLES = 4, 5, 7
_PLAIN: Mapping[str, object] = {
    "clip": 0.0,
    "input_forget": 0,
    "layout": 0,
    "activation_alpha": [],
    "activation_beta": [],
}
"""Attributes that the arithmetic does not cover, with the value that changes nothing."""


Formula = Callable[[LowBuilder, Sequence[Sequence[str]], Sequence[str]], list[str]]
"""The next states of a cell, its output first.

Given are, for each gate, the products with the input and with the state, and the biases of both; and the states.
"""


class _Cell(NamedTuple):
    gates: int
    states: int
    activations: tuple[bytes, ...]
    formula: Formula


def _total(b: LowBuilder, *terms: str) -> str:
    return reduce(partial(b.low, "Add"), filter(None, terms))


def _sigmoid(b: LowBuilder, x: str) -> str:
    one = b.number(1.0)
    return b.low("Div", one, b.low("Add", one, b.low("Exp", b.op("Neg", x))))


def _tanh(b: LowBuilder, x: str) -> str:
    """Twice a sigmoid of 2x, less one: positive results have 10 bits behind the point."""
    two = b.number(2.0)
    return b.low("Sub", b.op("Mul", two, _sigmoid(b, b.low("Mul", two, x))), b.number(1.0))


def _fused(b: LowBuilder, x: str, y: str, z: str) -> str:
    return b.low("Add", b.op("Mul", x, y), z)


def _lstm(b: LowBuilder, gates: Sequence[Sequence[str]], states: Sequence[str]) -> list[str]:
    i, o, f = (_sigmoid(b, _total(b, *gate)) for gate in gates[:3])
    cell = _fused(b, f, states[1], b.low("Mul", i, _tanh(b, _total(b, *gates[3]))))
    return [b.low("Mul", o, _tanh(b, cell)), cell]


def _gru(b: LowBuilder, gates: Sequence[Sequence[str]], states: Sequence[str]) -> list[str]:
    """Gates in the order z, r, h; the reset applies after the product."""
    z, r = (_sigmoid(b, _total(b, *gate)) for gate in gates[:2])
    outer, inner, outer_bias, inner_bias = gates[2]
    inner, outer = _total(b, inner, inner_bias), _total(b, outer, outer_bias)
    new = _tanh(b, _fused(b, r, inner, outer))
    return [_fused(b, b.low("Sub", b.number(1.0), z), new, b.low("Mul", z, states[0]))]


_CELLS = {
    "LSTM": _Cell(4, 2, (b"sigmoid", b"tanh", b"tanh"), _lstm),
    "GRU": _Cell(3, 1, (b"sigmoid", b"tanh"), _gru),
    "RNN": _Cell(1, 1, (b"tanh",), lambda b, gates, states: [_tanh(b, _total(b, *gates[0]))]),
}


def layer(b: LowBuilder, site: LowOp) -> list[str] | None:
    """LSTM, GRU that resets after the product, and RNN, with default activations and without lengths."""
    weights, recurrence, cell = site.static(1), site.static(2), _CELLS[site.op.op_type]
    unread = any(site.input(slot) for slot in (_LENGTHS, _PEEPHOLES))
    stated = site.attributes()
    altered = any(_PLAIN.get(name, value) != value for name, value in stated.items())
    before = site.op.op_type == "GRU" and not stated.get("linear_before_reset")
    if weights is None or recurrence is None or unread or altered or before:
        return None
    usual = [*cell.activations] * weights[0]
    if [word.lower() for word in stated.get("activations", usual)] != usual:
        return None
    ways = [_direction(b, site, i, weights[2], recurrence[2]) for i in range(weights[0])]
    sequences, *states = zip(*ways, strict=True)
    return [_joined(b, sequences, 1), *(_joined(b, ends, 0) for ends in states)]


def _joined(b: LowBuilder, parts: Sequence[str], axis: int) -> str:
    return b.op("Concat", *(b.unsqueeze(part, [axis]) for part in parts), axis=axis)


def _direction(b: LowBuilder, site: LowOp, index: int, width: int, hidden: int) -> list[str]:
    """Append the Scan over the steps of one direction; return the outputs of all steps, then the last states."""
    cell, x = _CELLS[site.op.op_type], site.input(0)
    size, which = cell.gates * hidden, b.constant(np.array(index, np.int64))
    steps, batch = (b.picked(b.op("Shape", x), axis, 1, 0) for axis in range(2))
    given = [site.input(slot) for slot in range(_STATES + cell.states)]
    own = ["", *(b.op("Gather", name, which, axis=0) if name else "" for name in given[1:])]
    product = _product(b, b.shaped(x, [-1, width]), width, _blocks(b, own[1], width, size), size)
    outer = b.op("Reshape", product, b.op("Concat", steps, batch, b.ints([size]), axis=0))
    recurrence = _blocks(b, own[2], hidden, size)
    biases = [b.picked(own[3], i * hidden, hidden, 0) if own[3] else "" for i in range(2 * cell.gates)]

    def step(body: LowBuilder, states: list[str], parts: list[str]) -> list[str]:
        inner = _product(body, states[0], hidden, recurrence, size)
        gates = []
        for i in range(cell.gates):
            products = [body.picked(whole, i * hidden, hidden, 1) for whole in (parts[0], inner)]
            gates.append([*products, biases[i], biases[i + cell.gates]])
        following = cell.formula(body, gates, states)
        return [*following, following[0]]

    backward = site.attributes().get("direction") == b"reverse" or index == 1
    begin = [state or b.zeros(batch, b.ints([hidden])) for state in own[_STATES:]]
    *last, sequence = b.scan(begin, [(outer, 0)], step, 2, backward=backward)
    return [sequence, *last]


def _blocks(b: LowBuilder, weight: str, length: int, size: int) -> str:
    terms = b.op("Transpose", b.filled(weight, length, _TERMS), perm=[1, 0])
    return b.shaped(terms, [-1, _TERMS, size])


def _product(b: LowBuilder, rows: str, length: int, blocks: str, size: int) -> str:
    """Return rows times weights: each block of terms adds up in float32, and the blocks in the low type, in order."""
    parts = b.shaped(b.filled(rows, length, _TERMS), [0, -1, _TERMS])
    start = b.zeros(b.picked(b.op("Shape", rows), 0, 1, 0), b.ints([size]))

    def added(body: LowBuilder, states: list[str], parts: list[str]) -> list[str]:
        return [body.low("Add", states[0], body.op("MatMul", *parts))]

    return b.scan([start], [(parts, 1), (blocks, 0)], added, 2)[0]


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


def written_out(
    view: View, recipe: Recipe, op: Op, node: NodeProto, taken: set[str], low_type: DType | None
) -> tuple[list[NodeProto], list[str]] | None:
    """Return the nodes of an op and the names of its results; None if it is computed in float32 inside.

    `node`: the op with the inputs of the twin. `taken`: names in use, to which those of the nodes are added.
    """
    builder = LowBuilder(taken, opset=view.opset, region=op.name)
    builder.low_type = low_type
    results = recipe(builder, LowOp(view, op, node))
    return None if results is None else (builder.nodes, results)
