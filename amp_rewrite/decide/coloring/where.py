"""Where: one labelling of the type variables, low or float32, by a minimum cut.

What allowed and lowered ops compute is low, what `must` names is float32, and so is what the lists deny. Every other
variable is free, one that TensorFlow's rules leave float32 as well. The labelling costs a Cast for each value that is
made in one type and read in the other, and gains what low results spare. A variable outside TensorFlow's set gains
nothing, so that it falls only to spare a Cast.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import inf
from typing import NamedTuple

import networkx as nx
from networkx.algorithms.flow import boykov_kolmogorov
from networkx.utils import UnionFind

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.coloring import Paint
from amp_rewrite.decide.coloring.eliminate import eliminate
from amp_rewrite.decide.coloring.follow import fuses
from amp_rewrite.decide.coloring.may import May
from amp_rewrite.decide.coloring.problem import Problem
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import fed, first_input_of, origin, trail
from amp_rewrite.ir.exact_ops import exact
from amp_rewrite.ir.op_classes import (
    AFFINE,
    CHOOSES,
    COPIES,
    DEQUANTIZES,
    ELEMENTLESS,
    GROWS,
    HEAVY,
    LONG_SUMS,
    PAIR_SUMS,
    QUANTIZES,
    SCALINGS,
    SOFTMAXES,
    SUMS,
    TENSOR_CORE_STEP,
)
from amp_rewrite.ir.patterns.clusters import Cluster
from amp_rewrite.ir.view import Op, OpId, ValueId
from amp_rewrite.settings.list_entry import Color

LOW, HIGH = "low", "high"
"""The terminals of the cut: source and sink."""
End = int | str | tuple[str, int]
"""A vertex, the terminal of a type that is fixed, or an auxiliary node."""


class Arc(NamedTuple):
    """What it costs that one end is low and another float32: a share of a Cast of a value."""

    low: End
    high: End
    value: ValueId
    share: float


_START = 24 << 20
"""What a Cast is worth beside its own traffic, in bytes.

The start of a kernel takes as long as 1.4 Mi on an A100 and 8 Mi on an H200. More, since sizes with free dimensions are
guesses: with 8 Mi some models would take two Casts more to spare traffic that may not be there.
"""
_LARGEST = 1 << 24
"""The most elements that a guessed size counts."""
_FUSION = 0.5
"""What one kernel fewer is worth, in Casts."""
_UNIT = 1000
"""Units of capacity to a byte. A free variable that gains nothing pays one unit to be low: a tie is float32."""
_MOST = 100
"""Nodes of a component that networkx cuts; it takes 0.06 s for 300, where elimination takes 0.01."""
ONE_KERNEL = ("layer_normalization", "rms_normalization", "gelu_erf", "gelu_tanh")
"""Written-out groups that onnxruntime runs as one kernel."""
PAIRS = frozenset(
    (
        ("Add", "LayerNormalization"),
        ("Add", "Softmax"),
        ("Add", "Gelu"),
        ("MatMul", "Add"),
        ("Mul", "MatMul"),
        ("Conv", "BatchNormalization"),
    )
)
"""Ops and readers that onnxruntime 1.31.1 runs as one node on CUDA if both have one type, without a Cast between."""
_copied = first_input_of(COPIES)


def where(problem: Problem, may: May) -> tuple[dict[int, Paint], dict[int, Paint]]:
    """Return the paint of the vertices that the cheapest labelling makes low, and of those that it makes float32."""
    labelling = Labelling(problem, may)
    low = labelling.solve()
    high = dict.fromkeys(_idle(problem, low), problem.high(reasons.NO_GAIN, None, _TINY)) if problem.gains else {}
    if high:
        labelling = Labelling(problem, may, high)
        low = labelling.solve()
    own = may.low.keys() - labelling.follows
    dear = problem.high(reasons.MIN_CUT, None, "it gains less than the Casts around it would cost")
    last = problem.high(reasons.NO_GAIN, None, "no lowered product reads what it computes")
    raw = problem.high(reasons.NO_GAIN, None, _RAW)
    for v in sorted((own | labelling.late) - low - high.keys() - may.denied.keys()):
        high[v] = raw if v in labelling.raw else dear if labelling.gains(v) else last
    return {v: may.low[v] if v in own else labelling.paint(v) for v in sorted(low)}, high


def spread(problem: Problem, may: May) -> tuple[dict[int, Paint], dict[int, Paint]]:
    """Return the same without a cut: what TensorFlow's rules lower, but for raw values of float32 readers."""
    labelling, low, high = Labelling(problem, may), dict(may.low), dict[int, Paint]()
    for v in sorted(labelling.raw & low.keys(), reverse=True):
        read = {end for value in problem.ports(v)[1] for end in labelling.readers(value, counts=True)}
        if any(end != LOW and end not in low for end in read):
            del low[v]
            high[v] = problem.high(reasons.NO_GAIN, None, _RAW)
    return low, high


