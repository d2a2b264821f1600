"""Builder of float32 nodes that round as a device does, the ops that it expands, and recurrent layers built with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import numpy as np
import onnx.helper
from onnx import NodeProto

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.shapes import Shape, shape_of
from amp_rewrite.ir.view import Op, View
from amp_rewrite.rewrite.builder import declared
from amp_rewrite.rewrite.node_builder import NodeBuilder


class RoundingBuilder(NodeBuilder):
    """A builder of float32 nodes that can round their results to a low type; a type of None rounds nothing."""

    low_type: DType | None = DType.FLOAT16

    def rounded(self, x: str) -> str:
        """Append Casts to the low type and back."""
        if self.low_type is None:
            return x
        return self.op("Cast", self.op("Cast", x, to=self.low_type.code), to=DType.FLOAT.code)

    def low(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Append an op and round its result."""
        return self.rounded(self.op(op_type, *inputs, **attributes))

    def total(self, *terms: str) -> str:
        """Append the sum of terms, rounded after each addition; terms of "" are left out."""
        return reduce(partial(self.low, "Add"), filter(None, terms))

    def number(self, value: float) -> str:
        """Append a constant rounded to float16."""
        with np.errstate(over="ignore"):
            return self.constant(np.array(value, DType.FLOAT16.numpy).astype(np.float32))

    def reshaped(self, x: str, dims: Sequence[int]) -> str:
        """Append a Reshape; 0 copies the dimension of the input, and -1 stands for the rest."""
        return self.op("Reshape", x, self.ints(dims))

    def zeros(self, *sizes: str) -> str:
        """Append zeros in the shape of the concatenated `sizes`."""
        shape = self.op("Concat", *sizes, axis=0) if len(sizes) > 1 else sizes[0]
        return self.full(shape, 0.0, DType.FLOAT)

    def slice(self, x: str, first: int, count: int, axis: int) -> str:
        """Append a Gather of `count` neighbors along an axis, from `first` on."""
        return self.op("Gather", x, self.ints(range(first, first + count)), axis=axis)

    def zero_padded(self, x: str, length: int, width: int) -> str:
        """Pad rows of a known length with zeros to a multiple of the width."""
        if length % width == 0:
            return x
        rows = self.slice(self.op("Shape", x), 0, 1, 0)
        return self.op("Concat", x, self.zeros(rows, self.ints([-length % width])), axis=1)

    def scan(
        self, states: Sequence[str], parts: Sequence[tuple[str, int]], step: Step, rank: int, *, backward: bool = False
    ) -> list[str]:
        """Append a Scan over slices of `parts`, each a value and the axis to slice.

        `step` gets a builder for the body, the states and the slices. It returns the next states, followed by values
        that the Scan stacks along axis 0; all have the same rank. `backward` goes from the last slice to the first and
        stacks in the order of the slices.
        """
        inner = RoundingBuilder(self._taken, opset=self.opset, region=f"{self._region}/step")
        names = [inner.fresh(f"{inner._region}/in") for _ in (*states, *parts)]
        results = step(inner, names[: len(states)], names[len(states) :])
        for slot, result in enumerate(results):  # a body must compute each of its outputs, and list it once
            results[slot] = inner.fresh(f"{inner._region}/out")
            inner.name(result, results[slot])
        formals = [declared(name, DType.FLOAT, None) for name in names]
        outputs = [declared(name, DType.FLOAT, [None] * rank) for name in results]  # onnxruntime wants the rank
        body = onnx.helper.make_graph(inner.nodes, "step", formals, outputs)
        inputs, axes = (*states, *(name for name, _ in parts)), [axis for _, axis in parts]
        attributes: dict[str, Any] = {"body": body, "num_scan_inputs": len(parts), "scan_input_axes": axes}
        if backward:
            attributes["scan_input_directions"] = [1] * len(parts)
            attributes["scan_output_directions"] = [1] * (len(results) - len(states))
        return list(self.ops("Scan", *inputs, results=len(results), **attributes))


Step = Callable[[RoundingBuilder, list[str], list[str]], list[str]]
"""Builds one step of a Scan: from states and slices to the next states and the values to stack."""


