"""LSTM, GRU and RNN of cuDNN in the low type: products add up 16 terms at a time, and each step of a cell rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import NamedTuple

import numpy as np

from amp_rewrite.rewrite.device_arithmetic.low_op import LowBuilder, LowOp

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


class _Gate(NamedTuple):
    """Of one gate: products with the input and with the state, and their biases."""

    outer: str
    inner: str
    outer_bias: str
    inner_bias: str


Formula = Callable[[LowBuilder, Sequence[_Gate], Sequence[str]], list[str]]
"""The next states of a cell, its output first."""


class _Cell(NamedTuple):
    gates: int
    states: int
    activations: tuple[bytes, ...]
    formula: Formula


def _total(b: LowBuilder, *terms: str) -> str:
    return reduce(partial(b.low, "Add"), filter(None, terms))


def _sum(b: LowBuilder, gate: _Gate) -> str:
    return _total(b, *gate)


def _sigmoid(b: LowBuilder, x: str) -> str:
    one = b.number(1.0)
    return b.low("Div", one, b.low("Add", one, b.low("Exp", b.op("Neg", x))))


def _tanh(b: LowBuilder, x: str) -> str:
    """Twice a sigmoid of 2x, less one: positive results have 10 bits behind the point."""
    two = b.number(2.0)
    return b.low("Sub", b.op("Mul", two, _sigmoid(b, b.low("Mul", two, x))), b.number(1.0))


def _fused(b: LowBuilder, x: str, y: str, z: str) -> str:
    return b.low("Add", b.op("Mul", x, y), z)


def _lstm(b: LowBuilder, gates: Sequence[_Gate], states: Sequence[str]) -> list[str]:
    i, o, f = (_sigmoid(b, _sum(b, gate)) for gate in gates[:3])
    cell = _fused(b, f, states[1], b.low("Mul", i, _tanh(b, _sum(b, gates[3]))))
    return [b.low("Mul", o, _tanh(b, cell)), cell]


def _gru(b: LowBuilder, gates: Sequence[_Gate], states: Sequence[str]) -> list[str]:
    """Gates in the order z, r, h; the reset applies after the product."""
    z, r = (_sigmoid(b, _sum(b, gate)) for gate in gates[:2])
    hidden = gates[2]
    inner, outer = _total(b, hidden.inner, hidden.inner_bias), _total(b, hidden.outer, hidden.outer_bias)
    new = _tanh(b, _fused(b, r, inner, outer))
    return [_fused(b, b.low("Sub", b.number(1.0), z), new, b.low("Mul", z, states[0]))]


def _rnn(b: LowBuilder, gates: Sequence[_Gate], states: Sequence[str]) -> list[str]:
    return [_tanh(b, _sum(b, gates[0]))]


_CELLS = {
    "LSTM": _Cell(4, 2, (b"sigmoid", b"tanh", b"tanh"), _lstm),
    "GRU": _Cell(3, 1, (b"sigmoid", b"tanh"), _gru),
    "RNN": _Cell(1, 1, (b"tanh",), _rnn),
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
            gates.append(_Gate(products[0], products[1], biases[i], biases[i + cell.gates]))
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
