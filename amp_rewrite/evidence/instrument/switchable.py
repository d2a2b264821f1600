"""Switchable twin: one float32 model that acts as any of a draft's mixed models, selected by an extra input.

Every possible rounding of a value to the low type, because its producer or reader may be low, is an If on one element
of a boolean input. An op with heavy weights is inside an If as a whole, one branch with rounded weights, so no weight
is copied between branches. Trying other colors then takes one run with another mask, not a conversion and a session.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, NodeProto, TensorProto

from amp_rewrite.decide.coloring.coloring import Coloring
from amp_rewrite.dtypes import DType
from amp_rewrite.evidence.data.feed import Batch
from amp_rewrite.files.loading import HEAVY
from amp_rewrite.files.model import Model, baked
from amp_rewrite.files.protos import clone, refill
from amp_rewrite.files.tensors import nbytes
from amp_rewrite.ir.builder import NodeBuilder, declared, new_branch, new_if
from amp_rewrite.ir.dataflow import made_variable, read_variable
from amp_rewrite.ir.exact_ops import exact
from amp_rewrite.ir.graphs import bodies
from amp_rewrite.ir.names import numbered
from amp_rewrite.ir.versions import FIRST_BFLOAT16_CAST, FIRST_CLIP_WITH_INPUTS, FIRST_IR_WITH_FREE_INITIALIZERS
from amp_rewrite.ir.view import MAIN, Op, OpId, Role, Scope, Use, Value, ValueId, View
from amp_rewrite.runtime.runner import Runner

Vertex = tuple[OpId, str]
"""A type variable of an op."""
_OUT: Vertex = (OpId(-1), "")
"""The reader of an output of the model."""


@dataclass(frozen=True, slots=True)
class Switch:
    """Condition for rounding a value on its way to a reader: either vertex is low, or `always`.

    `maker` is None if no low op can produce the value, `reader` None if the reader accepts its type unchanged.
    `exact`: a low maker already gives low values, which need no rounding.
    """

    maker: Vertex | None
    reader: Vertex | None
    exact: bool = False
    always: bool = False

    def on(self, coloring: Coloring) -> bool:
        """True if the value is rounded under a coloring."""
        made_low = self.maker is not None and coloring.lowered(*self.maker)
        if made_low and self.exact:
            return False
        return self.always or made_low or (self.reader is not None and coloring.lowered(*self.reader))


@dataclass(frozen=True)
class SwitchableModel:
    """The twin, its extra input, and the switch of each element. `outputs`: its names by the model's output names."""

    model: Model
    input: str
    switches: tuple[Switch, ...]
    outputs: Mapping[str, str]
    may: frozenset[Vertex]

    def covers(self, coloring: Coloring) -> bool:
        """True if the twin can act as a coloring: every low vertex there may be low here."""
        return self.may.issuperset(coloring.low)

    def mask(self, coloring: Coloring) -> NDArray[np.bool_]:
        """Return the extra input for a coloring."""
        return np.array([switch.on(coloring) for switch in self.switches], np.bool_)

    def run(self, runner: Runner, mask: NDArray[np.bool_], batch: Batch) -> Mapping[str, Any]:
        """Return the outputs for a batch, by the model's names; `runner` is this twin, open."""
        results = runner.run({**batch, self.input: mask}, list(dict.fromkeys(self.outputs.values())))
        return {name: results[of] for name, of in self.outputs.items()}


def switchable_model(
    view: View,
    may: Collection[Vertex],
    to: DType,
    *,
    io: Mapping[ValueId, DType] | None = None,
    saturate: Collection[ValueId] = (),
) -> SwitchableModel | None:
    """Return the switchable twin of a view, in which the vertices `may` can be low.

    It agrees with the emulation of `apply(view, plan_casts(...))` up to float32 rounding, but ops do not round
    inside. `io` and `saturate` are as for `plan_casts`. Return None if it cannot be built: for models with a low
    type, of an opset before 11 (13 for bfloat16), of IR before 4, or if `may` is empty. O(nodes + uses).
    """
    opset = view.opsets.get("", 0)
    first = FIRST_BFLOAT16_CAST if to is DType.BFLOAT16 else FIRST_CLIP_WITH_INPUTS
    if view.low_types or opset < first or view.model.proto.ir_version < FIRST_IR_WITH_FREE_INITIALIZERS or not may:
        return None
    return _SwitchBuilder(view, frozenset(may), to, dict(io or {}), frozenset(saturate)).build()


