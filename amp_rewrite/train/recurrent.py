"""LSTM, GRU and RNN as a Scan over their steps: what the standard's formulas say, in operators that have gradients.

onnx, docs/Operators: the product of the whole sequence with the input weights stands before the Scan, that of the
state with the recurrence weights in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import onnx.helper
from onnx import GraphProto, NodeProto, TensorProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import GradientError
from amp_rewrite.files.model import Model
from amp_rewrite.ir.nodes import MAIN, Op, OpId
from amp_rewrite.ir.schema import attribute
from amp_rewrite.ir.versions import FIRST_AXES_INPUT
from amp_rewrite.train.builder import Builder, declared


def stepwise(model: Model, ops: Collection[OpId]) -> Model:
    """The model with these LSTM, GRU and RNN of its main graph replaced; names of values stay.

    All of the standard: directions, `layout`, sequence lengths, peepholes, `input_forget`, `clip`, and activations
    without numbers of their own. GradientError for others, and where the hidden size or element type is unknown.
    """
    b = Builder.of(model, region="steps")
    view = b.facts.view
    for position, op_id in enumerate(view.scopes[MAIN].ops):
        if op_id in ops:
            with b.instead_of(position) as node:
                _Layer(b, view.ops[op_id]).replace(node)
    return b.model()


def recurrent(op: Op) -> bool:
    """Whether `stepwise` knows the op."""
    return not op.domain and op.op_type in _CELLS


# -- one step ------------------------------------------------------------------------------------------------


@dataclass
class _Step:
    """The body of the Scan under construction. Its nodes read values of the graph outside, too."""

    b: Builder
    name: str
    nodes: list[NodeProto] = field(default_factory=list)

    def op(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        return self.ops(op_type, *inputs, results=1, **attributes)[0]

    def ops(self, op_type: str, *inputs: str, results: int, **attributes: Any) -> list[str]:
        name = self.b.fresh(f"{self.name}/{op_type}")
        outputs = [name] if results == 1 else [self.b.fresh(f"{name}_{i}") for i in range(results)]
        self.nodes.append(onnx.helper.make_node(op_type, inputs, outputs, name=name, **attributes))
        return outputs


@dataclass(frozen=True)
class _Way:
    """One direction of a layer: its weights as values outside of the steps, and its activations."""

    layer: _Layer
    recurrence: str
    """[hidden, gates · hidden]."""
    inner_bias: str | None
    peepholes: Sequence[str]
    activations: Sequence[str]

    def active(self, step: _Step, which: int, x: str) -> str:
        """An activation of what is clipped before."""
        return step.op(self.activations[which], self.layer.clipped(step, x))


Formula = Callable[[_Way, _Step, Sequence[str], str], Sequence[str]]
"""Appends a step to a body: from the states and the product of the input to the next states, the output first."""


def _lstm(way: _Way, step: _Step, states: Sequence[str], x: str) -> Sequence[str]:
    """Gates in the order i, o, f, c; peepholes in the order i, o, f."""
    h, c = states
    i, o, f, g = way.layer.cut(step, step.op("Add", step.op("MatMul", h, way.recurrence), x), 4)

    def peeped(gate: str, which: int, cell: str) -> str:
        return step.op("Add", gate, step.op("Mul", way.peepholes[which], cell)) if way.peepholes else gate

    i = way.active(step, 0, peeped(i, 0, c))
    coupled = way.layer.number("input_forget", 0)
    f = step.op("Sub", way.layer.one, i) if coupled else way.active(step, 0, peeped(f, 2, c))
    c = step.op("Add", step.op("Mul", f, c), step.op("Mul", i, way.active(step, 1, g)))
    o = way.active(step, 0, peeped(o, 1, c))
    return step.op("Mul", o, step.op(way.activations[2], c)), c


def _gru(way: _Way, step: _Step, states: Sequence[str], x: str) -> Sequence[str]:
    """Gates in the order z, r, h; the reset before the product, or after it."""
    (h,) = states
    z, r, g = way.layer.cut(step, x, 3)
    if way.layer.resets_after:
        product = step.op("MatMul", h, way.recurrence)
        seen = product if way.inner_bias is None else step.op("Add", product, way.inner_bias)
        of_z, of_r, of_g = way.layer.cut(step, seen, 3)
        r = way.active(step, 0, step.op("Add", r, of_r))
        reset = step.op("Mul", r, of_g)
    else:
        for_gates, for_state = way.layer.parted(way.recurrence, (2, 1))
        of_z, of_r = way.layer.cut(step, step.op("MatMul", h, for_gates), 2)
        r = way.active(step, 0, step.op("Add", r, of_r))
        reset = step.op("MatMul", step.op("Mul", r, h), for_state)
    z = way.active(step, 0, step.op("Add", z, of_z))
    g = way.active(step, 1, step.op("Add", g, reset))
    return (step.op("Add", step.op("Mul", step.op("Sub", way.layer.one, z), g), step.op("Mul", z, h)),)


def _rnn(way: _Way, step: _Step, states: Sequence[str], x: str) -> Sequence[str]:
    (h,) = states
    return (way.active(step, 0, step.op("Add", step.op("MatMul", h, way.recurrence), x)),)


@dataclass(frozen=True)
class _Cell:
    gates: int
    states: int
    activations: tuple[str, ...]
    formula: Formula


_CELLS: Mapping[str, _Cell] = {
    "LSTM": _Cell(4, 2, ("Sigmoid", "Tanh", "Tanh"), _lstm),
    "GRU": _Cell(3, 1, ("Sigmoid", "Tanh"), _gru),
    "RNN": _Cell(1, 1, ("Tanh",), _rnn),
}

_KNOWN = {name.lower(): name for name in ("Sigmoid", "Tanh", "Relu", "Softsign", "Softplus", "HardSigmoid", "Elu")}
_W, _R, _B, _LENGTHS, _STATES, _PEEPHOLES = 1, 2, 3, 4, 5, 7


# -- a layer ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layer:
    """One LSTM, GRU or RNN of the main graph."""

    b: Builder
    op: Op

    def replace(self, node: NodeProto) -> None:
        """Append what it computes, and give it out under the node's names."""
        sequences, ends = [], []
        for i, way in enumerate(self._ways()):
            backwards = self.direction == "reverse" or i == 1
            sequence, *last = self._scan(way, i, backwards)
            sequences.append(self.b.unsqueeze(sequence, [1]))
            ends.append([self.b.unsqueeze(state, [0]) for state in last])
        results = [self._joined(sequences, 1, [2, 0, 1, 3])]
        results += [self._joined(states, 0, [1, 0, 2]) for states in zip(*ends, strict=True)]
        for name, result in zip(node.output, results, strict=False):
            if name:
                self.b.name(result, name)

    # -- what it says ------------------------------------------------------------------------------------

    def number(self, name: str, default: Any) -> Any:
        found = attribute(self.op.node, name)
        return default if found is None else onnx.helper.get_attribute_value(found)

    @cached_property
    def cell(self) -> _Cell:
        return _CELLS[self.op.op_type]

    @cached_property
    def direction(self) -> str:
        return str(self.number("direction", b"forward").decode())

    @cached_property
    def directions(self) -> int:
        return 2 if self.direction == "bidirectional" else 1

    @cached_property
    def batch_first(self) -> bool:
        return bool(self.number("layout", 0))

    @cached_property
    def dtype(self) -> DType:
        found = self.b.dtype(self.op.node.input[0])
        if found is None:
            raise self.error(f"the element type of input {self.op.node.input[0]!r} is unknown; declare it")
        return found

    @cached_property
    def hidden(self) -> int:
        shape = self.b.shape(self.op.node.input[_R])
        found = self.number("hidden_size", shape[-1] if shape else None)
        if not isinstance(found, int):
            raise self.error("its gradient needs the hidden size; state the attribute hidden_size")
        return found

    @cached_property
    def one(self) -> str:
        return self.b.scalar(1.0, self.dtype)

    def error(self, fact: str) -> GradientError:
        return GradientError(f"node {self.op.name!r} ({self.op.kind}): {fact}")

    def given(self, slot: int) -> str | None:
        """The name of an optional input."""
        names = self.op.node.input
        return names[slot] if slot < len(names) and names[slot] else None

    def _activations(self) -> list[str]:
        words = [w.decode() for w in self.number("activations", [])]
        if self.number("activation_alpha", []) or self.number("activation_beta", []):
            raise self.error("no gradient with activation_alpha or activation_beta; use activations without numbers")
        for word in words:
            if word.lower() not in _KNOWN:
                raise self.error(f"no gradient with activation {word!r}, only with {', '.join(_KNOWN.values())}")
        return [_KNOWN[w.lower()] for w in words] or [*self.cell.activations] * self.directions

    # -- weights -------------------------------------------------------------------------------------------

    def _each(self, slot: int, axis: int = 0) -> list[str | None]:
        """An input by direction, the axis of directions left out; None where it is not given."""
        name = self.given(slot)
        if name is None:
            return [None] * self.directions
        parts = self.b.split(name, [1] * 2, axis, results=2) if self.directions == 2 else (name,)
        return [self.b.squeeze(part, [axis]) for part in parts]

    def _ways(self) -> list[_Way]:
        biases, peepholes, active = self._each(_B), self._each(_PEEPHOLES), self._activations()
        count = len(active) // self.directions
        found = []
        for i, weight in enumerate(self._each(_R)):
            assert weight is not None
            turned = self.b.op("Transpose", weight, perm=[1, 0])
            inner = self._biases(biases[i])[1] if self.resets_after else None
            three = self.parted(peepholes[i], (1, 1, 1)) if peepholes[i] else ()
            found.append(_Way(self, turned, inner, three, active[i * count : (i + 1) * count]))
        return found

    @cached_property
    def resets_after(self) -> bool:
        return self.op.op_type == "GRU" and bool(self.number("linear_before_reset", 0))

    def _biases(self, bias: str | None) -> Sequence[str | None]:
        """That of the input and that of the recurrence."""
        return (None, None) if bias is None else self.parted(bias, (self.cell.gates, self.cell.gates))

    def parted(self, x: str | None, shares: Sequence[int]) -> tuple[str, ...]:
        """Parts along the last axis, of so many hidden sizes each."""
        assert x is not None
        return self.b.split(x, [self.hidden * share for share in shares], -1, results=len(shares))

    # -- steps ---------------------------------------------------------------------------------------------

    def cut(self, step: _Step, x: str, count: int) -> list[str]:
        """The gates inside a step."""
        sizes = [self.hidden] * count
        if self.b.opset < FIRST_AXES_INPUT:
            return step.ops("Split", x, results=count, axis=-1, split=sizes)
        # inside, because onnx infers no shapes from constants outside of a body
        held = step.op("Constant", value_ints=sizes)
        return step.ops("Split", x, held, results=count, axis=-1)

    def clipped(self, step: _Step, x: str) -> str:
        bound = self.number("clip", 0.0)
        return step.op("Clip", x, *[self.b.scalar(s * bound, self.dtype) for s in (-1, 1)]) if bound else x

    @cached_property
    def _x(self) -> str:
        """[steps, batch, features]."""
        x: str = self.op.node.input[0]
        return self.b.op("Transpose", x, perm=[1, 0, 2]) if self.batch_first else x

    def _product(self, direction: int) -> str:
        """What each step sees of the input: [steps, batch, gates · hidden]."""
        weight, bias = self._each(_W)[direction], self._each(_B)[direction]
        assert weight is not None
        product = self.b.op("MatMul", self._x, self.b.op("Transpose", weight, perm=[1, 0]))
        outer, inner = self._biases(bias)
        if outer is None or inner is None:
            return product
        return self.b.op("Add", product, outer if self.resets_after else self.b.op("Add", outer, inner))

    def _begin(self, slot: int, direction: int) -> str:
        """A state before the first step: zeros where none is given."""
        given = self._each(slot, axis=1 if self.batch_first else 0)[direction]
        if given is not None:
            return given
        batch = self.b.op("Gather", self.b.shape_of(self.op.node.input[0]), self.b.ints([self._batch_axis]))
        return self.b.full(self.b.op("Concat", batch, self.b.ints([self.hidden]), axis=0), 0.0, self.dtype)

    @cached_property
    def _batch_axis(self) -> int:
        return 0 if self.batch_first else 1

    @cached_property
    def batch(self) -> int | str | None:
        shape = self.b.shape(self.op.node.input[0])
        return shape[self._batch_axis] if shape else None

    def _running(self) -> str | None:
        """Which rows of the batch still run in each step: bool [steps, batch, 1]."""
        lengths = self.given(_LENGTHS)
        if lengths is None:
            return None
        int32 = DType.INT32
        steps = self.b.op("Gather", self.b.op("Shape", self._x), self.b.scalar(0, DType.INT64))
        numbers = [self.b.scalar(0, int32), self.b.op("Cast", steps, to=int32.code), self.b.scalar(1, int32)]
        return self.b.op("Less", self.b.unsqueeze(self.b.op("Range", *numbers), [1, 2]), self.b.unsqueeze(lengths, [1]))

    def _scan(self, way: _Way, direction: int, backwards: bool) -> list[str]:
        """The outputs of all steps, then the last states."""
        begin = [self._begin(_STATES + i, direction) for i in range(self.cell.states)]
        running = self._running()
        scanned = [self._product(direction), *([running] if running else [])]
        graph = self._graph(way, bool(running))
        turned = [int(backwards)]
        name = self.b.fresh(self.op.name)
        outputs = [self.b.fresh(f"{name}_{i}") for i in range(self.cell.states + 1)]
        node = onnx.helper.make_node(
            "Scan",
            [*begin, *scanned],
            outputs,
            name=name,
            body=graph,
            num_scan_inputs=len(scanned),
            scan_input_directions=turned * len(scanned),
            scan_output_directions=turned,
        )
        self.b.append(node)
        return [outputs[-1], *outputs[:-1]]

    def _graph(self, way: _Way, bounded: bool) -> GraphProto:
        """One step; rows that have come to their end keep their states, and give zeros."""
        step = _Step(self.b, f"{self.op.name}/step")
        formals = [self.b.fresh(f"{step.name}/{name}") for name in (*("h", "c")[: self.cell.states], "x")]
        states, x = formals[:-1], formals[-1]
        widths = [self.hidden] * len(states) + [self.hidden * self.cell.gates]
        inputs = [declared(name, self.dtype, (self.batch, n)) for name, n in zip(formals, widths, strict=True)]
        now = list(self.cell.formula(way, step, states, x))
        given = now[0]
        if bounded:
            runs = self.b.fresh(f"{step.name}/runs")
            inputs.append(onnx.helper.make_tensor_value_info(runs, TensorProto.BOOL, (self.batch, 1)))
            given = step.op("Where", runs, given, self.b.scalar(0.0, self.dtype))
            now = [step.op("Where", runs, after, before) for after, before in zip(now, states, strict=True)]
        results = [*now, given if given not in now else step.op("Identity", given)]
        outputs = [declared(name, self.dtype, (self.batch, self.hidden)) for name in results]
        return onnx.helper.make_graph(step.nodes, step.name, inputs, outputs)

    def _joined(self, parts: Sequence[str], axis: int, perm: Sequence[int]) -> str:
        """The directions side by side, and the batch in front where the layout says so."""
        whole = parts[0] if len(parts) == 1 else self.b.op("Concat", *parts, axis=axis)
        return self.b.op("Transpose", whole, perm=perm) if self.batch_first else whole
