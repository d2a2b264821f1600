"""The painter's graph: one vertex for each group of float32 type variables that must share a color."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import onnx

from amp_rewrite.decide.coloring.gate import Gate, Refusal, computes_float32_inside
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import exposed
from amp_rewrite.ir.schema import TENSOR
from amp_rewrite.ir.view import Op, OpId, Role, ValueId, Variable, View
from amp_rewrite.settings.list_entry import Entry
from amp_rewrite.settings.op_lists import OpLists


class Vertex(NamedTuple):
    """A group of type variables of one op: mostly one; several where no kernel mixes their types.

    `refusal` says why the group cannot be lowered; None when it can.
    """

    op: OpId
    variables: tuple[str, ...]
    entry: Entry
    refusal: Refusal | None


@dataclass(frozen=True)
class Vertices:
    """Vertices in op order, with edges from the vertex that makes a float32 value to each that reads it.

    Two vertices of one op are never joined: paint does not cross from T to U of a normalization, nor
    through a Cast. Ops with bodies and ops without a schema have no vertex, so that they stop every walk.
    `clusters` are groups of vertices joined by sequences, which no Cast can convert; `sealed` tells
    which of them reach a place that keeps its type (a model output, a body's edge, an op without vertex).
    """

    all: tuple[Vertex, ...]
    readers: tuple[tuple[int, ...], ...]
    sources: tuple[tuple[int, ...], ...]
    of: Mapping[tuple[OpId, str], int]
    by_op: Mapping[OpId, tuple[int, ...]]
    clusters: tuple[tuple[int, ...], ...]
    sealed: tuple[bool, ...]

    @classmethod
    def build(cls, view: View, entries: tuple[Entry, ...], gate: Gate) -> Vertices:
        """O(nodes + uses)."""
        return _Builder(view, entries, gate).vertices()


def entries_of(view: View, lists: OpLists) -> tuple[Entry, ...]:
    """What the lists say of each op, by op id."""
    plain: dict[str, Entry | None] = {}  # by kind, what is said of all ops of it
    found = []
    for op in view.ops:
        if op.kind not in plain:
            first = next(iter(lists.entries_of(op.domain, op.op_type)), None)
            plain[op.kind] = first if first is not None and first.condition is None else None
        found.append(plain[op.kind] or _entry(op, lists))
    return tuple(found)


def _entry(op: Op, lists: OpLists) -> Entry:
    attributes: dict[str, object] = {}
    for a in op.node.attribute:
        if a.type in (onnx.AttributeProto.INT, onnx.AttributeProto.FLOAT, onnx.AttributeProto.STRING):
            attributes[a.name] = onnx.helper.get_attribute_value(a)
    return lists.classify(op.domain, op.op_type, attributes, sum(v is not None for v in op.inputs))


class _Group(NamedTuple):
    """What a vertex of an op is, which it has in common with the vertices of all ops that are alike."""

    variables: tuple[str, ...]
    refusal: Refusal | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


_NOBODY = -1


class _Builder:
    def __init__(self, view: View, entries: tuple[Entry, ...], gate: Gate) -> None:
        self.view = view
        self.entries = entries
        self.gate = gate
        self.all: list[Vertex] = []
        self.of: dict[tuple[OpId, str], int] = {}
        self.by_op: dict[OpId, tuple[int, ...]] = {}
        self.sources: list[tuple[int, ...]] = []
        self.readers: list[list[int]] = []
        self.makers = [_NOBODY] * len(view.values)
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
        clusters, sealed = self._sequences()
        return Vertices(
            tuple(self.all),
            tuple(map(tuple, self.readers)),
            tuple(self.sources),
            self.of,
            self.by_op,
            clusters,
            sealed,
        )

    def _groups(self, op: Op, variables: tuple[Variable, ...]) -> tuple[_Group, ...]:
        """The float32 variables of an op in groups that must share a colour, in order, with their ports."""
        floats = {v.name: v for v in variables if v.type is not None and v.type.dtype is DType.FLOAT}
        if not floats:
            return ()
        passage = self.gate.passage(self.view, op)
        grouped = {name: group for group in passage.groups for name in group}
        return tuple(
            _Group(
                group,
                passage.refusals.get(group[0]),
                tuple(slot for name in group for slot in floats[name].inputs),
                tuple(slot for name in group for slot in floats[name].outputs),
            )
            for group in dict.fromkeys(grouped.get(name, (name,)) for name in floats)
        )

    def _add(self, op: Op, groups: tuple[_Group, ...]) -> None:
        """Add the vertices of an op, and the edges to them: what it reads is made before it."""
        first = len(self.all)
        for at, group in enumerate(groups, first):
            self.all.append(Vertex(op.id, group.variables, self.entries[op.id], group.refusal))
            for name in group.variables:
                self.of[op.id, name] = at
            values = [value for slot in group.inputs if (value := op.inputs[slot]) is not None]
            read = [made for value in values if (made := self.makers[value]) != _NOBODY]
            if len(read) > 1:
                read = sorted(set(read))
            self.sources.append(tuple(read))
            self.readers.append([])
            for source in read:
                self.readers[source].append(at)
        self.by_op[op.id] = tuple(range(first, len(self.all)))
        for at, group in enumerate(groups, first):
            for slot in group.outputs:
                value = op.outputs[slot]
                if value is not None and self.view.dtype(value) is DType.FLOAT:
                    self.makers[value] = at

    def _sequences(self) -> tuple[tuple[tuple[int, ...], ...], tuple[bool, ...]]:
        """The vertices that sequences join, and which of these groups reach a place that keeps its type."""
        if all(t is None or t.container == TENSOR for t in self.view.types):
            return (), ()
        parent = list(range(len(self.all)))
        open_ended: set[int] = set()
        for value in self.view.values:
            found = self.view.types[value.id]
            if found is None or found.dtype is not DType.FLOAT or found.container == TENSOR:
                continue
            source = self._source(value.id)
            sinks = [self._sink(use.op, use.slot) for use in self.view.uses[value.id]]
            joined = [v for v in (source, *sinks) if v is not None]
            for v in joined[1:]:
                parent[_root(parent, v)] = _root(parent, joined[0])
            if value.role is Role.INPUT or exposed(self.view, value.id) or None in (source, *sinks):
                open_ended.update(joined)
        clusters = self._clusters(parent)
        return clusters, tuple(any(v in open_ended or self.all[v].refusal for v in group) for group in clusters)

    def _source(self, value: ValueId) -> int | None:
        op = self.view.producer(value)
        if op is None or op.signature is None or op.bodies:
            return None
        name = op.signature.output_variable(op.outputs.index(value))
        return self.of.get((op.id, name)) if name is not None else None

    def _sink(self, reader: OpId, slot: int) -> int | None:
        op = self.view.ops[reader]
        if op.signature is None or op.bodies:
            return None
        name = op.signature.input_variable(slot)
        return self.of.get((op.id, name)) if name is not None else None

    def _clusters(self, parent: list[int]) -> tuple[tuple[int, ...], ...]:
        """Vertices that a sequence touches, by their common root."""
        found: dict[int, list[int]] = {}
        for vertex in range(len(self.all)):
            if self._touches_sequence(self.all[vertex]):
                found.setdefault(_root(parent, vertex), []).append(vertex)
        return tuple(tuple(members) for members in found.values())

    def _touches_sequence(self, vertex: Vertex) -> bool:
        op = self.view.ops[vertex.op]
        types = (self.view.types[v] for v in (*op.inputs, *op.outputs) if v is not None)
        return any(t is not None and t.dtype is DType.FLOAT and t.container != TENSOR for t in types)


def _root(parent: list[int], v: int) -> int:
    while parent[v] != v:
        parent[v] = parent[parent[v]]
        v = parent[v]
    return v
