"""Function bodies for ops without a gradient rule, and the conversion to an opset with gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx.defs
import onnx.helper
from onnx import FunctionProto, GraphProto, NodeProto, TypeProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import GradientError, ModelError
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import all_graphs, clone, refill
from amp_rewrite.ir.attributes import attribute, int_attribute
from amp_rewrite.ir.nodes import Op, OpId
from amp_rewrite.ir.schema import TENSOR, default_attributes
from amp_rewrite.ir.versions import FIRST_SCATTER_ADD
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.autodiff.builder import Builder, shapes_of
from amp_rewrite.rewrite.autodiff.vjp.rule import Forward
from amp_rewrite.rewrite.builder import declared
from amp_rewrite.rewrite.node_builder import NodeBuilder
from amp_rewrite.rewrite.opset import moved_to
from amp_rewrite.rewrite.passes.inline import function_body, inlined


def at_gradient_opset(model: Model) -> tuple[Model, tuple[str, ...]]:
    """Convert a model to opset 16 if it has a lower one; return the model, and a note on the conversion."""
    opset = next((o.version for o in model.proto.opset_import if o.domain in ("", "ai.onnx")), FIRST_SCATTER_ADD)
    if opset >= FIRST_SCATTER_ADD:
        return model, ()
    moved = moved_to(View.of(model), FIRST_SCATTER_ADD)
    if isinstance(moved, str):
        raise GradientError(
            f"gradients need ai.onnx opset {FIRST_SCATTER_ADD}, but this model has opset {opset} and cannot be"
            f" converted to it: {moved}; export the model again at a higher opset"
        )
    note = f"the step uses ai.onnx opset {FIRST_SCATTER_ADD} to add gradients with ScatterND; the model has {opset}"
    return moved.model, (note,)


# -- our own bodies --------------------------------------------------------------------------------


def _batch_norm(v: Forward) -> list[str]:
    """Normalize with the running statistics or with the batch's mean and biased variance, in the statistics' type.

    The running statistics are updated with weight 1 − momentum, as in the standard.
    """
    b, dtype, shape = v.b, v.dtype(3), _channel_shape(v)
    statistics = [b.reshape(v.x(slot), shape) for slot in (3, 4)]
    if not in_training(v.op):
        return [_scale_and_shift(v, dtype, b.op("Sub", b.cast(v.x(0), dtype), statistics[0]), statistics[1])]

    centered, *moments = _moments(v, dtype, [0, *range(2, v.rank())])
    momentum = v.attr("momentum", 0.9)
    results = [_scale_and_shift(v, dtype, centered, moments[1])]
    for slot, moment in zip((3, 4), moments, strict=True):
        increment = b.op("Mul", b.reshape(moment, [-1]), b.scalar(1 - momentum, dtype))
        results.append(b.op("Add", b.op("Mul", v.x(slot), b.scalar(momentum, dtype)), increment))
    return results


def in_training(op: Op) -> bool:
    """True for a BatchNormalization with batch statistics; onnxruntime has no CUDA kernel for it."""
    uses_batch = int_attribute(op.node, "training_mode", 0) or len(op.outputs) > 1
    return op.kind == "BatchNormalization" and bool(uses_batch)


def _instance_norm(v: Forward) -> list[str]:
    dtype = DType.FLOAT if v.dtype().low else v.dtype()
    centered, _, variance = _moments(v, dtype, range(2, v.rank()))
    return [_scale_and_shift(v, dtype, centered, variance)]


def _channel_shape(v: Forward) -> list[int]:
    """Return the shape of per-channel values for a broadcast with [N, C, d…]."""
    return [-1, *[1] * (v.rank() - 2)]


def _moments(v: Forward, dtype: DType, axes: Sequence[int]) -> tuple[str, str, str]:
    """Return x minus its mean, the mean, and the biased variance."""
    b, x = v.b, v.b.cast(v.x(0), dtype)
    mean = b.reduce("ReduceMean", x, axes, keepdims=True)
    centered = b.op("Sub", x, mean)
    return centered, mean, b.reduce("ReduceMean", b.op("Mul", centered, centered), axes, keepdims=True)


def _scale_and_shift(v: Forward, dtype: DType, centered: str, variance: str) -> str:
    """Divide by the deviation, scale and shift, with one factor per channel to have fewer ops on the whole tensor."""
    b = v.b
    root = b.op("Sqrt", b.op("Add", variance, b.scalar(v.attr("epsilon", 1e-5), dtype)))
    scale, bias = (b.reshape(b.cast(v.x(slot), dtype), _channel_shape(v)) for slot in (1, 2))
    return b.cast(b.op("Add", b.op("Mul", centered, b.op("Div", scale, root)), bias), v.dtype(), of=dtype)


def _cross_entropy(v: Forward) -> list[str]:
    b, attributes = v.b, {name: v.attr(name) for name in ("reduction", "ignore_index")}
    log_probabilities = b.op("LogSoftmax", v.x(0), axis=1)
    return [b.op("NegativeLogLikelihoodLoss", log_probabilities, *v.op.node.input[1:], **attributes), log_probabilities]


def _lp_norm(v: Forward) -> list[str]:
    norm = v.b.reduce(f"ReduceL{v.attr('p', 2)}", v.x(0), [v.axis(-1)], keepdims=True)
    zero, one = (v.b.scalar(number, v.dtype()) for number in (0.0, 1.0))
    return [v.b.op("Div", v.x(0), v.b.op("Where", v.b.op("Equal", norm, zero), one, norm))]


def _one_hot(v: Forward) -> list[str]:
    b, off_and_on = v.b, v.b.split(v.x(2), [1, 1], 0, results=2)
    one_hot = b.op("OneHot", v.x(0), v.x(1), b.constant(np.array([0, 1], np.int64)), axis=v.attr("axis", -1))
    return [b.op("Where", b.op("Cast", one_hot, to=DType.BOOL.code), *off_and_on[::-1])]


# Klambauer et al., Self-Normalizing Neural Networks, 2017; the standard's defaults.
_SELU = {"alpha": 1.67326319217681884765625, "gamma": 1.05070102214813232421875}


def _selu(v: Forward) -> list[str]:
    alpha, gamma = (v.attr(name, default) for name, default in _SELU.items())
    return [v.b.op("Mul", v.b.op("Elu", v.x(0), alpha=alpha), v.b.scalar(gamma, v.dtype()))]


# -- LSTM, GRU and RNN as a Scan over their steps, in operators that have gradient rules ------------------
# The formulas are in docs/Operators.md of onnx. The product of the whole sequence and the input weights is computed
# before the Scan, and the product of the state and the recurrence weights in each step.


@dataclass(frozen=True, slots=True)
class _Direction:
    """One direction of a layer: recurrence weights [hidden, gates · hidden], their bias, and activations."""

    layer: _Layer
    recurrence: str
    inner_bias: str | None
    activations: Sequence[str]


Formula = Callable[[NodeBuilder, _Direction, Sequence[str], str], Sequence[str]]
"""Appends one step to a body and returns the next states, output first, computed from the states and the input product.

