"""Two models in one graph: the float32 reference, and beside it shadows of single ops, or the whole candidate.

The graph is an ordinary mixed model with the low types and Casts of the candidate, and `emulate` makes it round. Its
inputs are the reference's. The measuring nodes are added afterwards: they are float32 and need no emulation.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.evidence.instrument.error_nodes import ErrorNodes
from amp_rewrite.evidence.instrument.pairing import Pairing
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.build import bodies
from amp_rewrite.ir.builder import new_cast, new_node
from amp_rewrite.ir.graphs import names_read, needed
from amp_rewrite.ir.schema import TENSOR
from amp_rewrite.ir.view import MAIN, Op, OpId, ValueId, View

RESULT = "measured"
"""The output that `error_nodes.read` reads, pair by pair."""


@dataclass(frozen=True)
class Measuring:
    """A mixed model whose outputs are pairs of values, and nodes that measure them in its emulated twin."""

    model: Model
    nodes: tuple[NodeProto, ...]
    initializers: tuple[TensorProto, ...]
    result: str

    def on(self, twin: Model) -> Model:
        """Return the twin of `model` with one output, for `error_nodes.read`, in place of all values."""
        proto = clone(twin.proto)
        proto.graph.node.extend(self.nodes)
        proto.graph.initializer.extend(self.initializers)
        del proto.graph.output[:]
        proto.graph.output.append(helper.make_tensor_value_info(self.result, TensorProto.FLOAT, None))
        return replace(twin, proto=proto)


def with_shadows(pairing: Pairing, low: DType, values: Sequence[ValueId]) -> Measuring:
    """Return a graph that measures each of these values, computed by its op from the reference's values.

    Paired inputs of the op come from the reference, rounded to their type in the candidate; unpaired ones (weights,
    inserted ops, inlined functions) are computed as in the candidate.
    """
    graph = _Merged(pairing, low)
    graph.add_shadows(values)
    return graph.measuring(values)


def with_candidate(pairing: Pairing, low: DType, values: Sequence[ValueId]) -> Measuring:
    """Return a graph that measures the error of these values of the candidate as it runs."""
    graph = _Merged(pairing, low)
    graph.add_candidate()
    return graph.measuring(values)


def with_shapes(pairing: Pairing, low: DType, values: Sequence[ValueId]) -> Model:
    """Return a graph of both models that outputs the shapes of each value in the candidate and in the reference."""
    graph = _Merged(pairing, low)
    graph.add_candidate()
    return graph.shaped(values)


class _Merged:
    """The graph under construction. `names` maps the candidate's values to names in it."""

    def __init__(self, pairing: Pairing, low: DType) -> None:
        self.pairing, self.low = pairing, low
        self.reference, self.view = pairing.reference, pairing.candidate
        names = (*self.reference.names, *self.view.names)
        mark = "/" * (1 + max(len(name) - len(name.lstrip("/")) for name in names))
        self.theirs, self.mine, self.rounded = f"{mark}reference/", f"{mark}candidate/", f"{mark}rounded/"
        self.error_nodes = ErrorNodes(f"{mark}gauge/", low)
        self.result = f"{mark}{RESULT}"
        self.inputs = {v.name for v in self.reference.model.proto.graph.input}
        self.frame = clone(self.reference.model.proto.graph)
        _rename(self.frame, {}, self.theirs, self.inputs)
        self.nodes: list[NodeProto] = list(self.frame.node)
        self.initializers: list[TensorProto] = list(self.frame.initializer)
        self.names: dict[ValueId, str] = {}

    def add_candidate(self) -> None:
        """Add the whole candidate, fed with the reference's inputs in its own types."""
        view = self.view
        graph = clone(view.model.proto.graph)
        _rename(graph, {}, self.mine)
        theirs = {self._name_of_reference(v): v for v in self.reference.scopes[MAIN].inputs}
        fed = {view.value_name(v): v for v in view.scopes[MAIN].inputs}
        for name, value in fed.items():
            if name in self.inputs:
                self.nodes.append(self._in_type(name, self.mine + name, theirs[name], value))
            elif view.values[value].tensor is None:
                raise ModelError(f"the candidate has an input {name!r}, and the reference has none of that name")
        shared = {self.mine + name for name in fed if name in self.inputs}
        self.initializers += [tensor for tensor in graph.initializer if tensor.name not in shared]
        self.frame.sparse_initializer.extend(graph.sparse_initializer)
        self.frame.value_info.extend(graph.value_info)
        self.nodes += graph.node
        self.names = {v.id: self.mine + v.name for v in view.values if v.scope == MAIN}

    def _in_type(self, source: str, target: str, theirs: ValueId, mine: ValueId) -> NodeProto:
        before, after = self.reference.types[theirs], self.view.types[mine]
        if before == after or after is None or after.dtype is None:
            return new_node("Identity", [source], target, target)
        if after.container != TENSOR:
            raise ModelError(
                f"{source!r} is {before} in the reference and {after} in the candidate; no Cast converts between them"
            )
        return new_cast(source, target, after.dtype, name=target)

    def add_shadows(self, values: Sequence[ValueId]) -> None:
        """Add shadows of the producers of these values, and of unpaired ops upstream."""
        for op in self._with_feeders({self.view.values[v].producer for v in values}):
            for value in reads(self.view, op):
                self._provide(value)
            self.nodes.append(self._shadow(op))

    def _with_feeders(self, ops: Iterable[OpId | None]) -> list[Op]:
        """Return the ops and the producers of their unpaired inputs, in topological order."""
        feeders: set[OpId] = set()
        pending = list(ops)
        while pending:
            op = pending.pop()
            if op is not None and op not in feeders:
                feeders.add(op)
                inputs = reads(self.view, self.view.ops[op])
                pending += [self.view.values[v].producer for v in inputs if v not in self.pairing.values]
        return [self.view.ops[op] for op in sorted(feeders)]

    def _provide(self, value: ValueId) -> None:
        """Name an input of a shadow: the reference's value in the candidate's type, or a weight."""
        if value in self.names:
            return
        name, theirs = self.view.value_name(value), self.pairing.values.get(value)
        if theirs is None:  # a weight; results of ops are named by their shadow
            tensor = self.view.values[value].tensor
            assert tensor is not None
            copy = clone(tensor)
            copy.name = self.names[value] = self.mine + name
            self.initializers.append(copy)
            return
        source = self.names[value] = self._name_of_reference(theirs)
        if self.reference.types[theirs] != self.view.types[value]:
            self.names[value] = self.rounded + name
            self.nodes.append(self._in_type(source, self.names[value], theirs, value))

    def _shadow(self, op: Op) -> NodeProto:
        """Return a copy of the op that reads the provided inputs; only measuring nodes read its paired results."""
        visible = {self.view.value_name(v): self.names[v] for v in reads(self.view, op)}
        results = {v: self.mine + self.view.value_name(v) for v in op.outputs if v is not None}
        node = clone(op.node)
        _rename_node(node, {**visible, **{self.view.value_name(v): name for v, name in results.items()}}, self.mine)
        self.names.update({v: name for v, name in results.items() if v not in self.pairing.values})
        return node

    def measuring(self, values: Sequence[ValueId]) -> Measuring:
        """Return the model reduced to the measured values, and its measuring nodes."""
        gauging: list[NodeProto] = []
        outputs: list[ValueInfoProto] = []
        rows = []
        for number, value in enumerate(values):
            names = []
            for side, name, dtype in self._sides(value):
                outputs.append(ValueInfoProto(name=name))
                if dtype is not None and dtype is not DType.FLOAT and not dtype.low:
                    target = f"{self.error_nodes.row(number)}/{side}"
                    gauging.append(new_cast(name, target, DType.FLOAT, name=target))
                    name = target
                names.append(name)
            is_low = self.view.dtype(value) is self.low
            gauging += self.error_nodes.nodes(number, *names, is_low=is_low)
            rows.append(self.error_nodes.row(number))
        gauging += self.error_nodes.packed(rows, self.result)
        read = set(names_read(gauging))
        held = tuple(t for t in self.error_nodes.initializers if t.name in read)
        return Measuring(self._assembled(self.nodes, outputs), tuple(gauging), held, self.result)

    def shaped(self, values: Sequence[ValueId]) -> Model:
        """Return the model that outputs two shapes per value."""
        nodes, results = list(self.nodes), []
        for number, value in enumerate(values):
            for side, name, _ in self._sides(value):
                target = f"{self.error_nodes.row(number)}/{side}"
                nodes.append(new_node("Shape", [name], target, target))
                results.append(helper.make_tensor_value_info(target, TensorProto.INT64, None))
        return self._assembled(nodes, results)

    def _sides(self, value: ValueId) -> Iterator[tuple[str, str, DType | None]]:
        """Yield both sides of a pair: side, name in this graph, type."""
        theirs = self.pairing.measured[value]
        yield "candidate", self.mine + self.view.value_name(value), self.view.dtype(value)
        yield "reference", self._name_of_reference(theirs), self.reference.dtype(theirs)

    def _assembled(self, nodes: Sequence[NodeProto], results: Sequence[ValueInfoProto]) -> Model:
        nodes = needed(nodes, [v.name for v in results])
        read = set(names_read(nodes))
        source = self.reference.model
        proto = ModelProto(ir_version=max(source.proto.ir_version, self.view.model.proto.ir_version))
        for domain, version in {**self.reference.opsets, **self.view.opsets}.items():
            proto.opset_import.add(domain=domain, version=version)
        graph = proto.graph
        graph.name = "measured"
        graph.node.extend(nodes)
        graph.input.extend(source.proto.graph.input)
        graph.initializer.extend(t for t in self.initializers if t.name in read or t.name in self.inputs)
        graph.sparse_initializer.extend(s for s in self.frame.sparse_initializer if s.values.name in read)
        graph.value_info.extend(v for v in self.frame.value_info if v.name in read)
        graph.output.extend(results)
        return Model(proto, source.path)

    def _name_of_reference(self, value: ValueId) -> str:
        name = self.reference.value_name(value)
        return name if name in self.inputs else self.theirs + name


