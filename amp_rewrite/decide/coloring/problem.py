"""The problem of painting and placement: type variables, their colors, and reasons for float32."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import networkx as nx
import onnx
from networkx.utils import UnionFind

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.coloring import Paint
from amp_rewrite.decide.coloring.gate import Gate, GateRefusal, computes_float32_inside
from amp_rewrite.decide.needs.find import Hazards
from amp_rewrite.decide.reasons import Pin
from amp_rewrite.decide.sizes import Sizes
from amp_rewrite.dtypes import LOW_TYPES, DType
from amp_rewrite.ir.dataflow import exposed, made_variable, read_variable
from amp_rewrite.ir.op_classes import PRODUCTS, QUANTIZERS
from amp_rewrite.ir.patterns.clusters import Cluster
from amp_rewrite.ir.schema import TENSOR
from amp_rewrite.ir.view import Op, OpId, Role, TypeVariable, Use, ValueId, View
from amp_rewrite.settings.choices import Level, Target
from amp_rewrite.settings.list_entry import Color, Entry
from amp_rewrite.settings.op_lists import OpLists


class Vertex(NamedTuple):
    """A group of type variables of one op: mostly one; several if no kernel mixes their types.

    `refusal` is the reason for which the group cannot be lowered; None if it can.
    """

    op: OpId
    variables: tuple[str, ...]
    entry: Entry
    refusal: GateRefusal | None


@dataclass(frozen=True)
class Vertices:
    """Vertices in op order, and `graph` with an edge from the maker of a float32 value to each reader.

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
    """The part of a vertex common to all ops alike, and its slots."""

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


@dataclass(frozen=True, slots=True)
class PaintOptions:
    """Options of painting, resolved to the ops of one view.

    Args:
        level: how far to go.
        target: the runtime of the result.
        gray_follows_allow: lower a gray op right after an allow op; by default off for float16, on for bfloat16.
        keep: ops that stay float32, with the pattern that named each.
        lower: ops to lower, with the pattern that named each.
        pins: types of ops, on top of the hazards'; a pin holds the whole cluster of its op.
        clusters: written-out norms, softmaxes and activations.
        low_inputs: inputs and outputs of the model that are low.
        place: move the border between the types to where it takes the fewest Casts.
        rescale: quantizers are clear.
        found: patterns of `keep` from a check, not from the user.
    """

    level: Level = "default"
    target: Target = Target.ORT_CUDA
    gray_follows_allow: bool | None = None
    keep: Mapping[OpId, str] = field(default_factory=dict)
    lower: Mapping[OpId, str] = field(default_factory=dict)
    pins: Sequence[Pin] = ()
    clusters: Sequence[Cluster] = ()
    low_inputs: Collection[ValueId] = ()
    place: bool = False
    rescale: bool = False
    found: Collection[str] = ()


