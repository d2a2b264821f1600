"""LSTM, GRU and RNN as cuDNN computes them: products round after 16 terms, and each step of a cell rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from amp_rewrite.rewrite.rounding_builder import EmulatedOp, RoundingBuilder

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
