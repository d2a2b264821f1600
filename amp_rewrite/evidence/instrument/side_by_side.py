"""Two models in one graph: the float32 reference, and beside it shadows of single ops, or the whole candidate.

The graph is an ordinary mixed model with the low types and Casts of the candidate, and `emulate` makes it round. Its
inputs are the reference's. The measuring nodes are added afterwards: they are float32 and need no emulation.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from onnx import ModelProto, NodeProto, ValueInfoProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.evidence.instrument.error_nodes import ErrorNodes
from amp_rewrite.evidence.instrument.pairing import Pairing
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone, refill
from amp_rewrite.ir.builder import NodeBuilder, declared, new_cast, new_node
from amp_rewrite.ir.dataflow import reach
from amp_rewrite.ir.graphs import all_nodes, names_read, needed, rename, rename_node
from amp_rewrite.ir.names import unused_prefix
from amp_rewrite.ir.schema import TENSOR
from amp_rewrite.ir.versions import FIRST_WHERE
from amp_rewrite.ir.view import MAIN, Op, OpId, ValueId, View


@dataclass(frozen=True)
class MeasuredModel:
    """A mixed model whose outputs are pairs of values, and nodes that measure them in its emulated twin."""

    model: Model
    nodes: tuple[NodeProto, ...]

    def on(self, twin: Model) -> Model:
        """Return the twin of `model` with one output, for `error_nodes.read`, in place of all values."""
        proto = clone(twin.proto)
        proto.graph.node.extend(self.nodes)
        refill(proto.graph, "output", [declared(self.nodes[-1].output[0], DType.FLOAT, None)])
        return replace(twin, proto=proto)


def with_shadows(pairing: Pairing, values: Sequence[ValueId]) -> MeasuredModel:
    """Return a graph that measures each of these values, computed by its op from the reference's values.

    Paired inputs of the op come from the reference, rounded to their type in the candidate; unpaired ones (weights,
    inserted ops, inlined functions) are computed as in the candidate.
    """
    return _Merged(pairing).with_shadows(values).measuring(values)


def with_candidate(pairing: Pairing, values: Sequence[ValueId]) -> MeasuredModel:
    """Return a graph that measures the error of these values of the candidate as it runs."""
    return _Merged(pairing).with_candidate().measuring(values)


def with_shapes(pairing: Pairing, values: Sequence[ValueId]) -> Model:
    """Return a graph of both models that outputs the shapes of each value in the candidate and in the reference."""
    return _Merged(pairing).with_candidate().shaped(values)


class _Merged:
    """The graph under construction: the reference's nodes as they are, and nodes of the candidate under new names."""

    def __init__(self, pairing: Pairing) -> None:
        self.pairing = pairing
        self.reference, self.view = pairing.reference, pairing.candidate
        self.stem = unused_prefix("compared/", self.reference.names | self.view.names)
        self.inputs = {self.reference.value_name(v): v for v in self.reference.scopes[MAIN].inputs}
        self.frame = clone(self.reference.model.proto.graph)
        self.provided: dict[ValueId, str] = {}

    def with_candidate(self) -> _Merged:
        """Add the whole candidate, fed with the reference's inputs in its own types."""
        view = self.view
        graph = clone(view.model.proto.graph)
        rename(graph, self._mine)
        _drop_names(graph.node)
        fed = {view.value_name(v): v for v in view.scopes[MAIN].inputs}
        for name, value in fed.items():
            if name in self.inputs:
                self.frame.node.append(self._in_type(name, self._mine(name), self.inputs[name], value))
            elif view.values[value].tensor is None:
                raise ModelError(f"the candidate has an input {name!r}, and the reference has none of that name")
        shared = {self._mine(name) for name in fed if name in self.inputs}
        self.frame.initializer.extend(tensor for tensor in graph.initializer if tensor.name not in shared)
        self.frame.sparse_initializer.extend(graph.sparse_initializer)
        self.frame.value_info.extend(graph.value_info)
        self.frame.node.extend(graph.node)
        return self

    def _mine(self, name: str) -> str:
        """Return the name of a value of the candidate in this graph."""
        return f"{self.stem}candidate/{name}"

    def _in_type(self, source: str, target: str, theirs: ValueId, mine: ValueId) -> NodeProto:
        before, after = self.reference.types[theirs], self.view.types[mine]
        if before == after or after is None or after.dtype is None:
            return new_node("Identity", [source], target, target)
        if after.container != TENSOR:
            raise ModelError(
                f"{source!r} is {before} in the reference and {after} in the candidate; no Cast converts between them"
            )
        return new_cast(source, target, after.dtype, name=target)

    def with_shadows(self, values: Sequence[ValueId]) -> _Merged:
        """Add shadows of the producers of these values, and of unpaired ops upstream."""
        for op in upstream(self.view, (self.view.values[v].producer for v in values), self.pairing.values):
            for value in reads(self.view, op):
                self._provide(value)
            self.frame.node.append(self._shadow(op))
        return self

    def _provide(self, value: ValueId) -> None:
        """Name an input of a shadow: the reference's value in the candidate's type, or a weight."""
        if value in self.provided:
            return
        name, theirs = self.view.value_name(value), self.pairing.values.get(value)
        if theirs is None:  # a weight; results of ops are named by their shadow
            self.provided[value] = self._mine(name)
            tensor = self.frame.initializer.add()
            tensor.CopyFrom(self.view.values[value].tensor)
            tensor.name = self._mine(name)
            return
        source = self.provided[value] = self.reference.value_name(theirs)
        if self.reference.types[theirs] != self.view.types[value]:
            self.provided[value] = f"{self.stem}rounded/{name}"
            self.frame.node.append(self._in_type(source, self.provided[value], theirs, value))

    def _shadow(self, op: Op) -> NodeProto:
        """Return a copy of the op that reads the provided inputs; only measuring nodes read its paired results."""
        read = {self.view.value_name(v): self.provided[v] for v in reads(self.view, op)}
        node = clone(op.node)
        rename_node(node, lambda name: read.get(name) or self._mine(name))
        _drop_names([node])
        unpaired = (v for v in op.results if v not in self.pairing.values)
        self.provided.update({v: self._mine(self.view.value_name(v)) for v in unpaired})
        return node

    def measuring(self, values: Sequence[ValueId]) -> MeasuredModel:
        """Return the model reduced to the measured values, and its measuring nodes."""
        gauge = ErrorNodes(f"{self.stem}error", self.pairing.low)
        outputs: list[ValueInfoProto] = []
        for value in values:
            names = []
            for name, dtype in self._sides(value):
                outputs.append(ValueInfoProto(name=name))
                widened = dtype is None or dtype is DType.FLOAT or dtype.low  # in the twin
                names.append(name if widened else gauge.cast(name, DType.FLOAT))
            gauge.measure(*names, is_low=self.view.dtype(value) is self.pairing.low)
        gauge.pack(f"{self.stem}errors")
        return MeasuredModel(self._assembled(outputs), tuple(gauge.nodes))

    def shaped(self, values: Sequence[ValueId]) -> Model:
        """Return the model that outputs two shapes per value."""
        shapes = NodeBuilder(set(), opset=FIRST_WHERE, region=f"{self.stem}shape")
        names = [shapes.op("Shape", name) for value in values for name, _ in self._sides(value)]
        self.frame.node.extend(shapes.nodes)
        return self._assembled([declared(name, DType.INT64, None) for name in names])

    def _sides(self, value: ValueId) -> Iterator[tuple[str, DType | None]]:
        """Yield name and type of both sides of a pair, in this graph: the candidate's, the reference's."""
        theirs = self.pairing.measured[value]
        yield self._mine(self.view.value_name(value)), self.view.dtype(value)
        yield self.reference.value_name(theirs), self.reference.dtype(theirs)

    def _assembled(self, results: Sequence[ValueInfoProto]) -> Model:
        """Return the model of the nodes and weights that these outputs need."""
        nodes = needed(self.frame.node, [v.name for v in results])
        read = set(names_read(nodes))
        source = self.reference.model
        proto = ModelProto(ir_version=max(source.proto.ir_version, self.view.model.proto.ir_version))
        for domain, version in {**self.reference.opsets, **self.view.opsets}.items():
            proto.opset_import.add(domain=domain, version=version)
        graph = proto.graph
        graph.name = "measured"
        graph.node.extend(nodes)
        graph.input.extend(source.proto.graph.input)
        graph.initializer.extend(t for t in self.frame.initializer if t.name in read or t.name in self.inputs)
        graph.sparse_initializer.extend(s for s in self.frame.sparse_initializer if s.values.name in read)
        graph.value_info.extend(v for v in self.frame.value_info if v.name in read)
        graph.output.extend(results)
        return Model(proto, source.path)


def reads(view: View, op: Op) -> Iterator[ValueId]:
    """Yield the values of the main graph that an op reads, in its bodies too."""
    yield from (v for v in op.inputs if v is not None and view.values[v].scope == MAIN)
    for body in op.bodies:
        for inner in view.scopes[body].ops:
            yield from reads(view, view.ops[inner])
        yield from (v for v in view.scopes[body].outputs if view.values[v].scope == MAIN)


def upstream(view: View, ops: Iterable[OpId | None], known: Container[ValueId]) -> list[Op]:
    """Return ops and the ops whose results they read, directly or through others, in topological order.

    The walk does not pass known values.
    """

    def makers(op: OpId) -> Iterator[OpId]:
        unknown = (view.values[v] for v in reads(view, view.ops[op]) if v not in known)
        return (value.producer for value in unknown if value.producer is not None)

    return [view.ops[op] for op in sorted(reach({op: None for op in ops if op is not None}, makers))]


def _drop_names(nodes: Iterable[NodeProto]) -> None:
    """Drop the names of nodes and of those in their bodies, which the reference's nodes may have."""
    for node in all_nodes(nodes):
        node.ClearField("name")
