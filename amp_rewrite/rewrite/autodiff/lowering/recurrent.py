"""LSTM, GRU and RNN as a Scan over their steps, in operators that have gradient rules.

Formulas: onnx, docs/Operators. The product of the whole sequence with the input weights is computed before the
Scan; the product of the state with the recurrence weights is computed in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import onnx.helper
from onnx import GraphProto

from amp_rewrite.dtypes import DType
from amp_rewrite.rewrite.autodiff.vjp.looping import append_scan
from amp_rewrite.rewrite.autodiff.vjp.rule import Forward
from amp_rewrite.rewrite.builder import declared
from amp_rewrite.rewrite.node_builder import NodeBuilder


@dataclass(frozen=True, slots=True)
class _Direction:
    """One direction of a layer: recurrence weights [hidden, gates · hidden], their bias, and activations."""

    layer: _Layer
    recurrence: str
    inner_bias: str | None
    activations: Sequence[str]


Formula = Callable[[NodeBuilder, _Direction, Sequence[str], str], Sequence[str]]
"""Append one step to a body, from states and input product to the next states; the output comes first.

The body reads weights of the graph around it.
"""


def _lstm(b: NodeBuilder, way: _Direction, states: Sequence[str], x: str) -> Sequence[str]:
    """Gates in the order i, o, f, c."""
    h, c = states
    i, o, f, g = way.layer.parted(b, b.op("Add", b.op("MatMul", h, way.recurrence), x), [1] * 4)
    i, o, f = (b.op(way.activations[0], gate) for gate in (i, o, f))
    c = b.op("Add", b.op("Mul", f, c), b.op("Mul", i, b.op(way.activations[1], g)))
    return b.op("Mul", o, b.op(way.activations[2], c)), c


def _gru(b: NodeBuilder, way: _Direction, states: Sequence[str], x: str) -> Sequence[str]:
    """Gates in the order z, r, h; the reset applies before or after the product."""
    (h,) = states
    z, r, g = way.layer.parted(b, x, [1] * 3)
    if way.layer.resets_after:
        product = b.op("MatMul", h, way.recurrence)
        seen = product if way.inner_bias is None else b.op("Add", product, way.inner_bias)
        of_z, of_r, of_g = way.layer.parted(b, seen, [1] * 3)
        r = b.op(way.activations[0], b.op("Add", r, of_r))
        reset = b.op("Mul", r, of_g)
    else:
        for_gates, for_state = way.layer.parted(way.layer.b, way.recurrence, [2, 1])
        of_z, of_r = way.layer.parted(b, b.op("MatMul", h, for_gates), [1] * 2)
        r = b.op(way.activations[0], b.op("Add", r, of_r))
        reset = b.op("MatMul", b.op("Mul", r, h), for_state)
    z = b.op(way.activations[0], b.op("Add", z, of_z))
    g = b.op(way.activations[1], b.op("Add", g, reset))
    one = way.layer.b.scalar(1.0, way.layer.dtype())
    return (b.op("Add", b.op("Mul", b.op("Sub", one, z), g), b.op("Mul", z, h)),)


def _rnn(b: NodeBuilder, way: _Direction, states: Sequence[str], x: str) -> Sequence[str]:
    (h,) = states
    return (b.op(way.activations[0], b.op("Add", b.op("MatMul", h, way.recurrence), x)),)


class _Cell(NamedTuple):
    gates: int
    states: int
    activations: tuple[str, ...]
    formula: Formula


CELLS: Mapping[str, _Cell] = {
    "LSTM": _Cell(4, 2, ("Sigmoid", "Tanh", "Tanh"), _lstm),
    "GRU": _Cell(3, 1, ("Sigmoid", "Tanh"), _gru),
    "RNN": _Cell(1, 1, ("Tanh",), _rnn),
}

_KNOWN = {name.lower(): name for name in ("Sigmoid", "Tanh", "Relu", "Softsign", "Softplus", "HardSigmoid", "Elu")}
_REFUSED = ("activation_alpha", "activation_beta", "clip", "input_forget", "layout")
_W, _R, _B, _LENGTHS, _STATES, _PEEPHOLES = 1, 2, 3, 4, 5, 7


def layer(v: Forward) -> list[str]:
    """Append the Scans that are equivalent to an LSTM, GRU or RNN; return its results.

    Covers directions, lengths, and activations without parameters. GradientError for peepholes, other attributes and
    activations, an unknown hidden size and an unknown element type.
    """
    own = _Layer(v.b, v.op)
    sequences, ends = [], []
    for i, way in enumerate(own.ways()):
        sequence, *last = own.scan(way, i)
        sequences.append(v.b.unsqueeze(sequence, [1]))
        ends.append([v.b.unsqueeze(state, [0]) for state in last])
    return [v.joined(sequences, 1), *(v.joined(states, 0) for states in zip(*ends, strict=True))]


@dataclass(frozen=True)
class _Layer(Forward):
    @property
    def cell(self) -> _Cell:
        return CELLS[self.op.op_type]

    @cached_property
    def direction(self) -> str:
        return str(self.attr("direction", "forward"))

    @property
    def directions(self) -> int:
        return 2 if self.direction == "bidirectional" else 1

    @cached_property
    def hidden(self) -> int:
        shape = self.shape(_R)
        size = self.attr("hidden_size", shape[-1] if shape else None)
        if not isinstance(size, int):
            raise self.error("its gradient needs the hidden size; set the attribute hidden_size")
        return size

    def _each(self, slot: int) -> list[str | None]:
        """An input split by direction, without the direction axis; None if absent."""
        if not self.has(slot):
            return [None] * self.directions
        parts = self.b.split(self.x(slot), [1] * 2, 0, results=2) if self.directions == 2 else (self.x(slot),)
        return [self.b.squeeze(part, [0]) for part in parts]

    def ways(self) -> list[_Direction]:
        refused = [name for name in _REFUSED if self.attr(name)]
        refused += ["peepholes"] if self.has(_PEEPHOLES) else []
        if refused:
            raise self.error(f"no gradient with {refused[0]}; use a layer without it")
        biases, words = self._each(_B), [w.decode() for w in self.attr("activations", [])]
        for word in words:
            if word.lower() not in _KNOWN:
                raise self.error(f"no gradient with activation {word!r}; use {', '.join(_KNOWN.values())}")
        active = [_KNOWN[w.lower()] for w in words] or [*self.cell.activations] * self.directions
        count = len(active) // self.directions
        directions = []
        for i, weight in enumerate(self._each(_R)):
            assert weight is not None
            turned = self.b.op("Transpose", weight, perm=[1, 0])
            inner = self._biases(biases[i])[1] if self.resets_after else None
            directions.append(_Direction(self, turned, inner, active[i * count : (i + 1) * count]))
        return directions

    @cached_property
    def resets_after(self) -> bool:
        return self.op.op_type == "GRU" and bool(self.attr("linear_before_reset", 0))

    def _biases(self, bias: str | None) -> Sequence[str | None]:
        return (None, None) if bias is None else self.parted(self.b, bias, [self.cell.gates] * 2)

    def parted(self, b: NodeBuilder, x: str, shares: Sequence[int]) -> tuple[str, ...]:
        """Split along the last axis into parts of `shares` hidden sizes each."""
        return b.split(x, [self.hidden * share for share in shares], -1, results=len(shares))

    def _product(self, direction: int) -> str:
        """Product of the input and its weights: [steps, batch, gates · hidden]."""
        weight, bias = self._each(_W)[direction], self._each(_B)[direction]
        assert weight is not None
        product = self.b.op("MatMul", self.x(0), self.b.op("Transpose", weight, perm=[1, 0]))
        outer, inner = self._biases(bias)
        if outer is None or inner is None:
            return product
        return self.b.op("Add", product, outer if self.resets_after else self.b.op("Add", outer, inner))

    def _zeros(self) -> str:
        batch = self.b.op("Gather", self.b.shape_of(self.x(0)), self.b.ints([1]))
        return self.b.full(self.b.op("Concat", batch, self.b.ints([self.hidden]), axis=0), 0.0, self.dtype())

    def _running(self) -> list[str]:
        """Mask of the batch rows within their length, bool [steps, batch, 1]; none without lengths."""
        if not self.has(_LENGTHS):
            return []
        steps = self.b.op("Gather", self.b.op("Shape", self.x(0)), self.b.scalar(0, DType.INT64))
        zero, one = (self.b.scalar(number, DType.INT32) for number in (0, 1))
        numbers = self.b.op("Range", zero, self.b.op("Cast", steps, to=DType.INT32.code), one)
        lengths = self.b.unsqueeze(self.x(_LENGTHS), [1])
        return [self.b.op("Less", self.b.unsqueeze(numbers, [1, 2]), lengths)]

    def scan(self, way: _Direction, direction: int) -> list[str]:
        """Append the Scan of one direction; return its outputs of all steps, and its last states."""
        begin = [self._each(_STATES + i)[direction] or self._zeros() for i in range(self.cell.states)]
        running = self._running()
        turned = [int(self.direction == "reverse" or direction == 1)]
        directions = {"scan_input_directions": turned * (1 + len(running)), "scan_output_directions": turned}
        name, body = self.b.fresh(self.op.name), self._step(way, bool(running))
        scanned = [self._product(direction), *running]
        *last, sequence = append_scan(self.b, name, body, begin, scanned, **directions)
        return [sequence, *last]

    def _step(self, way: _Direction, bounded: bool) -> GraphProto:
        """Build the body of one step; rows past their length keep their states and output zeros."""
        shape, name = self.shape(0), f"{self.op.name}/step"
        batch = shape[1] if shape else None
        formals = [self.b.fresh(f"{name}/{part}") for part in (*("h", "c")[: self.cell.states], "x")]
        states, x = formals[:-1], formals[-1]
        widths = [self.hidden] * len(states) + [self.hidden * self.cell.gates]
        inputs = [declared(formal, self.dtype(), (batch, n)) for formal, n in zip(formals, widths, strict=True)]
        b = self.b.inner(name)
        now = list(self.cell.formula(b, way, states, x))
        output = now[0]
        if bounded:
            runs = self.b.fresh(f"{name}/runs")
            inputs.append(declared(runs, DType.BOOL, (batch, 1)))
            output = b.op("Where", runs, output, b.scalar(0.0, self.dtype()))
            now = [b.op("Where", runs, after, before) for after, before in zip(now, states, strict=True)]
        results = [*now, output if bounded else b.op("Identity", output)]
        outputs = [declared(result, self.dtype(), (batch, self.hidden)) for result in results]
        return onnx.helper.make_graph(b.nodes, name, inputs, outputs)