@dataclass(frozen=True, slots=True)
class EmulatedOp:
    """A float16 op, and its node with the float32 inputs of the twin."""

    view: View
    op: Op
    node: NodeProto

    def input(self, slot: int) -> str:
        return self.node.input[slot] if slot < len(self.node.input) else ""

    def shape(self, slot: int) -> Shape | None:
        return shape_of(self.view, self.op.inputs[slot])

    def static(self, slot: int) -> tuple[int, ...] | None:
        """Return the shape of an input; None if a dimension is unknown."""
        shape = self.shape(slot)
        return None if shape is None or None in shape else tuple(d for d in shape if d is not None)

    def attributes(self) -> dict[str, Any]:
        return {a.name: onnx.helper.get_attribute_value(a) for a in self.node.attribute}


Recipe = Callable[[RoundingBuilder, EmulatedOp], "list[str] | None"]
"""Appends the steps of an op's kernel and returns its outputs, rounded to float16; None if shapes are unknown."""


# -- recurrent cells as cuDNN computes them: products round after 16 terms, and each step rounds -----------

_TERMS = 16
"""Terms that a tensor core sums before it rounds."""
_LENGTHS, _INITIAL_STATES, _PEEPHOLES = 4, 5, 7
_NEUTRAL: Mapping[str, object] = {
    "clip": 0.0,
    "input_forget": 0,
    "layout": 0,
    "activation_alpha": [],
    "activation_beta": [],
}
"""Attributes that the arithmetic does not cover, with the values at which they have no effect."""


Formula = Callable[[RoundingBuilder, Sequence[Sequence[str]], Sequence[str]], list[str]]
"""Appends a step of a cell and returns its next states, the output first.

Its arguments are the builder; for each gate the products with the input and with the state, and the biases of both;
and the states.
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
    """GRU with gates in the order z, r, h; the reset applies after the product."""
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


def recurrent_layer(b: RoundingBuilder, site: EmulatedOp) -> list[str] | None:
    """LSTM, RNN, and GRU with the reset after the product; with default activations and without lengths."""
    weights, recurrence, cell = site.static(1), site.static(2), _CELLS[site.op.op_type]
    unsupported_inputs = any(site.input(slot) for slot in (_LENGTHS, _PEEPHOLES))
    attributes = site.attributes()
    altered = any(_NEUTRAL.get(name, value) != value for name, value in attributes.items())
    reset_first = site.op.op_type == "GRU" and not attributes.get("linear_before_reset")
    if weights is None or recurrence is None or unsupported_inputs or altered or reset_first:
        return None
    defaults = [*cell.activations] * weights[0]
    if [name.lower() for name in attributes.get("activations", defaults)] != defaults:
        return None
    directions = [_direction(b, site, i, weights[2], recurrence[2]) for i in range(weights[0])]
    sequences, *states = zip(*directions, strict=True)
    return [_stacked(b, sequences, 1), *(_stacked(b, ends, 0) for ends in states)]


def _stacked(b: RoundingBuilder, parts: Sequence[str], axis: int) -> str:
    return b.op("Concat", *(b.unsqueeze(part, [axis]) for part in parts), axis=axis)


def _direction(b: RoundingBuilder, site: EmulatedOp, index: int, width: int, hidden: int) -> list[str]:
    """Append the Scan over one direction; return the outputs of all steps, then the last states."""
    cell, x = _CELLS[site.op.op_type], site.input(0)
    size, index_constant = cell.gates * hidden, b.constant(np.array(index, np.int64))
    steps, batch = (b.slice(b.op("Shape", x), axis, 1, 0) for axis in range(2))
    states_in = [site.input(slot) for slot in range(_INITIAL_STATES + cell.states)]
    weights = ["", *(b.op("Gather", name, index_constant, axis=0) if name else "" for name in states_in[1:])]
    product = _product(b, b.reshaped(x, [-1, width]), width, _blocks(b, weights[1], width, size), size)
    outer = b.op("Reshape", product, b.op("Concat", steps, batch, b.ints([size]), axis=0))
    recurrence = _blocks(b, weights[2], hidden, size)
    biases = [b.slice(weights[3], i * hidden, hidden, 0) if weights[3] else "" for i in range(2 * cell.gates)]

    def step(body: RoundingBuilder, states: list[str], parts: list[str]) -> list[str]:
        inner = _product(body, states[0], hidden, recurrence, size)
        gates = []
        for i in range(cell.gates):
            products = [body.slice(whole, i * hidden, hidden, 1) for whole in (parts[0], inner)]
            gates.append([*products, biases[i], biases[i + cell.gates]])
        updated = cell.formula(body, gates, states)
        return [*updated, updated[0]]

    backward = site.attributes().get("direction") == b"reverse" or index == 1
    initial = [state or b.zeros(batch, b.ints([hidden])) for state in weights[_INITIAL_STATES:]]
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
