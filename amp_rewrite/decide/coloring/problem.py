"""The painting problem: type variables with colors, reasons for float32, and spreading by TensorFlow's rules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import networkx as nx
import onnx
from networkx.utils import UnionFind

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.gate import Gate
from amp_rewrite.decide.needs.find import Needs
from amp_rewrite.decide.reasons import Paint, Pin, float32
from amp_rewrite.dtypes import LOW_TYPES, DType
from amp_rewrite.ir.dataflow import exposed, input_variable, output_variable
from amp_rewrite.ir.op_classes import GENERATORS, LABEL_LOSSES, QUANTIZERS, RANDOM
from amp_rewrite.ir.patterns.clusters import Cluster
from amp_rewrite.ir.schema import TENSOR
from amp_rewrite.ir.view import Op, OpId, Role, Use, ValueId, View
from amp_rewrite.settings.list_entry import Color, Entry
from amp_rewrite.settings.op_lists import OpLists
from amp_rewrite.settings.request import Request


class Vertex(NamedTuple):
    """Type variables of one op with a common type: usually one, several if every kernel gives them the same type.

    `refusal`: the reason against lowering them; None if the op can be low.
    """

    op: OpId
    variables: tuple[str, ...]
    entry: Entry
    refusal: Paint | None


@dataclass(eq=False)
class Problem:
    """Type variables of a view as vertices in op order, with their colors and neighbors.

    `graph` has an edge from the maker of a float32 value to each reader. Two vertices of one op are never joined: paint
    does not cross from T to U of a normalization, nor through a Cast. Ops with bodies and ops without a schema have no
    vertex, so every walk stops at them. `sequence_of` maps each vertex of a sequence to all of its
    vertices, because no Cast converts a sequence.

    Args:
        view: the model's index.
        request: the options.
        needs: pins of safety rules.
        keep: ops to keep in float32, each with the pattern that matched it.
        lower: ops to lower, each with the pattern that matched it.
        pins: pins in addition to those of the needs; a pin applies to the whole cluster of its op.
        clusters: written-out norms, softmaxes and activations.
        low_io: inputs and outputs of the model that are low.
        rescale: treat quantizers as clear.
    """

    view: View
    request: Request
    needs: Needs = field(default_factory=Needs)
    keep: Mapping[OpId, str] = field(default_factory=dict)
    lower: Mapping[OpId, str] = field(default_factory=dict)
    pins: Sequence[Pin] = ()
    clusters: Sequence[Cluster] = ()
    low_io: Collection[ValueId] = ()
    rescale: bool = False
    vertices: list[Vertex] = field(init=False, default_factory=list)
    graph: nx.DiGraph[int] = field(init=False, default_factory=nx.DiGraph)
    vertex_of: dict[tuple[OpId, str] | None, int] = field(init=False, default_factory=dict)
    by_op: dict[OpId, Sequence[int]] = field(init=False, default_factory=dict)
    sequence_of: dict[int, Sequence[int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Add the vertices. O(nodes + uses)."""
        self.to, self.gate = self.request.to, Gate(self.request.target, self.request.to)
        self.entries = entries_of(self.view, self.request.op_lists.at_level(self.request.level))
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
                self.vertex_of.update(((op.id, name), at) for name in names)
                self.graph.add_node(at)
                read = {op.inputs[slot] for name in names for slot in floats[name].inputs} & makers.keys()
                self.graph.add_edges_from((source, at) for source in sorted({makers[value] for value in read}))
            self.by_op[op.id] = range(first, len(self.vertices))
            for name, variable in floats.items():
                made = (op.outputs[slot] for slot in variable.outputs)
                makers.update((v, self.vertex_of[op.id, name]) for v in made if self.view.dtype(v) is DType.FLOAT)
        self._tie_sequences()

    def _tie_sequences(self) -> None:
        """Tie the vertices of each sequence; a graph's input or output, or an op without a vertex, fixes its type."""
        view, kept = self.view, set[int]()
        refusal = float32(reasons.SEQUENCE_CLUSTER, None, "the sequence keeps its type where it leaves the graph")
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
            self.sequence_of.update(dict.fromkeys(group, group))
            for v in () if kept.isdisjoint(group) else group:
                self.vertices[v] = self.vertices[v]._replace(refusal=self.vertices[v].refusal or refusal)

    # -- colors and pins ---------------------------------------------------------------------------

    @cached_property
    def colors(self) -> Sequence[Color]:
        """The color of each vertex: allow if the user lowers its op, gray if no reader has its entry's need."""
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
        """Ops kept in float32 by the user, a safety rule or data; deny paint still passes through them."""
        pinned = dict[OpId, Paint]()
        for op, pattern in sorted(self.keep.items()):
            by_check = float32(reasons.CHECK, None, f"to keep it without a check, use keep={pattern!r}")
            by_user = float32(reasons.KEEP, None, f"kept by {pattern!r}")
            pinned[op] = by_check if pattern in self.request.found else by_user
        pins = [(pin.op, float32(pin.rule, pin.because, pin.note)) for pin in self.pins]
        groups = {op: cluster for cluster in self.clusters for op in cluster.ops} if self.pins else {}
        for pin in self.pins:
            if (cluster := groups.get(pin.op)) is not None:
                note = f"{cluster.kind} stays float32 as a whole, because {self.view.ops[pin.op].name!r} does"
                pins += [(op, float32(reasons.CLUSTER, pin.op, note)) for op in cluster.ops]
        for op, paint in (*self.needs.pins.items(), *pins):
            if op not in self.lower:
                pinned.setdefault(op, paint)
        return pinned

    def can_be_low(self, v: int) -> bool:
        """True unless the gate, the user, a rule or a pin keeps a vertex or its sequence in float32."""
        sequence = (self.vertices[w] for w in self.sequence_of.get(v, (v,)))
        return all(vertex.refusal is None and vertex.op not in self.pinned for vertex in sequence)

    @property
    def only_before_products(self) -> bool:
        """True if a low type pays off only upstream of lowered products; False if the level lowers more."""
        return self.request.safe and self.request.level not in ("lower-all", "unsafe-force-all")

    def why_unneeded(self, v: int) -> str:
        """Return why no reader has the need of the op's list entry; "" if a reader may have it."""
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
        return self.vertex_of.get(output_variable(self.view, value))

    def reader(self, use: Use) -> int | None:
        return self.vertex_of.get(input_variable(self.view.ops[use.op], use.slot))

    def widens(self, op: Op) -> bool:
        """True for a Cast from a low type: if lowered, it would copy or round, and another Cast would follow."""
        return op.kind == "Cast" and self.view.dtype(op.inputs[0]) in LOW_TYPES


