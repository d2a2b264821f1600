"""The problem of painting and placement: type variables, their colors, and reasons for float32."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import networkx as nx
import onnx
from networkx.utils import UnionFind

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.gate import Gate
from amp_rewrite.decide.needs.find import Needs
from amp_rewrite.decide.reasons import Paint, Pin, float32
from amp_rewrite.dtypes import LOW_TYPES, DType
from amp_rewrite.ir.dataflow import exposed, made_variable, read_variable
from amp_rewrite.ir.op_classes import QUANTIZERS
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
    refusal: Paint | None


@dataclass(eq=False)
class Problem:
    """Type variables of a view, by vertex in op order, with their colors and neighbours.

    `graph` has an edge from the maker of a float32 value to each reader. Two vertices of one op are never joined: paint
    does not cross from T to U of a normalization, nor through a Cast. Ops with bodies and ops without a schema have no
    vertex, so they stop every walk. `tied`: for each vertex of a sequence, which no Cast converts, all vertices of the
    sequence.

    Args:
        view: the model's index.
        lists: the lists in force.
        to: float16 or bfloat16.
        needs: pins of safety rules.
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

    view: View
    lists: OpLists
    to: DType
    needs: Needs = field(default_factory=Needs)
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
    vertices: list[Vertex] = field(init=False, default_factory=list)
    graph: nx.DiGraph[int] = field(init=False, default_factory=nx.DiGraph)
    of: dict[tuple[OpId, str] | None, int] = field(init=False, default_factory=dict)
    by_op: dict[OpId, Sequence[int]] = field(init=False, default_factory=dict)
    tied: dict[int, Sequence[int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Add the vertices. O(nodes + uses)."""
        self.gate, self.entries = Gate(self.target, self.to), entries_of(self.view, self.lists.at_level(self.level))
        makers = dict[ValueId | None, int]()
        for op in self.view.ops:
            variables = self.view.variables[op.id]
            floats = {v.name: v for v in variables if v.type is not None and v.type.dtype is DType.FLOAT}
            if not floats:
                continue
            groups, refusals = self.gate.lowerable_groups(self.view, op)
            grouped = {name: group for group in groups for name in group}
            first = len(self.vertices)
            for at, names in enumerate(dict.fromkeys(grouped.get(name, (name,)) for name in floats), first):
                self.vertices.append(Vertex(op.id, names, self.entries[op.id], refusals.get(names[0])))
                self.of.update(((op.id, name), at) for name in names)
                self.graph.add_node(at)
                read = {op.inputs[slot] for name in names for slot in floats[name].inputs} & makers.keys()
                self.graph.add_edges_from((source, at) for source in sorted({makers[value] for value in read}))
            self.by_op[op.id] = range(first, len(self.vertices))
            for name, variable in floats.items():
                made = (op.outputs[slot] for slot in variable.outputs)
                makers.update((v, self.of[op.id, name]) for v in made if self.view.dtype(v) is DType.FLOAT)
        self._tie_sequences()

    def _tie_sequences(self) -> None:
        """Tie the vertices of each sequence; a model, a body or an op without vertex keeps its type."""
        view, kept = self.view, set[int]()
        sets: UnionFind[int] = UnionFind()
        for value in view.values:
            declared = view.types[value.id]
            if declared is None or declared.dtype is not DType.FLOAT or declared.container == TENSOR:
                continue
            ends = [self.maker(value.id), *map(self.reader, view.uses[value.id])]
            joined = [v for v in ends if v is not None]
            sets.union(*joined)
            if value.role is Role.INPUT or exposed(view, value.id) or None in ends:
                kept.update(joined)
        for group in map(sorted, sets.to_sets()):
            self.tied.update(dict.fromkeys(group, group))
            for v in () if kept.isdisjoint(group) else group:
                self.vertices[v] = self.vertices[v]._replace(refusal=self.vertices[v].refusal or _KEPT)

    # -- colors and pins ---------------------------------------------------------------------------

    @cached_property
    def colors(self) -> Sequence[Color]:
        """The lists of all vertices. What the user lowers counts as allowed, and an entry's need without a reader as
        gray."""
        colors = [vertex.entry.color for vertex in self.vertices]
        for v, (op, _, entry, _) in enumerate(self.vertices):
            if op in self.lower:
                colors[v] = Color.ALLOW
            elif self.rescale and self.op(v).kind in QUANTIZERS:
                colors[v] = Color.CLEAR
            elif op in self.needs.unneeded and entry.need in self.needs.unneeded[op].needs:
                colors[v] = Color.GRAY
        return colors

    @cached_property
    def pinned(self) -> Mapping[OpId, Paint]:
        """Ops in float32 for the user, a safety rule or data; they still conduct deny paint."""
        pinned = {op: self._kept(pattern) for op, pattern in sorted(self.keep.items())}
        found = [
            *self.needs.pins.items(),
            *((pin.op, float32(pin.rule, pin.because, pin.note)) for pin in self.pins),
        ]
        groups = {op: cluster for cluster in self.clusters for op in cluster.ops} if self.pins else {}
        for pin in self.pins:
            if (cluster := groups.get(pin.op)) is not None:
                note = f"{cluster.kind} stays float32 as a whole, because {self.view.ops[pin.op].name!r} does"
                found += [(op, float32(reasons.CLUSTER, pin.op, note)) for op in cluster.ops]
        for op, paint in found:
            if op not in self.lower:
                pinned.setdefault(op, paint)
        return pinned

    def _kept(self, pattern: str) -> Paint:
        if pattern in self.found:
            return float32(reasons.CHECK, None, f"keep={pattern!r} does the same without a check")
        return float32(reasons.KEEP, None, f"kept by {pattern!r}")

    def can(self, v: int) -> bool:
        """True if neither the gate nor a user, rule or pin holds a vertex, or one tied to it, in float32."""
        tied = (self.vertices[w] for w in self.tied.get(v, (v,)))
        return all(vertex.refusal is None and vertex.op not in self.pinned for vertex in tied)

    @property
    def gains(self) -> bool:
        """True if a low type is worth it only in front of lowered products; False if the user asks for more."""
        return self.needs.guarded and self.level not in ("lower-all", "unsafe-force-all")

    def why_unneeded(self, v: int) -> str:
        """Return why no reader has the need of the op's entry; "" without one."""
        unneeded = self.needs.unneeded.get(self.vertices[v].op)
        return unneeded.because if unneeded is not None else ""

    # -- vertices ----------------------------------------------------------------------------------

    def op(self, v: int) -> Op:
        return self.view.ops[self.vertices[v].op]

    def of_ops(self, ops: Iterable[OpId]) -> list[int]:
        return [v for op in ops for v in self.by_op.get(op, ())]

    def of_kinds(self, kinds: Container[str]) -> list[int]:
        return self.of_ops(op.id for op in self.view.of_kinds(kinds))

    def maker(self, value: ValueId) -> int | None:
        """Return the vertex of a value's maker; None for an op without one."""
        return self.of.get(made_variable(self.view, value))

    def reader(self, use: Use) -> int | None:
        """Return the vertex of a use; None for an op without one."""
        return self.of.get(read_variable(self.view.ops[use.op], use.slot))

    def widens(self, op: Op) -> bool:
        """True for a Cast from a low type: lowered, it would be a copy or round, with another Cast after it."""
        return op.kind == "Cast" and self.view.dtype(op.inputs[0]) in LOW_TYPES


_KEPT = float32(reasons.SEQUENCE_CLUSTER, None, "the sequence keeps its type where it leaves the graph")


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