@dataclass
class _SwitchBuilder:
    """One walk over a copy of the model. `names` maps a value to the name that a reader reads instead."""

    view: View
    may: frozenset[Vertex]
    to: DType
    io: Mapping[ValueId, DType]
    saturate: frozenset[ValueId]
    switches: dict[Switch, str] = field(default_factory=dict)
    names: dict[tuple[ValueId, Vertex | None], str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    initializers: list[TensorProto] = field(default_factory=list)
    rounded: dict[ValueId, str] = field(default_factory=dict)

    def build(self) -> SwitchableModel:
        self.taken = set(self.view.names)
        proto = clone(self.view.model.proto)
        proto.ClearField("training_info")
        name = self._fresh("low")
        self.head = self._nodes()
        self.limits = [self.head.scalar(bound, DType.FLOAT) for bound in (-self.to.max, self.to.max)]
        self._graph(proto.graph, self.view.scopes[MAIN])
        count = len(self.switches)
        split = self._nodes()
        split.split_evenly(name, 0, results=count)  # onnxruntime 1.23 reads no long list of sizes
        split.nodes[-1].output[:] = self.switches.values()
        proto.graph.input.append(declared(name, DType.BOOL, [count]))
        proto.graph.initializer.extend(self.initializers)
        refill(proto.graph, "node", [*split.nodes, *self.head.nodes, *proto.graph.node])
        model = replace(self.view.model, proto=proto)
        return SwitchableModel(model, name, tuple(self.switches), self.outputs, self.may)

    def _fresh(self, name: str) -> str:
        return numbered(name, self.taken)

    def _nodes(self) -> NodeBuilder:
        return NodeBuilder(self.taken, opset=self.view.opsets.get("", 0), region="low")

    def _switch(self, switch: Switch) -> str:
        if switch not in self.switches:
            self.switches[switch] = self._fresh(f"low/{len(self.switches)}")
        return self.switches[switch]

    def _graph(self, graph: GraphProto, scope: Scope) -> None:
        nodes = self._nodes()
        for value in self.view.values_of[scope.id]:
            if value.producer is None:
                self._versions(nodes, value)
        for op_id, node in zip(scope.ops, graph.node, strict=True):
            op = self.view.ops[op_id]
            nodes.append(self._node(op, node))
            for result in op.outputs:
                if result is not None:
                    self._versions(nodes, self.view.values[result])
        for formal, value_id in zip(graph.output, scope.outputs, strict=True):
            name = self.names.get((value_id, _OUT if scope.id == MAIN else None), formal.name)
            if scope.id == MAIN:
                self.outputs[formal.name] = name
            formal.name = name
        refill(graph, "node", nodes.nodes)

    def _node(self, op: Op, node: NodeProto) -> NodeProto:
        for slot, value in enumerate(op.inputs):
            if value is not None:
                node.input[slot] = self.names.get((value, self._reader(Use(op.id, slot))), node.input[slot])
        for body, (_, graph) in zip(op.bodies, bodies(node), strict=True):
            self._graph(graph, self.view.scopes[body])
        weights = self._heavy(op)
        return self._either(op, node, weights) if weights else node

    def _versions(self, nodes: NodeBuilder, value: Value) -> None:
        if self.view.tensor_dtype(value.id) is not DType.FLOAT:
            return
        readers = dict.fromkeys(self._reader(use) for use in self.view.uses[value.id])
        if self.view.constant(value.id) is None:
            if value.id in self.view.yielded:
                readers[_OUT if value.public else None] = None
            for reader in readers:
                when = self._when(value, reader)
                if when.maker or when.reader or when.always:
                    self.names[value.id, reader] = self._rounding(nodes, value, self._switch(when))
        elif not self._is_heavy(value.id):  # a heavy one is switched at its readers
            for reader in filter(None, readers):
                switch = self._switch(Switch(None, reader))
                self.names[value.id, reader] = nodes.op("Where", switch, self._rounded(value.id), value.name)

    def _when(self, value: Value, reader: Vertex | None) -> Switch:
        port = reader == _OUT or (value.role is not Role.RESULT and value.public)
        low = port and self.io.get(value.id, DType.FLOAT).low
        maker, op = made_variable(self.view, value.id), self.view.producer(value.id)
        if maker not in self.may or op is None:
            return Switch(None, None if reader == _OUT else reader, always=low)
        reads = [read_variable(op, slot) == maker for slot, read in enumerate(op.inputs) if read is not None]
        return Switch(maker, None if reader == _OUT else reader, exact(op) and any(reads), always=low)

    def _reader(self, use: Use) -> Vertex | None:
        """Return the vertex that may read an input in the low type, or None."""
        op = self.view.ops[use.op]
        vertex = read_variable(op, use.slot) if op.kind != "Cast" else None
        return vertex if vertex in self.may else None

    def _rounding(self, nodes: NodeBuilder, value: Value, switch: str) -> str:
        """Append an If that rounds or copies; return its result."""
        op = self.view.producer(value.id)
        clamps = value.id in self.saturate or (op is not None and op.kind == "ConstantOfShape")

        def rounded(branch: NodeBuilder) -> str:
            source = branch.op("Clip", value.name, *self.limits) if clamps else value.name
            return branch.cast(branch.cast(source, self.to), DType.FLOAT)

        return nodes.choice(switch, rounded, lambda branch: branch.op("Identity", value.name))

    def _is_heavy(self, value: ValueId) -> bool:
        tensor = self.view.constant(value)
        return tensor is not None and nbytes(tensor) > HEAVY

    def _rounded(self, value: ValueId) -> str:
        """Return the name of a constant's rounded version; a heavy one stays in its file, in the low type."""
        if value not in self.rounded:
            tensor = self.view.constant(value)
            assert tensor is not None
            name = self._fresh(f"{self.view.value_name(value)}/{self.to.spelling}")
            weight = baked(tensor, self.to, name=name, model=self.view.model)
            heavy = self._is_heavy(value)
            self.initializers.append(weight if heavy else baked(weight, DType.FLOAT, name=name, model=self.view.model))
            self.rounded[value] = self.head.cast(name, DType.FLOAT) if heavy else name
        return self.rounded[value]

    def _heavy(self, op: Op) -> dict[int, Vertex]:
        heavy = [slot for slot, value in enumerate(op.inputs) if value is not None and self._is_heavy(value)]
        vertices = {slot: self._reader(Use(op.id, slot)) for slot in heavy}
        return {slot: vertex for slot, vertex in vertices.items() if vertex is not None}

    def _either(self, op: Op, node: NodeProto, weights: Mapping[int, Vertex]) -> NodeProto:
        """Return an If around an op: with rounded weights, or with those of the model.

        The first variable switches all heavy weights, since no known op has them at two variables.
        """
        branches = []
        for word in ("low", "high"):
            inner = clone(node)
            for slot in weights if word == "low" else ():
                value = op.inputs[slot]
                assert value is not None
                inner.input[slot] = self._rounded(value)
            inner.output[:] = [name and self._fresh(f"{name}/{word}_branch") for name in node.output]
            branches.append(new_branch([inner], list(filter(None, inner.output))))
        condition = self._switch(Switch(None, next(iter(weights.values()))))
        outer = new_if(condition, "", *branches, name=node.name)
        outer.output[:] = filter(None, node.output)
        return outer
