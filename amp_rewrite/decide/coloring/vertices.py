"""The painter's graph: one vertex for each group of float32 type variables that must share a color."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import networkx as nx
import onnx
from networkx.utils import UnionFind

from amp_rewrite.decide.coloring.gate import Gate, GateRefusal, computes_float32_inside
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import exposed, made_variable, read_variable
from amp_rewrite.ir.schema import TENSOR
from amp_rewrite.ir.view import Op, OpId, Role, TypeVariable, View
from amp_rewrite.settings.list_entry import Entry
from amp_rewrite.settings.op_lists import OpLists


class Vertex(NamedTuple):
    """A group of type variables of one op: mostly one; several where no kernel mixes their types.

    `refusal` is the reason for which the group cannot be lowered; None if it can.
    """

    op: OpId
    variables: tuple[str, ...]
    entry: Entry
    refusal: GateRefusal | None


@dataclass(frozen=True)
class Vertices:
    """Vertices in op order, and `graph` with an edge from the vertex that makes a float32 value to each that reads it.

    Two vertices of one op are never joined: paint does not cross from T to U of a normalization, nor through a Cast.
    Ops with bodies and ops without a schema have no vertex, so they stop every walk. `sequences` are groups of vertices
    joined by sequences, which no Cast can convert. `sealed`: for each sequence, True if it reaches a place that keeps
    its type (a model output, a body's edge, an op without vertex).
    """

    all: tuple[Vertex, ...]
    graph: nx.DiGraph[int]
    of: Mapping[tuple[OpId, str], int]
    by_op: Mapping[OpId, tuple[int, ...]]
    sequences: tuple[tuple[int, ...], ...]
    sealed: tuple[bool, ...]

    @classmethod
    def build(cls, view: View, entries: tuple[Entry, ...], gate: Gate) -> Vertices:
        """Return the vertices of a view. O(nodes + uses)."""
        return _VertexBuilder(view, entries, gate).vertices()


def entries_of(view: View, lists: OpLists) -> tuple[Entry, ...]:
    """Return the list entry of each op, by op id."""
    plain: dict[str, Entry | None] = {}  # the entry of a kind whose ops all have the same
    entries = []
    for op in view.ops:
        if op.kind not in plain:
            first = next(iter(lists.entries_of(op.domain, op.op_type)), None)
            plain[op.kind] = first if first is not None and first.condition is None else None
        entries.append(plain[op.kind] or _entry(op, lists))
    return tuple(entries)


def _entry(op: Op, lists: OpLists) -> Entry:
    plain = (onnx.AttributeProto.INT, onnx.AttributeProto.FLOAT, onnx.AttributeProto.STRING)
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in op.node.attribute if a.type in plain}
    return lists.classify(op.domain, op.op_type, attributes, len(op.operands))


class _Group(NamedTuple):
    """The part of a vertex that is the same for all ops that are alike, and its slots."""

    variables: tuple[str, ...]
    refusal: GateRefusal | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


_NO_VERTEX = -1


class _VertexBuilder:
    def __init__(self, view: View, entries: tuple[Entry, ...], gate: Gate) -> None:
        self.view = view
        self.entries = entries
        self.gate = gate
        self.all: list[Vertex] = []
        self.of: dict[tuple[OpId, str], int] = {}
        self.by_op: dict[OpId, tuple[int, ...]] = {}
        self.graph: nx.DiGraph[int] = nx.DiGraph()
        self.makers = [_NO_VERTEX] * len(view.values)
        """The vertex that makes a float32 value."""

    def vertices(self) -> Vertices:
        known: dict[object, tuple[_Group, ...]] = {}  # most ops of a model are like many others
        for op in self.view.ops:
            variables = self.view.variables[op.id]
            alike = op.signature, computes_float32_inside(op), tuple([v[1:] for v in variables])
            groups = known.get(alike)
            if groups is None:
                groups = known[alike] = self._groups(op, variables)
            if groups:
                self._add(op, groups)
        sequences, sealed = self._sequences()
        return Vertices(tuple(self.all), self.graph, self.of, self.by_op, sequences, sealed)

    def _groups(self, op: Op, variables: tuple[TypeVariable, ...]) -> tuple[_Group, ...]:
        """Return the float32 variables of an op in groups that must share a color, in order, with their ports."""
        floats = {v.name: v for v in variables if v.type is not None and v.type.dtype is DType.FLOAT}
        if not floats:
            return ()
        lowerable = self.gate.lowerable_groups(self.view, op)
        grouped = {name: group for group in lowerable.groups for name in group}
        return tuple(
            _Group(
                group,
                lowerable.refusals.get(group[0]),
                tuple(slot for name in group for slot in floats[name].inputs),
                tuple(slot for name in group for slot in floats[name].outputs),
            )
            for group in dict.fromkeys(grouped.get(name, (name,)) for name in floats)
        )

    def _add(self, op: Op, groups: tuple[_Group, ...]) -> None:
        first = len(self.all)
        for at, group in enumerate(groups, first):
            self.all.append(Vertex(op.id, group.variables, self.entries[op.id], group.refusal))
            for name in group.variables:
                self.of[op.id, name] = at
            self.graph.add_node(at)
            read = {self.makers[value] for slot in group.inputs if (value := op.inputs[slot]) is not None}
            self.graph.add_edges_from((source, at) for source in sorted(read - {_NO_VERTEX}))
        self.by_op[op.id] = tuple(range(first, len(self.all)))
        for at, group in enumerate(groups, first):
            for slot in group.outputs:
                value = op.outputs[slot]
                if value is not None and self.view.dtype(value) is DType.FLOAT:
                    self.makers[value] = at

    def _sequences(self) -> tuple[tuple[tuple[int, ...], ...], tuple[bool, ...]]:
        """Return groups of vertices that sequences join; True for each that reaches a place that keeps its type."""
        view = self.view
        if all(t is None or t.container == TENSOR for t in view.types):  # the common case
            return (), ()
        types = ((value, view.types[value.id]) for value in view.values)
        values = [v for v, t in types if t is not None and t.dtype is DType.FLOAT and t.container != TENSOR]
        ops = {v.producer for v in values if v.producer is not None} | {u.op for v in values for u in view.uses[v.id]}
        members = sorted(v for op in ops for v in self.by_op.get(op, ()))
        sets, open_ended = UnionFind(members), set[int]()
        for value in values:
            read = (read_variable(view.ops[use.op], use.slot) for use in view.uses[value.id])
            ports = [made_variable(view, value.id), *read]
            ends = [self.of.get(port) if port is not None else None for port in ports]
            joined = [v for v in ends if v is not None]
            sets.union(*joined)
            if value.role is Role.INPUT or exposed(view, value.id) or None in ends:
                open_ended.update(joined)
        sequences = tuple(sorted(tuple(sorted(group)) for group in sets.to_sets()))
        return sequences, tuple(any(v in open_ended or self.all[v].refusal for v in group) for group in sequences)
