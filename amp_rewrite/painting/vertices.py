"""The painter's graph: one vertex for each group of float32 type variables that must share a colour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx

from amp_rewrite.dtypes import DType
from amp_rewrite.entry import Entry
from amp_rewrite.lists import OpLists
from amp_rewrite.painting.gate import Gate, Refusal
from amp_rewrite.schema import TENSOR
from amp_rewrite.view import Op, OpId, Role, ValueId, View


@dataclass(frozen=True, slots=True)
class Vertex:
    """A group of type variables of one op: mostly one; several where no kernel mixes their types.

    `refusal` says why the group can not be lowered; None when it can.
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
    return tuple(_entry(op, lists) for op in view.ops)


def _entry(op: Op, lists: OpLists) -> Entry:
    attributes: dict[str, object] = {}
    for a in op.node.attribute:
        if a.type in (onnx.AttributeProto.INT, onnx.AttributeProto.FLOAT, onnx.AttributeProto.STRING):
            attributes[a.name] = onnx.helper.get_attribute_value(a)
    return lists.classify(op.domain, op.op_type, attributes, sum(v is not None for v in op.inputs))


@dataclass
class _Builder:
    view: View
    entries: tuple[Entry, ...]
    gate: Gate
    all: list[Vertex] = field(default_factory=list)
    of: dict[tuple[OpId, str], int] = field(default_factory=dict)

    def vertices(self) -> Vertices:
        for op in self.view.ops:
            if op.signature is not None and not op.bodies and self.view.variables[op.id]:
                self._add(op)
        readers: list[set[int]] = [set() for _ in self.all]
        parent = list(range(len(self.all)))
        open_ended: set[int] = set()
        for value in self.view.values:
            found = self.view.types[value.id]
            if found is None or found.dtype is not DType.FLOAT:
                continue
            source = self._source(value.id)
            sinks = [self._sink(use.op, use.slot) for use in self.view.uses[value.id]]
            if source is not None:
                readers[source].update(s for s in sinks if s is not None)
            if found.container != TENSOR:
                joined = [v for v in (source, *sinks) if v is not None]
                for v in joined[1:]:
                    parent[_root(parent, v)] = _root(parent, joined[0])
                if (
                    value.public
                    or value.role is Role.INPUT
                    or value.id in self.view.yielded
                    or None in (source, *sinks)
                ):
                    open_ended.update(joined)
        sources: list[list[int]] = [[] for _ in self.all]
        for a, out in enumerate(readers):
            for b in out:
                sources[b].append(a)
        by_op: dict[OpId, list[int]] = {}
        for i, vertex in enumerate(self.all):
            by_op.setdefault(vertex.op, []).append(i)
        clusters = self._clusters(parent)
        return Vertices(
            tuple(self.all),
            tuple(tuple(sorted(r)) for r in readers),
            tuple(tuple(s) for s in sources),
            self.of,
            {op: tuple(v) for op, v in by_op.items()},
            clusters,
            tuple(any(v in open_ended or self.all[v].refusal for v in cluster) for cluster in clusters),
        )

    def _add(self, op: Op) -> None:
        floats = [v for v in self.view.variables[op.id] if v.type is not None and v.type.dtype is DType.FLOAT]
        if not floats:
            return
        passage = self.gate.passage(self.view, op)
        grouped = {name: group for group in passage.groups for name in group}
        for variable in floats:
            if (op.id, variable.name) in self.of:
                continue
            group = grouped.get(variable.name, (variable.name,))
            for name in group:
                self.of[op.id, name] = len(self.all)
            self.all.append(Vertex(op.id, group, self.entries[op.id], passage.refusals.get(variable.name)))

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
        if all(t is None or t.container == TENSOR for t in self.view.types):
            return ()
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