def entries_of(view: View, lists: OpLists) -> tuple[Entry, ...]:
    plain: dict[str, Entry | None] = {}  # by kind; None if an entry has a condition
    literal, entries = (onnx.AttributeProto.INT, onnx.AttributeProto.FLOAT, onnx.AttributeProto.STRING), []
    for op in view.ops:
        if op.kind not in plain:
            first = next(iter(lists.entries_of(op.domain, op.op_type)), None)
            plain[op.kind] = first if first is not None and first.condition is None else None
        if (entry := plain[op.kind]) is None:
            attributes = {a.name: onnx.helper.get_attribute_value(a) for a in op.node.attribute if a.type in literal}
            entry = lists.classify(op.domain, op.op_type, attributes, len(op.operands))
        entries.append(entry)
    return tuple(entries)


_SOFT = (Color.GRAY, Color.CLEAR)
_NEVER_FORCED = LABEL_LOSSES | RANDOM | GENERATORS


@dataclass
class Spread:
    """The vertices lowered and denied by the rules of TensorFlow's auto_mixed_precision pass, in its order.

    The allow list gives the roots, deny paint spreads forward, then gray ops between two lowered ones are lowered, and
    clear ops next to them. Each rule is a transitive closure, so the order of ops does not matter; only gray ops right
    after lowered ones take one sweep in topological order, as in TensorFlow. The reason for a variable names the op
    before it on the walk. O(nodes + uses).

    `roots`: vertices lowered by the lists, the level or the user, regardless of their neighbors.

    Source: TensorFlow 2.20, tensorflow/core/grappler/optimizers/auto_mixed_precision.cc.
    """

    problem: Problem
    low: dict[int, Paint] = field(default_factory=dict)
    denied: dict[int, Paint] = field(default_factory=dict)
    roots: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        p, graph = self.problem, self.problem.graph
        self._allow_roots()
        self.roots = frozenset(self.low)
        if p.request.level != "unsafe-force-all":
            self._deny()
        for v, cause in self._shared(lambda w: w in self.denied or not p.can_be_low(w)):
            self.low.pop(v, None)
            note = "a sequence that other ops share stays float32"
            self.denied.setdefault(v, float32(reasons.SEQUENCE_CLUSTER, cause, note))
        # gray and clear ops on a path between two allowed ops with no denied op on it
        allowed = [v for v in self.low if p.colors[v] is Color.ALLOW]
        downstream = self._walk(allowed, graph.successors, lambda v: self._is_free(v, *_SOFT))
        for v, cause in self._walk(allowed, graph.predecessors, downstream.__contains__).items():
            self.low.setdefault(v, Paint(p.to, reasons.BETWEEN_ALLOW, cause, p.why_unneeded(v)))
        follows = p.request.gray_follows_allow
        if p.to is DType.BFLOAT16 if follows is None else follows:
            self._gray_after_allow()
        # clear ops next to a lowered op, upstream or downstream, transitively
        beside = self._walk(self.low, partial(nx.all_neighbors, graph), lambda v: self._is_free(v, Color.CLEAR))
        for v, cause in beside.items():
            self.low[v] = Paint(p.to, reasons.ALLOW_THROUGH_CLEAR, cause)
        for v, cause in self._shared(self.low.__contains__):
            self.low.setdefault(v, Paint(p.to, reasons.SEQUENCE_CLUSTER, cause))

    def _allow_roots(self) -> None:
        """Lower every vertex of an op on the allow list, and the roots of the level and the user."""
        p, to, level = self.problem, self.problem.to, self.problem.request.level
        for v, (op, _, entry, _) in enumerate(p.vertices):
            if not p.can_be_low(v) or p.widens(p.op(v)):
                continue
            if op in p.lower:
                self.low[v] = Paint(to, reasons.LOWER, None, f"lowered by {p.lower[op]!r}")
            elif entry.color is Color.ALLOW:
                self.low[v] = Paint(to, reasons.ALLOW_ROOT, None, entry.because)
            elif level == "lower-all" and entry.color in _SOFT:
                self.low[v] = Paint(to, reasons.LOWER_ALL, None, f"{entry.color.value} list")
            elif level == "unsafe-force-all" and p.op(v).op_type not in _NEVER_FORCED:
                self.low[v] = Paint(to, reasons.FORCE_ALL, None, "forced by the level")

    def _deny(self) -> None:
        """Deny the ops on the deny list, and every path from one to its last deny or gray op."""
        p, graph = self.problem, self.problem.graph
        denied = [v for v, color in enumerate(p.colors) if color is Color.DENY]
        self.denied = {v: float32(reasons.DENY, None, p.vertices[v].entry.because) for v in denied}
        if p.request.level == "lower-all":
            return
        ends = [v for v, color in enumerate(p.colors) if color in (Color.DENY, Color.GRAY)]
        conductors = {*ends, *self._walk(ends, graph.predecessors, lambda v: p.colors[v] is Color.CLEAR)}
        for v, cause in self._walk(denied, graph.successors, conductors.__contains__).items():
            self.denied.setdefault(v, float32(reasons.DENY_FORWARD, cause))

    def _gray_after_allow(self) -> None:
        """Lower a gray op with a lowered op and no denied op directly before it, as TensorFlow 2.20 does."""
        p = self.problem
        for v in range(len(p.vertices)):
            sources = list(p.graph.predecessors(v))
            cause = next((s for s in sources if s in self.low), None)
            if cause is not None and self._is_free(v, Color.GRAY) and self.denied.keys().isdisjoint(sources):
                self.low.setdefault(v, Paint(p.to, reasons.GRAY_FOLLOWS_ALLOW, p.vertices[cause].op))

    def _shared(self, decides: Callable[[int], bool]) -> Iterator[tuple[int, OpId]]:
        """Yield each vertex of a sequence with a deciding vertex, and the op of the deciding vertex."""
        for v, group in self.problem.sequence_of.items():
            if (cause := next(filter(decides, group), None)) is not None:
                yield v, self.problem.vertices[cause].op

    def _is_free(self, v: int, *colors: Color) -> bool:
        return self.problem.colors[v] in colors and v not in self.denied and self.problem.can_be_low(v)

    def _walk(
        self, starts: Iterable[int], neighbors: Callable[[int], Iterable[int]], admits: Callable[[int], bool]
    ) -> dict[int, OpId]:
        """Return the vertices reached from `starts` through vertices that `admits` accepts, each with the op before it.

        networkx would copy a subgraph for each walk: 11 s for 49,500 ops, instead of 0.1 s.
        """
        queue = list(starts)
        seen = set(queue)
        reached: dict[int, OpId] = {}
        for v in queue:
            for w in neighbors(v):
                if w not in seen and admits(w):
                    seen.add(w)
                    reached[w] = self.problem.vertices[v].op
                    queue.append(w)
        return reached