def reads(view: View, op: Op) -> Iterator[ValueId]:
    """Yield the values of the main graph that an op reads, in its bodies too."""
    yield from (v for v in op.inputs if v is not None and view.values[v].scope == MAIN)
    for body in op.bodies:
        for inner in view.scopes[body].ops:
            yield from reads(view, view.ops[inner])
        yield from (v for v in view.scopes[body].outputs if view.values[v].scope == MAIN)


def _rename(graph: GraphProto, outer: Mapping[str, str], prefix: str, fixed: Container[str] = ()) -> None:
    """Prefix the graph's own names except fixed ones, and rename outer names by the mapping."""
    own = [v.name for v in graph.input] + [t.name for t in graph.initializer]
    own += [s.values.name for s in graph.sparse_initializer] + [name for node in graph.node for name in node.output]
    visible = {**outer, **{name: name if name in fixed else prefix + name for name in own if name}}
    for named in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        named.name = visible.get(named.name, named.name)
    for sparse in graph.sparse_initializer:
        sparse.values.name = visible[sparse.values.name]
    for node in graph.node:
        _rename_node(node, visible, prefix)
    graph.ClearField("quantization_annotation")


def _rename_node(node: NodeProto, visible: Mapping[str, str], prefix: str) -> None:
    if node.name:
        node.name = prefix + node.name
    for names in (node.input, node.output):
        names[:] = [visible.get(name, name) for name in names]
    for _, body in bodies(node):
        _rename(body, visible, prefix)