_RAW = "no product made what it reads, and not all its readers are low"
_TINY = f"its products sum fewer than {TENSOR_CORE_STEP} terms, and float32 spares the Casts"


def _idle(problem: Problem, low: Collection[int]) -> Iterator[int]:
    """Yield connected low vertices whose products all sum fewer terms than tensor cores multiply in a step."""
    p, tiny = problem, problem.tiny & set(low)
    if not tiny:
        return
    clustered = (op for cluster in p.options.clusters if cluster.kind == "softmax" for op in cluster.ops)
    softmaxes = (*p.of_ops(clustered), *p.of_kinds(SOFTMAXES))
    gaining = {*(v for v in p.of_kinds(HEAVY) if v not in tiny), *softmaxes, *chain(*p.vertices.sequences)}
    for part in nx.weakly_connected_components(p.vertices.graph.subgraph(low)):
        if not part.isdisjoint(tiny) and part.isdisjoint(gaining):
            yield from part - {*p.of_ops(p.options.lower), *p.of_kinds(ELEMENTLESS)}


@dataclass
class Labelling:
    """The cheapest labelling: arcs between free variables, and a cut for each of their components.

    The ends of arcs are roots of variables that share a type, auxiliary nodes, and the terminals. In a networkx graph
    they would take 0.7 KB each for a whole model; only components that touch both terminals become one.
    """

    problem: Problem
    may: May
    must: Mapping[int, Paint] = field(default_factory=dict)
    arcs: list[Arc] = field(default_factory=list)

    # -- vertices ----------------------------------------------------------------------------------

    @cached_property
    def follows(self) -> frozenset[int]:
        """Vertices that take either type for free: Shape and Size, inputs of Casts, Casts from float32 to float32."""
        p = self.problem
        casts = (v for v in p.of_kinds(("Cast",)) if "T1" in p.vertices.all[v].variables or self._copies(p.op(v)))
        return frozenset((*p.of_kinds(ELEMENTLESS), *casts))

    @cached_property
    def ends(self) -> list[End]:
        """The node of each vertex: a terminal if its type is fixed, else the root of the vertices that share it."""
        p, everything = self.problem, range(len(self.problem.vertices.all))
        sets, fixed = UnionFind(), dict[int, str]()
        own = {v: end for v in everything if (end := self._fixed(v)) is not None}
        for group, sealed in zip(p.vertices.sequences, p.vertices.sealed, strict=True):
            sets.union(*group)
            labels = {own[v] for v in group if v in own} | ({HIGH} if sealed else set())
            if labels:
                fixed[sets[group[0]]] = HIGH if HIGH in labels else LOW
        tied = {v: fixed.get(sets[v], sets[v]) for group in p.vertices.sequences for v in group}
        return [tied.get(v, own.get(v, v)) for v in everything]

    def _fixed(self, v: int) -> str | None:
        """Return the terminal of a vertex whose type no Cast decides; None for a free one."""
        p = self.problem
        if v in self.follows:
            return None
        if v in self.must or not p.can(v):
            return HIGH
        if v in self.may.roots:
            return LOW
        if v in self.late:
            return HIGH
        if v in self.may.low:
            return None
        op = p.op(v)
        if op.kind == "Cast":
            return HIGH if p.widens(op) else None
        if op.kind in DEQUANTIZES and self._decodes_weight(op):
            return None
        if p.colors[v] not in (Color.GRAY, Color.CLEAR):
            return HIGH
        if exact(op):
            return None
        return HIGH if self._grows(op) or any(map(self._unbounded, filter(p.varies, op.operands))) else None

    @cached_property
    def late(self) -> frozenset[int]:
        """Sums and products behind the last lowered product, of values that are rounded there."""
        p, view = self.problem, self.problem.view
        late = set[int]()
        if not p.gains:
            return frozenset()
        behind = self._behind - self._before
        for v in p.of_kinds(SUMS | SCALINGS):
            op = p.op(v)
            if op.id not in behind or not p.can(v) or v in self.may.roots or len(self._varying(op)) < 2:
                continue
            makers = (view.producer(origin(view, value, self._carried)) for value in self._varying(op))
            if any(m is not None and m.id not in self._before and m.kind not in HEAVY for m in makers):
                late.add(v)
        return frozenset(late)

    def _varying(self, op: Op) -> list[ValueId]:
        """Return the float32 operands of an op that are not constants, nor copies of these."""
        view, varies = self.problem.view, self.problem.varies
        return [v for v in op.operands if varies(v) and view.constant(origin(view, v, _copied)) is None]

    def _carried(self, op: Op) -> ValueId | None:
        """Return the only operand that varies of a copy, sum, product or norm."""
        alone = op.kind in COPIES or op.kind in AFFINE or op.kind.endswith("Normalization")
        varying = self._varying(op) if alone else []
        return varying[0] if len(varying) == 1 else None

    def _decodes_weight(self, op: Op) -> bool:
        """True if an op dequantizes a constant: a Cast behind it would run each time, and hide a quantized weight."""
        _, source = trail(self.problem.view, op.inputs[0], first_input_of(QUANTIZES), 1)
        return self.problem.view.constant(source) is not None

    def _grows(self, op: Op) -> bool:
        """True if the results of an op can outgrow what it reads."""
        return op.kind in GROWS and not (op.kind in LONG_SUMS and op.id in self.problem.hazards.benign)

    def _unbounded(self, value: ValueId) -> bool:
        """True for numbers of any size, and for those that the model itself widens: it asks for float32.

        Of any size are inputs of the model or a body, and what an op that grows computes.
        """
        view = self.problem.view
        made_by, maker = view.producer(value), view.producer(origin(view, value, _copied))
        return made_by is None or self.problem.widens(made_by) or (maker is not None and self._grows(maker))

    def paint(self, v: int) -> Paint:
        """Return the paint of a vertex outside TensorFlow's set that is low."""
        p, op = self.problem, self.problem.op(v)
        if op.kind in ELEMENTLESS:
            made_by = p.view.producer(op.inputs[0])
            return Paint(p.to, reasons.SHAPE_FOLLOWS, made_by.id if made_by is not None else None)
        return Paint(p.to, reasons.MIN_CUT, None, p.hazards.benign.get(op.id, ""))

    def _copies(self, op: Op | None) -> bool:
        dtype = self.problem.view.dtype
        return op is not None and op.kind == "Cast" and dtype(op.inputs[0]) is dtype(op.outputs[0]) is DType.FLOAT

    # -- values ------------------------------------------------------------------------------------

    def maker(self, value: ValueId) -> End:
        """Return the node in whose type a value is made."""
        p, view = self.problem, self.problem.view
        while self._copies(op := view.producer(value)):
            assert op is not None and op.inputs[0] is not None
            value = op.inputs[0]
        if fed(view, value):
            return self._edge(value)
        if op is not None and op.kind == "Cast" and view.dtype(op.inputs[0]) is p.to:
            return LOW
        v = p.maker(value)
        return self.ends[v] if v is not None else HIGH

    def readers(self, value: ValueId, but: Collection[OpId] = (), counts: bool = False) -> set[End]:
        """Return the nodes in whose type a value is read, `but` by some ops. `counts`: by Casts to integers, too."""
        p, view = self.problem, self.problem.view
        found: set[End] = set()
        pending = [value]
        for source in pending:
            for use in view.uses[source]:
                op = view.ops[use.op]
                if op.id in but:
                    continue
                if op.kind == "Cast":
                    result = op.outputs[0]
                    if result is not None and self._copies(op):
                        pending.append(result)
                    elif result is not None and view.dtype(result) is p.to:
                        found.add(LOW)
                    elif counts and (made := view.dtype(result)) is not None and not made.floating:
                        found.add(HIGH)
                elif not (op.kind in ELEMENTLESS and op.signature is not None):
                    v = p.reader(use)
                    found.add(self.ends[v] if v is not None else HIGH)
            if source in view.yielded or (view.values[source].public and not fed(view, source)):
                found.add(self._edge(source))
        return found

    def elements(self, value: ValueId) -> int:
        """Return the number of elements, limited if it is a guess."""
        sizes = self.problem.sizes
        return sizes.size(value) if sizes.is_stated(value) else min(sizes.size(value), _LARGEST)

    def cast_cost(self, value: ValueId) -> int:
        """Return the cost of a Cast in bytes of traffic: it starts a kernel, reads one type and writes the other."""
        return _START + 6 * self.elements(value)

    def _edge(self, value: ValueId) -> str:
        return LOW if value in self.problem.options.low_inputs else HIGH

    def values(self) -> Iterator[ValueId]:
        """Yield float32 tensors that may take a Cast. Constants are stored in either type."""
        view = self.problem.view
        for value in view.values:
            if view.tensor_dtype(value.id) is DType.FLOAT and view.constant(value.id) is None:
                cast = view.producer(value.id, "Cast")
                if cast is None or view.dtype(cast.inputs[0]) not in (DType.FLOAT, self.problem.to):
                    yield value.id

    def fuses(self, value: ValueId) -> bool:
        """True if the runtime runs the maker and the only reader of a value as one kernel, without a Cast between."""
        view = self.problem.view
        op, uses = view.producer(value), view.uses[value]
        alone = op is not None and len(uses) == 1 and value not in view.yielded
        reader = view.ops[uses[0].op] if alone else None
        if op is None or reader is None or (op.kind, reader.kind) not in PAIRS:
            return False
        return reader.kind != "Softmax" or not self.problem.gains or reader.id in self._before

    # -- the network -------------------------------------------------------------------------------

    def solve(self) -> set[int]:
        """Return the vertices that are low in the cheapest labelling."""
        for value in self.values():
            self._cast(value)
        for cluster in self.problem.options.clusters:
            if cluster.kind in ONE_KERNEL and cluster.entry is not None:
                self._group(cluster, cluster.entry)
        for v in self.problem.of_kinds(CHOOSES):
            for value in filter(self.problem.varies, self.problem.op(v).operands):
                self._add(self.ends[v], self.maker(value), value, inf)
        for v in self.raw:
            for value in self.problem.ports(v)[1]:
                for end in self.readers(value, counts=True):
                    self._add(self.ends[v], end, value, inf)
        chosen: set[End] = {LOW}
        for nodes, arcs in self._components():
            chosen |= self._cut(nodes, arcs)
        low = {v for v, end in enumerate(self.ends) if v not in self.follows and end in chosen}
        self._follow(low)
        return low

    def _components(self) -> Iterator[tuple[list[int], list[Arc]]]:
        """Yield the free variables and the arcs of each component, which none leads out of but to the terminals."""
        sets: UnionFind[End] = UnionFind()
        for arc in self.arcs:
            sets.union(*(node for node in (arc.low, arc.high) if node not in (LOW, HIGH)))
        nodes, arcs = defaultdict[End, list[int]](list), defaultdict[End, list[Arc]](list)
        for v, end in enumerate(self.ends):
            if end == v and v not in self.follows:
                nodes[sets[v]].append(v)
        for arc in self.arcs:
            arcs[sets[arc.high if arc.low == LOW else arc.low]].append(arc)
        yield from ((own, arcs[root]) for root, own in nodes.items())

    def _cut(self, nodes: Sequence[int], arcs: Sequence[Arc]) -> set[End]:
        """Return the nodes of a component that are low."""
        pulled = {v for v in nodes if self.gains(v) or self._copies_low(v)}
        ends = {LOW} & {arc.low for arc in arcs} | {HIGH} & {arc.high for arc in arcs}
        ends |= ({LOW} if pulled else set()) | ({HIGH} if len(pulled) < len(nodes) else set())
        if ends != {LOW, HIGH}:
            return set(nodes) if ends == {LOW} else set()
        network: nx.DiGraph[End] = nx.DiGraph()  # an edge without a capacity is an infinite one, for networkx
        for v in nodes:
            network.add_edge(*((LOW, v) if v in pulled else (v, HIGH)), capacity=self._gain(v))
        for arc in arcs:
            known = network.get_edge_data(arc.low, arc.high, {"capacity": 0})
            if arc.share == inf or "capacity" not in known:
                network.add_edge(arc.low, arc.high)
                network.edges[arc.low, arc.high].pop("capacity", None)
            else:
                cost = round(_UNIT * arc.share * self.cast_cost(arc.value))
                network.add_edge(arc.low, arc.high, capacity=known["capacity"] + cost)
        low = eliminate(network, LOW, HIGH) if len(network) > _MOST else None
        if low is None:
            _, (low, _) = nx.minimum_cut(network, LOW, HIGH, flow_func=boykov_kolmogorov)
        return set(low) - {LOW}

    def _copies_low(self, v: int) -> bool:
        """True for an exact op of a value that may be low, so that it would not be the first to round."""
        read = [value for value in self.problem.op(v).operands if self.problem.varies(value)]
        return bool(read) and exact(self.problem.op(v)) and all(self.maker(value) != HIGH for value in read)

    def _gain(self, v: int) -> int:
        """Return what the type of a vertex is worth: two bytes for each low element that a product gains from.

        For other variables it is the least unit: copies of low values gain it if they are low, and the rest if they
        are not, so that what rounds falls only to spare a Cast.
        """
        return 2 * _UNIT * sum(map(self.elements, self.problem.ports(v)[1])) if self.gains(v) else 1

    def gains(self, v: int) -> bool:
        """True for a vertex in TensorFlow's set that a lowered product depends on."""
        return v in self.may.low and (not self.problem.gains or self.problem.vertices.all[v].op in self._before)

    @cached_property
    def _products(self) -> set[OpId]:
        """The products that the lists lower."""
        p = self.problem
        return {p.vertices.all[v].op for v in p.of_kinds(HEAVY) if v in self.may.roots and v not in self.must}

    @cached_property
    def _behind(self) -> set[OpId]:
        """The ops that depend on a lowered product."""
        return self.problem.view.after(self._products)

    @cached_property
    def _before(self) -> set[OpId]:
        """The ops that a lowered product depends on, and ops whose bodies contain such a product.

        What the user lowers, ops and outputs, counts as a product.
        """
        view, options = self.problem.view, self.problem.options
        products = self._products | options.lower.keys()
        owners = {owner for op in products for owner in view.owners(op)}
        made = {made_by.id for value in options.low_inputs if (made_by := view.producer(value)) is not None}
        sources = {source for op in (*products, *owners) for source in view.flow.predecessors(op)}
        return view.before(owners | made | sources)

    @cached_property
    def raw(self) -> frozenset[int]:
        """Copies, sums and products of values that no lowered product made: low only if all their readers are."""
        p, raw = self.problem, set[int]()
        if not p.gains:
            return frozenset()
        for v, vertex in enumerate(p.vertices.all):
            op = p.view.ops[vertex.op]
            if not isinstance(self.ends[v], int) or vertex.op in p.options.lower or op.kind in HEAVY:
                continue
            if p.colors[v] is not Color.CLEAR and op.kind not in PAIR_SUMS | {"Mul"}:
                continue
            of_raw = [self._is_raw(value, raw) for value in self._varying(op)]
            if of_raw and (any(of_raw) if op.kind == "Concat" else all(of_raw)):
                raw.add(v)
        return frozenset(raw)

    def _is_raw(self, value: ValueId, raw: Collection[int]) -> bool:
        made_by, maker = self.problem.view.producer(value), self.problem.maker(value)
        return maker in raw or (self.maker(value) == HIGH and (made_by is None or made_by.id not in self._behind))

    def _add(self, low: End, high: End, value: ValueId, share: float) -> None:
        """Let it cost a share of a Cast of a value that one end is low and the other float32."""
        if low not in (high, HIGH) and high != LOW and (low, high) != (LOW, HIGH):
            self.arcs.append(Arc(low, high, value, share))

    def _cast(self, value: ValueId) -> None:
        """Let a value cost one Cast for all readers of the other type.

        Several free readers share it through an auxiliary node. No arc leads through a fixed end, so that components
        part there.
        """
        home, ends = self.maker(value), self.readers(value)
        others = ends - {home}
        if not others or not any(isinstance(end, int) for end in (home, *others)):
            return  # no Cast, or one that no label changes
        alone = next(iter(others)) if len(others) == 1 else None
        share = 1 + _FUSION * self.fuses(value)
        if home != HIGH:
            up: End = HIGH if HIGH in others else alone if alone is not None else ("up", value)
            self._add(home, up, value, share)
            for end in others if isinstance(up, tuple) else ():
                self._add(up, end, value, inf)
        if home != LOW:
            down: End = LOW if LOW in others else alone if alone is not None else ("down", value)
            self._add(down, home, value, share)
            for end in others if isinstance(down, tuple) else ():
                self._add(end, down, value, inf)

    def _group(self, cluster: Cluster, entry: ValueId) -> None:
        """Let a group that becomes one kernel cost less if its members agree."""
        nodes, worth = {self.ends[v] for v in self._members(cluster.ops)}, _FUSION * (len(cluster.ops) - 1)
        all_low, all_high = ("low", cluster.ops[0]), ("high", cluster.ops[0])
        if HIGH not in nodes:
            self._add(LOW, all_low, entry, worth)
            for node in nodes - {LOW}:
                self._add(all_low, node, entry, inf)
        elif not cluster.tail:
            return
        else:  # a norm with a float32 body, of which scale and bias may be low
            self._scale(cluster, entry, worth + 2)
            nodes = {self.ends[v] for v in self._members(op for op in cluster.ops if op not in cluster.tail)}
        self._add(all_high, HIGH, entry, worth)
        for node in nodes - {LOW, HIGH}:
            self._add(node, all_high, entry, inf)

    def _scale(self, cluster: Cluster, entry: ValueId, worth: float) -> None:
        """Let scale and bias of a float32 norm be low with its input, if no float32 reader of that keeps the Cast.

        The kernel computes wide inside and takes in the Casts around the body. Where onnxruntime refuses other types
        (`fuses`), the input is low only with them.
        """
        p, home = self.problem, self.maker(entry)
        tied, kind = fuses(p.view, cluster, p.to), cluster.kind
        if not tied and kind != "rms_normalization":
            return
        others = self.readers(entry, but=cluster.ops)
        read = {end for value in p.view.ops[cluster.ops[-1]].results for end in self.readers(value)}
        if not tied and read <= {HIGH}:
            return
        late = p.gains and cluster.ops[-1] not in self._before
        for node in {self.ends[v] for v in self._members(cluster.tail)} - {LOW}:
            if node != HIGH and not late:
                self._add(LOW, node, entry, worth)
            for other in (others | {home}) - {LOW}:
                self._add(node, other, entry, inf)
            if tied and HIGH not in others and home != LOW:
                self._add(home, node, entry, inf)

    def _members(self, ops: Iterable[OpId]) -> list[int]:
        """Return the vertices of a group that decide about its kernel: Casts and kept variables do not."""
        p = self.problem
        found = [(v, p.vertices.all[v].refusal) for v in p.of_ops(ops)]
        counts = [v for v, refusal in found if refusal is None or refusal.rule != reasons.KEPT_VARIABLE]
        return [v for v in counts if p.op(v).kind != "Cast"]

    def _follow(self, low: set[int]) -> None:
        """Give Shape, Size and inputs of Casts the type of what they read."""
        p, is_low = self.problem, {end for v in low if isinstance(end := self.ends[v], int)} | {LOW}
        for v in sorted(self.follows):
            source = p.op(v).inputs[0]
            if source is None or p.vertices.all[v].refusal is not None:
                continue
            ends = {self.maker(source)} if p.view.constant(source) is None else self.readers(source)
            if ends and ends <= is_low:
                low.add(v)