@dataclass(frozen=True)
class Problem:
    """Type variables of a view, by vertex, with their colors and neighbours.

    `raised`: paint of variables that are low in the model and become float32. They have no vertex, so no color spreads
    from them.
    """

    view: View
    vertices: Vertices
    to: DType
    options: PaintOptions
    hazards: Hazards
    raised: Mapping[tuple[OpId, str], Paint] = field(default_factory=dict)

    # -- what is asked -----------------------------------------------------------------------------

    @property
    def pins(self) -> tuple[Pin, ...]:
        """Pins of the hazards, then those of the options."""
        return (*self.hazards.pins, *self.options.pins)

    @cached_property
    def colors(self) -> Sequence[Color]:
        """The lists of all vertices. What the user lowers counts as allowed, and an entry's need without a reader as
        gray."""
        colors = [vertex.entry.color for vertex in self.vertices.all]
        for op, (needs, _) in self.hazards.unneeded.items():
            for v in self.vertices.by_op.get(op, ()):
                if self.vertices.all[v].entry.need in needs:
                    colors[v] = Color.GRAY
        for v, vertex in enumerate(self.vertices.all if self.options.rescale else ()):
            if self.view.ops[vertex.op].kind in QUANTIZERS:
                colors[v] = Color.CLEAR
        for v in self.of_ops(self.options.lower):
            colors[v] = Color.ALLOW
        return colors

    @cached_property
    def pinned(self) -> Mapping[OpId, Paint]:
        """Ops in float32 for the user, a safety rule or data; they still conduct deny paint."""
        pinned = {op: self._kept(pattern) for op, pattern in sorted(self.options.keep.items())}
        groups = {op: cluster for cluster in self.options.clusters for op in cluster.ops} if self.options.pins else {}
        for pin in self.pins:
            if pin.op not in self.options.lower:
                pinned.setdefault(pin.op, Paint.float32(pin.rule, pin.because, pin.note))
        for pin in self.options.pins:
            cluster = groups.get(pin.op)
            if cluster is None:
                continue
            note = f"{cluster.kind} stays float32 as a whole, because {self.view.ops[pin.op].name!r} does"
            for op in cluster.ops:
                if op not in self.options.lower:
                    pinned.setdefault(op, Paint.float32(reasons.CLUSTER, pin.op, note))
        return pinned

    def _kept(self, pattern: str) -> Paint:
        if pattern in self.options.found:
            return Paint.float32(reasons.CHECK, None, f"keep={pattern!r} does the same without a check")
        return Paint.float32(reasons.KEEP, None, f"kept by {pattern!r}")

    def can(self, v: int) -> bool:
        """True if neither the gate nor a user, rule or pin holds a vertex in float32."""
        vertex = self.vertices.all[v]
        return vertex.refusal is None and vertex.op not in self.pinned

    @property
    def gains(self) -> bool:
        """True if a low type is worth it only in front of lowered products; False if the user asks for more."""
        return self.hazards.guarded and self.options.level not in ("lower-all", "unsafe-force-all")

    def why_unneeded(self, v: int) -> str:
        """Return why no reader has the need of the op's entry; "" without one."""
        unneeded = self.hazards.unneeded.get(self.vertices.all[v].op)
        return unneeded.because if unneeded is not None else ""

    # -- vertices ----------------------------------------------------------------------------------

    @cached_property
    def sizes(self) -> Sizes:
        """The sizes of values."""
        return Sizes(self.view)

    @cached_property
    def short(self) -> frozenset[int]:
        """Products with fewer terms than a step of tensor cores, by known shapes."""
        return frozenset(v for v in self.of_kinds(PRODUCTS) if self.sizes.is_short(self.op(v)))

    def op(self, v: int) -> Op:
        """Return the op of a vertex."""
        return self.view.ops[self.vertices.all[v].op]

    def of_ops(self, ops: Iterable[OpId]) -> list[int]:
        """Return the vertices of ops, in order."""
        return [v for op in ops for v in self.vertices.by_op.get(op, ())]

    def of_kinds(self, kinds: Container[str]) -> list[int]:
        """Return the vertices of ops of some kinds, in order."""
        return self.of_ops(op.id for op in self.view.of_kinds(kinds))

    def maker(self, value: ValueId) -> int | None:
        """Return the vertex of a value's maker; None for an op without one."""
        port = made_variable(self.view, value)
        return self.vertices.of.get(port) if port is not None else None

    def reader(self, use: Use) -> int | None:
        """Return the vertex of a use; None for an op without one."""
        port = read_variable(self.view.ops[use.op], use.slot)
        return self.vertices.of.get(port) if port is not None else None

    def made_raised(self, value: ValueId) -> bool:
        """True if a value is low in the model and now made in float32."""
        return made_variable(self.view, value) in self.raised

    def ports(self, v: int) -> tuple[list[ValueId], list[ValueId]]:
        """Return the inputs and the results of a vertex."""
        op, names = self.op(v), self.vertices.all[v].variables
        variables = [variable for variable in self.view.variables[op.id] if variable.name in names]
        read = (op.inputs[slot] for variable in variables for slot in variable.inputs)
        made = (op.outputs[slot] for variable in variables for slot in variable.outputs)
        return [value for value in read if value is not None], [value for value in made if value is not None]

    def widens(self, op: Op) -> bool:
        """True for a Cast from a low type: lowered, it would be a copy or round, with another Cast after it."""
        return op.kind == "Cast" and self.view.dtype(op.inputs[0]) in LOW_TYPES

    def varies(self, value: ValueId) -> bool:
        """True if a value is float32 and not a constant."""
        return self.view.dtype(value) is DType.FLOAT and self.view.constant(value) is None

    def walk(
        self, starts: Iterable[int], near: Callable[[int], Iterable[int]], enter: Callable[[int], bool]
    ) -> dict[int, OpId]:
        """Return the vertices reached from `starts` through those admitted by `enter`, each with the op before it.

        networkx's walks want a copy of the subgraph for each: 11 s at 49 500 ops, this one takes 0.1.
        """
        queue = list(starts)
        seen = set(queue)
        reached: dict[int, OpId] = {}
        for v in queue:
            for w in near(v):
                if w not in seen and enter(w):
                    seen.add(w)
                    reached[w] = self.vertices.all[v].op
                    queue.append(w)
        return reached
