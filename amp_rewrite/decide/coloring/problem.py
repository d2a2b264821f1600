"""The problem of painting and placement: type variables, their colors, and reasons for float32."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import networkx as nx
import onnx
from networkx.utils import UnionFind

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.coloring import Paint
from amp_rewrite.decide.coloring.gate import Gate
from amp_rewrite.decide.needs.find import Needs
from amp_rewrite.decide.reasons import Cause, Pin
from amp_rewrite.decide.sizes import is_short
from amp_rewrite.dtypes import LOW_TYPES, DType
from amp_rewrite.ir.dataflow import exposed, made_variable, read_variable
from amp_rewrite.ir.op_classes import PRODUCTS, QUANTIZERS
from amp_rewrite.ir.patterns.clusters import Cluster
from amp_rewrite.ir.schema import TENSOR
from amp_rewrite.ir.view import Op, OpId, Role, Use, ValueId, View
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
    refusal: Cause | None


@dataclass(frozen=True)
class Vertices:
    """Vertices in op order, and `graph` with an edge from the maker of a float32 value to each reader.

    Two vertices of one op are never joined: paint does not cross from T to U of a normalization, nor through a Cast.
    Ops with bodies and ops without a schema have no vertex, so they stop every walk. `tied`: for each vertex of a
    sequence, which no Cast converts, all vertices of the sequence.
    """

    all: tuple[Vertex, ...]
    graph: nx.DiGraph[int]
    of: Mapping[tuple[OpId, str], int]
    by_op: Mapping[OpId, Sequence[int]]
    tied: Mapping[int, Sequence[int]]

    @classmethod
    def build(cls, view: View, entries: tuple[Entry, ...], gate: Gate) -> Vertices:
        """Return the vertices of a view. O(nodes + uses)."""
        every, of, by_op, graph = (
            list[Vertex](),
            dict[tuple[OpId, str], int](),
            dict[OpId, Sequence[int]](),
            nx.DiGraph(),
        )
        makers = dict[ValueId | None, int]()
        for op in view.ops:
            floats = {v.name: v for v in view.variables[op.id] if v.type is not None and v.type.dtype is DType.FLOAT}
            if not floats:
                continue
            lowerable = gate.lowerable_groups(view, op)
            grouped = {name: group for group in lowerable.groups for name in group}
            groups = dict.fromkeys(grouped.get(name, (name,)) for name in floats)
            by_op[op.id] = range(len(every), len(every) + len(groups))
            for at, names in zip(by_op[op.id], groups, strict=True):
                every.append(Vertex(op.id, names, entries[op.id], lowerable.refusals.get(names[0])))
                of.update(((op.id, name), at) for name in names)
                graph.add_node(at)
                read = {op.inputs[slot] for name in names for slot in floats[name].inputs} & makers.keys()
                graph.add_edges_from((source, at) for source in sorted({makers[value] for value in read}))
            for name, variable in floats.items():
                made = (op.outputs[slot] for slot in variable.outputs)
                makers.update((v, of[op.id, name]) for v in made if v is not None and view.dtype(v) is DType.FLOAT)
        tied = dict[int, Sequence[int]]()
        for group, kept in _sequences(view, of):
            tied.update(dict.fromkeys(group, group))
            for v in group if kept else ():
                every[v] = every[v]._replace(refusal=every[v].refusal or _KEPT)
        return cls(tuple(every), graph, of, by_op, tied)


_KEPT = Cause(reasons.SEQUENCE_CLUSTER, None, "the sequence keeps its type where it leaves the graph")


def _sequences(view: View, of: Mapping[tuple[OpId, str], int]) -> Iterator[tuple[Sequence[int], bool]]:
    """Yield the vertices of each sequence, and True if a model, a body or an op without vertex fixes its type."""
    sets, kept = UnionFind(), set[int]()
    for value in view.values:
        declared = view.types[value.id]
        if declared is None or declared.dtype is not DType.FLOAT or declared.container == TENSOR:
            continue
        read = [read_variable(view.ops[use.op], use.slot) for use in view.uses[value.id]]
        ends = [of.get(port) if port is not None else None for port in (made_variable(view, value.id), *read)]
        joined = [v for v in ends if v is not None]
        sets.union(*joined)
        if value.role is Role.INPUT or exposed(view, value.id) or None in ends:
            kept.update(joined)
    for group in sets.to_sets():
        yield sorted(group), not kept.isdisjoint(group)


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


@dataclass(frozen=True, slots=True)
class PaintOptions:
    """Options of painting, resolved to the ops of one view.

    Args:
        level: how far to go.
        target: the runtime of the result.
        gray_follows_allow: lower a gray op right after an allow op; by default off for float16, on for bfloat16.
        keep: ops that stay float32, with the pattern that named each.
        lower: ops to lower, with the pattern that named each.
        pins: types of ops, on top of the needs'; a pin holds the whole cluster of its op.
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
    needs: Needs
    raised: Mapping[tuple[OpId, str], Paint] = field(default_factory=dict)

    # -- what is asked -----------------------------------------------------------------------------

    @property
    def pins(self) -> tuple[Pin, ...]:
        """Pins of the needs, then those of the options."""
        return (*self.needs.pins, *self.options.pins)

    @cached_property
    def colors(self) -> Sequence[Color]:
        """The lists of all vertices. What the user lowers counts as allowed, and an entry's need without a reader as
        gray."""
        colors = [vertex.entry.color for vertex in self.vertices.all]
        for op, (needs, _) in self.needs.unneeded.items():
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
        """True if neither the gate nor a user, rule or pin holds a vertex, or one tied to it, in float32."""
        tied = (self.vertices.all[w] for w in self.vertices.tied.get(v, (v,)))
        return all(vertex.refusal is None and vertex.op not in self.pinned for vertex in tied)

    @property
    def gains(self) -> bool:
        """True if a low type is worth it only in front of lowered products; False if the user asks for more."""
        return self.needs.guarded and self.options.level not in ("lower-all", "unsafe-force-all")

    def why_unneeded(self, v: int) -> str:
        """Return why no reader has the need of the op's entry; "" without one."""
        unneeded = self.needs.unneeded.get(self.vertices.all[v].op)
        return unneeded.because if unneeded is not None else ""

    # -- vertices ----------------------------------------------------------------------------------

    @cached_property
    def short(self) -> frozenset[int]:
        """Products with fewer terms than a step of tensor cores, by known shapes."""
        return frozenset(v for v in self.of_kinds(PRODUCTS) if is_short(self.view, self.op(v)))

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