The body captures the weights.
"""


def _lstm(b: NodeBuilder, direction: _Direction, states: Sequence[str], x: str) -> Sequence[str]:
    """Gates in the order i, o, f, c."""
    h, c = states
    i, o, f, g = direction.layer.split(b, b.op("Add", b.op("MatMul", h, direction.recurrence), x), [1] * 4)
    i, o, f = (b.op(direction.activations[0], gate) for gate in (i, o, f))
    c = b.op("Add", b.op("Mul", f, c), b.op("Mul", i, b.op(direction.activations[1], g)))
    return b.op("Mul", o, b.op(direction.activations[2], c)), c


def _gru(b: NodeBuilder, direction: _Direction, states: Sequence[str], x: str) -> Sequence[str]:
    """Gates in the order z, r, h; the reset gate applies to the state or to its product."""
    (h,) = states
    z, r, g = direction.layer.split(b, x, [1] * 3)
    if direction.layer.resets_after:
        product = b.op("MatMul", h, direction.recurrence)
        inner = product if direction.inner_bias is None else b.op("Add", product, direction.inner_bias)
        inner_z, inner_r, inner_g = direction.layer.split(b, inner, [1] * 3)
        r = b.op(direction.activations[0], b.op("Add", r, inner_r))
        reset = b.op("Mul", r, inner_g)
    else:
        gate_weights, state_weights = direction.layer.split(direction.layer.b, direction.recurrence, [2, 1])
        inner_z, inner_r = direction.layer.split(b, b.op("MatMul", h, gate_weights), [1] * 2)
        r = b.op(direction.activations[0], b.op("Add", r, inner_r))
        reset = b.op("MatMul", b.op("Mul", r, h), state_weights)
    z = b.op(direction.activations[0], b.op("Add", z, inner_z))
    g = b.op(direction.activations[1], b.op("Add", g, reset))
    one = direction.layer.b.scalar(1.0, direction.layer.dtype())
    return (b.op("Add", b.op("Mul", b.op("Sub", one, z), g), b.op("Mul", z, h)),)


def _rnn(b: NodeBuilder, direction: _Direction, states: Sequence[str], x: str) -> Sequence[str]:
    (h,) = states
    return (b.op(direction.activations[0], b.op("Add", b.op("MatMul", h, direction.recurrence), x)),)


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

_ACTIVATIONS = ("Sigmoid", "Tanh", "Relu", "Softsign", "Softplus", "HardSigmoid", "Elu")
_BY_LOWER = {name.lower(): name for name in _ACTIVATIONS}
_UNSUPPORTED_ATTRIBUTES = ("activation_alpha", "activation_beta", "clip", "input_forget", "layout")
_W, _R, _B, _LENGTHS, _STATES, _PEEPHOLES = 1, 2, 3, 4, 5, 7


def layer(v: Forward) -> list[str]:
    """Append Scans equivalent to an LSTM, GRU or RNN; return its results.

    Directions, lengths, and activations without parameters are supported. Raises GradientError for peepholes, other
    attributes or activations, and an unknown hidden size or element type.
    """
    recurrent = _Layer(v.b, v.op)
    sequences, final_states = [], []
    for i, direction in enumerate(recurrent.list_directions()):
        sequence, *last = recurrent.scan(direction, i)
        sequences.append(v.b.unsqueeze(sequence, [1]))
        final_states.append([v.b.unsqueeze(state, [0]) for state in last])
    return [v.joined(sequences, 1), *(v.joined(states, 0) for states in zip(*final_states, strict=True))]


@dataclass(frozen=True)
class _Layer(Forward):
    @property
    def cell(self) -> _Cell:
        return CELLS[self.op.op_type]

    @cached_property
    def direction(self) -> str:
        return str(self.attr("direction", "forward"))

    @property
    def direction_count(self) -> int:
        return 2 if self.direction == "bidirectional" else 1

    @cached_property
    def hidden(self) -> int:
        shape = self.shape(_R)
        size = self.attr("hidden_size", shape[-1] if shape else None)
        if not isinstance(size, int):
            raise self.error("its gradient needs a known hidden size; set its hidden_size attribute")
        return size

    def _by_direction(self, slot: int) -> list[str | None]:
        """Split an input by direction, without the direction axis; each part is None if the input is absent."""
        if not self.has(slot):
            return [None] * self.direction_count
        parts = self.b.split(self.x(slot), [1] * 2, 0, results=2) if self.direction_count == 2 else (self.x(slot),)
        return [self.b.squeeze(part, [0]) for part in parts]

    def list_directions(self) -> list[_Direction]:
        unsupported = [name for name in _UNSUPPORTED_ATTRIBUTES if self.attr(name)]
        unsupported += ["peepholes"] if self.has(_PEEPHOLES) else []
        if unsupported:
            raise self.error(f"there is no gradient rule for {unsupported[0]}; use a layer without it")
        biases, names = self._by_direction(_B), [name.decode() for name in self.attr("activations", [])]
        for name in names:
            if name.lower() not in _BY_LOWER:
                raise self.error(f"there is no gradient rule for activation {name!r}; use {', '.join(_ACTIVATIONS)}")
        activations = [_BY_LOWER[name.lower()] for name in names] or [*self.cell.activations] * self.direction_count
        count = len(activations) // self.direction_count
        directions = []
        for i, weight in enumerate(self._by_direction(_R)):
            assert weight is not None
            transposed = self.b.op("Transpose", weight, perm=[1, 0])
            inner = self._biases(biases[i])[1] if self.resets_after else None
            directions.append(_Direction(self, transposed, inner, activations[i * count : (i + 1) * count]))
        return directions

    @cached_property
    def resets_after(self) -> bool:
        return self.op.op_type == "GRU" and bool(self.attr("linear_before_reset", 0))

    def _biases(self, bias: str | None) -> Sequence[str | None]:
        return (None, None) if bias is None else self.split(self.b, bias, [self.cell.gates] * 2)

    def split(self, b: NodeBuilder, x: str, shares: Sequence[int]) -> tuple[str, ...]:
        """Split the last axis into parts; `shares` has their sizes as multiples of the hidden size."""
        return b.split(x, [self.hidden * share for share in shares], -1, results=len(shares))

    def _product(self, direction: int) -> str:
        """Append the product of the input and its weights: [steps, batch, gates · hidden]."""
        weight, bias = self._by_direction(_W)[direction], self._by_direction(_B)[direction]
        assert weight is not None
        product = self.b.op("MatMul", self.x(0), self.b.op("Transpose", weight, perm=[1, 0]))
        outer, inner = self._biases(bias)
        if outer is None or inner is None:
            return product
        return self.b.op("Add", product, outer if self.resets_after else self.b.op("Add", outer, inner))

    def _zeros(self) -> str:
        batch = self.b.op("Gather", self.b.shape_of(self.x(0)), self.b.ints([1]))
        return self.b.full(self.b.op("Concat", batch, self.b.ints([self.hidden]), axis=0), 0.0, self.dtype())

    def _within_length(self) -> list[str]:
        """Append a bool [steps, batch, 1]: True within the length of each sequence. Return [] without lengths."""
        if not self.has(_LENGTHS):
            return []
        steps = self.b.op("Gather", self.b.op("Shape", self.x(0)), self.b.scalar(0, DType.INT64))
        zero, one = (self.b.scalar(number, DType.INT32) for number in (0, 1))
        numbers = self.b.op("Range", zero, self.b.op("Cast", steps, to=DType.INT32.code), one)
        lengths = self.b.unsqueeze(self.x(_LENGTHS), [1])
        return [self.b.op("Less", self.b.unsqueeze(numbers, [1, 2]), lengths)]

    def scan(self, direction: _Direction, index: int) -> list[str]:
        """Append the Scan of one direction; return the outputs of all steps, then the last states."""
        initial = [self._by_direction(_STATES + i)[index] or self._zeros() for i in range(self.cell.states)]
        within_length = self._within_length()
        backward = [int(self.direction == "reverse" or index == 1)]
        body, scanned = self._step(direction, bool(within_length)), [self._product(index), *within_length]
        attributes: dict[str, Any] = {"body": body, "num_scan_inputs": len(scanned)}
        attributes |= {"scan_input_directions": backward * len(scanned), "scan_output_directions": backward}
        *last, sequence = self.b.ops("Scan", *initial, *scanned, results=self.cell.states + 1, **attributes)
        return [sequence, *last]

    def _step(self, direction: _Direction, has_lengths: bool) -> GraphProto:
        """Build the body of a step. Past its length, a sequence keeps its states and outputs zeros."""
        shape, name = self.shape(0), f"{self.op.name}/step"
        batch = shape[1] if shape else None
        formals = [self.b.fresh(f"{name}/{part}") for part in (*("h", "c")[: self.cell.states], "x")]
        states, x = formals[:-1], formals[-1]
        widths = [self.hidden] * len(states) + [self.hidden * self.cell.gates]
        inputs = [declared(formal, self.dtype(), (batch, n)) for formal, n in zip(formals, widths, strict=True)]
        b = self.b.inner(name)
        updated = list(self.cell.formula(b, direction, states, x))
        output = updated[0]
        if has_lengths:
            active = self.b.fresh(f"{name}/runs")
            inputs.append(declared(active, DType.BOOL, (batch, 1)))
            output = b.op("Where", active, output, b.scalar(0.0, self.dtype()))
            updated = [b.op("Where", active, after, before) for after, before in zip(updated, states, strict=True)]
        results = [*updated, output if has_lengths else b.op("Identity", output)]
        outputs = [declared(result, self.dtype(), (batch, self.hidden)) for result in results]
        return onnx.helper.make_graph(b.nodes, name, inputs, outputs)


Recipe = Callable[[Forward], Sequence[str]]
"""Appends the body of an op and returns its results, in the order of its outputs."""

OWN_BODIES: Mapping[str, Recipe] = {
    "BatchNormalization": _batch_norm,
    "InstanceNormalization": _instance_norm,
    "LpNormalization": _lp_norm,
    "OneHot": _one_hot,
    "Selu": _selu,
    "SoftmaxCrossEntropyLoss": _cross_entropy,
    **dict.fromkeys(CELLS, layer),
}


# -- bodies in place of ops ------------------------------------------------------------------------


def has_body(op: Op) -> bool:
    """True if `with_bodies` can replace the op with a body, from OWN_BODIES or the ONNX standard."""
    return op.kind in OWN_BODIES or (not op.domain and op.signature is not None and op.signature.expandable)


_DOMAIN = "amp_rewrite.bodies"


def with_bodies(view: View, ops: Collection[OpId]) -> Model:
    """Return a view's model with these ops replaced by their function bodies, and with the same value names.

    Raises GradientError if onnx cannot build the body of an op.
    """
    proto = clone(view.model.proto)
    functions: list[FunctionProto] = []
    scopes = zip(view.scopes, all_graphs(proto.graph), strict=True)
    for op_id, node in (pair for scope, graph in scopes for pair in zip(scope.ops, graph.node, strict=True)):
        op = view.ops[op_id]
        if op_id in ops:
            function = _own_body(view, op, node) if op.kind in OWN_BODIES else _standard_body(view, op)
            function.name, function.domain = f"{op.op_type}_{len(functions)}", _DOMAIN
            function.opset_import.add(domain="", version=view.opset)
            node.op_type, node.domain = function.name, _DOMAIN
            defaults = default_attributes(op.signature) if op.signature is not None else {}
            node.attribute.extend(default for name, default in defaults.items() if attribute(node, name) is None)
            functions.append(function)
    proto.functions.extend(functions)
    proto.opset_import.add(domain=_DOMAIN, version=1)
    result = inlined(replace(view.model, proto=proto), [(_DOMAIN, f.name) for f in functions]).proto
    refill(result, "opset_import", [o for o in result.opset_import if o.domain != _DOMAIN])
    return replace(view.model, proto=result)


def _own_body(view: View, op: Op, node: NodeProto) -> FunctionProto:
    """Build a function with the op's input names, and turn the node into a call to it."""
    names = [name for name in dict.fromkeys(op.node.input) if name]
    b = Builder(view, op.scope, taken=set(view.names), region=op.op_type)
    results = zip(op.node.output, OWN_BODIES[op.op_type](Forward(b, op)), strict=False)
    outputs = {name: result for name, result in results if name}
    refill(node, "input", names)
    refill(node, "output", outputs)
    return FunctionProto(input=names, output=outputs.values(), node=b.nodes)


def _standard_body(view: View, op: Op) -> FunctionProto:
    opset = view.opsets[""]
    function = function_body(op, opset, [_type(view, op, slot) for slot in range(len(op.inputs))])
    if function is None:
        raise GradientError(
            f"node {op.name!r} ({op.kind}) has no gradient rule, and onnx {onnx.__version__} cannot build its function"
            " body; replace the op"
        )
    del function.opset_import[:]
    return function


def _type(view: View, op: Op, slot: int) -> TypeProto:
    value = op.inputs[slot]
    vtype = view.types[value] if value is not None else None
    if value is None or vtype is None or vtype.dtype is None:
        return TypeProto()
    if vtype.container != TENSOR:
        raise ModelError(f"node {op.name!r} ({op.kind}) reads a {vtype}; only tensors have gradients; replace the op")
    return onnx.helper.make_tensor_type_proto(vtype.dtype.code, shapes_of(view).get(value))
