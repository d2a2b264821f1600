"""Border between low and float32 ops: a labelling of the type variables, by a minimum cut.

Results of allowed and lowered ops are low; vertices in `must_stay` and on the deny list are float32. All other
variables are free, including those that TensorFlow's rules leave in float32. A labelling pays for a Cast of each value
made in one type and read in the other, and earns the bytes saved by low results. A variable outside TensorFlow's set
earns nothing: it is lowered only to save a Cast, or to make one smaller.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import networkx as nx
import numpy as np
from networkx.algorithms.flow import boykov_kolmogorov
from networkx.utils import UnionFind

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.free import HIGH, LOW, End, Free, scale_is_tied
from amp_rewrite.decide.coloring.problem import Problem, Spread
from amp_rewrite.decide.reasons import Paint, float32
from amp_rewrite.decide.sizes import size, terms_of_product
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import exact
from amp_rewrite.ir.op_classes import CHOOSES, ELEMENTLESS, HEAVY, PRODUCTS, SOFTMAXES, TENSOR_CORE_STEP
from amp_rewrite.ir.patterns.clusters import Cluster
from amp_rewrite.ir.view import OpId, ValueId

_CAST = 24 << 20
"""Cost of a Cast in bytes, in addition to its own traffic.

Starting a kernel takes as long as moving 1.4 MiB on an A100, or 8 MiB on an H200. The constant is higher because sizes
with free dimensions are guesses: with 8 MiB, some models would get two more Casts to save traffic that may not exist.
"""
_MAX_ELEMENTS = 1 << 24
"""Maximum number of elements to assume for a value: a size with free dimensions is a guess."""
_FUSION = 0.5
"""Gain from saving one kernel, as a share of the cost of a Cast."""
_ONE_KERNEL = ("layer_normalization", "rms_normalization", "gelu_erf", "gelu_tanh")
"""Written-out groups that onnxruntime runs as one kernel."""
_FUSED_READERS = {
    "Add": ("LayerNormalization", "Softmax", "Gelu"),
    "MatMul": ("Add",),
    "Mul": ("MatMul",),
    "Conv": ("BatchNormalization",),
}
"""By op, the readers that onnxruntime 1.31.1 fuses with it on CUDA if they have the same type and no Cast between."""


_UNIT = 1000
"""Capacity units per byte; a gain of one unit breaks ties."""
_MAX_CUT_NODES = 100
"""Maximum number of nodes for a cut by networkx: 300 nodes take 0.06 s, but only 0.01 s by elimination."""
_MAX_NEIGHBORS = 16
"""Maximum number of neighbors of an eliminated node; its table then has 65,536 entries."""


class Arc(NamedTuple):
    """Cost if the end `low` is low and the end `high` is float32, as a share of a Cast of the value."""

    low: End
    high: End
    value: ValueId
    share: float


def place(problem: Problem, spread: Spread) -> tuple[dict[int, Paint], dict[int, Paint]]:
    """Return the paints of low and of float32 vertices in the cheapest labelling.

    If the first cut leaves low parts with only short products, these parts stay float32 in a second cut.
    """
    labelling = Labelling(problem, spread)
    low = labelling.solve()
    short = _parts_without_gain(problem, low) if problem.only_before_products else ()
    idle = dict.fromkeys(short, float32(reasons.NO_GAIN, None, _SHORT))
    if idle:
        labelling = Labelling(problem, spread, idle)
        low = labelling.solve()
    spread_low, after = spread.low.keys() - labelling.follows, labelling.after_products
    high = {v: labelling.paint_of_high(v) for v in sorted((spread_low | after) - low - spread.denied.keys())}
    return {v: spread.low[v] if v in spread_low else labelling.paint_of_low(v) for v in sorted(low)}, idle | high


def place_without_cut(problem: Problem, spread: Spread) -> tuple[dict[int, Paint], dict[int, Paint]]:
    """Return the paints of TensorFlow's set without a cut; vertices in `before_products` need low readers."""
    labelling, low, high = Labelling(problem, spread), dict(spread.low), dict[int, Paint]()
    for v in sorted(labelling.before_products & low.keys() - problem.sequence_of.keys(), reverse=True):
        read = {end for value in labelling.results(v) for end in labelling.reader_ends(value, integers=True)}
        if any(end != LOW and end not in low for end in read):
            del low[v]
            high[v] = labelling.paint_of_high(v)
    return low, high


_SHORT = f"its products sum fewer than {TENSOR_CORE_STEP} terms, so float32 saves the Casts"


def _parts_without_gain(problem: Problem, low: Collection[int]) -> Iterator[int]:
    """Yield the vertices of low parts with only short products: tensor cores do not speed these up."""
    p = problem
    short = {v for v in p.of_kinds(PRODUCTS) if v in low and terms_of_product(p.view, p.op(v)) < TENSOR_CORE_STEP}
    clustered = (op for cluster in p.clusters if cluster.kind == "softmax" for op in cluster.ops)
    gaining = {*p.of_kinds(HEAVY), *p.of_ops(clustered), *p.of_kinds(SOFTMAXES)} - short
    for part in nx.weakly_connected_components(p.graph.subgraph(low)) if short else ():
        if not part.isdisjoint(short) and part.isdisjoint(gaining):
            yield from part - {*p.of_ops(p.lower), *p.of_kinds(ELEMENTLESS)}


@dataclass
class Labelling(Free):
    """The cheapest labelling: arcs between free variables, and a minimum cut of each component.

    An arc ends at the representative of variables that share a type, at an auxiliary node, or at a terminal.
    """

    arcs: list[Arc] = field(default_factory=list)

    # -- reasons -----------------------------------------------------------------------------------

    def paint_of_low(self, v: int) -> Paint:
        """Return the paint of a low vertex outside TensorFlow's set."""
        p, op = self.problem, self.problem.op(v)
        if op.kind in ELEMENTLESS:
            producer = p.view.producer(op.inputs[0])
            return Paint(p.to, reasons.SHAPE_FOLLOWS, producer.id if producer is not None else None)
        return Paint(p.to, reasons.MIN_CUT, None, p.why_unneeded(v))

    def paint_of_high(self, v: int) -> Paint:
        """Return the paint of a float32 vertex in TensorFlow's set, with the reason against a low type."""
        if v in self.must_stay:
            return self.must_stay[v]
        if v in self.before_products:
            return float32(reasons.NO_GAIN, None, "no product computes its input, and not all of its readers are low")
        if self.earns(v):
            return float32(reasons.MIN_CUT, None, "it gains less than the Casts around it would cost")
        return float32(reasons.NO_GAIN, None, "no lowered product reads its result")

    # -- the network -------------------------------------------------------------------------------

    def solve(self) -> set[int]:
        view = self.problem.view
        for value in (v.id for v in view.values if view.tensor_dtype(v.id) is DType.FLOAT):
            cast = view.producer(value, "Cast")
            open_to_casts = cast is None or view.dtype(cast.inputs[0]) not in (DType.FLOAT, self.problem.to)
            if open_to_casts and view.constant(value) is None:  # constants are stored in either type
                self._price_cast(value)
        for cluster in self.problem.clusters:
            if cluster.kind in _ONE_KERNEL:
                self._group(cluster, cluster.entry)
        for v in self.problem.of_kinds(CHOOSES):
            for value in filter(self.varies, self.problem.op(v).operands):
                self._add(self.ends[v], self.maker_end(value), value, inf)
        for v in self.before_products:
            for value in self.results(v):
                for end in self.reader_ends(value, integers=True):
                    self._add(self.ends[v], end, value, inf)
        chosen: set[End] = {LOW}
        for nodes, arcs in self._components():
            chosen |= self._cheapest(nodes, arcs)
        low = {v for v, end in enumerate(self.ends) if v not in self.follows and end in chosen}
        self._follow(low)
        return low

    def _components(self) -> Iterator[tuple[list[int], list[Arc]]]:
        """Yield the free variables and the arcs of each component. No arc connects two components."""
        sets: UnionFind[End] = UnionFind()
        for arc in self.arcs:
            sets.union(*(node for node in (arc.low, arc.high) if node not in (LOW, HIGH)))
        nodes, arcs_of = defaultdict[End, list[int]](list), defaultdict[End, list[Arc]](list)
        for v, end in enumerate(self.ends):
            if end == v and v not in self.follows:
                nodes[sets[v]].append(v)
        for arc in self.arcs:
            arcs_of[sets[arc.high if arc.low == LOW else arc.low]].append(arc)
        yield from ((members, arcs_of[root]) for root, members in nodes.items())

    def _cheapest(self, nodes: Sequence[int], arcs: Sequence[Arc]) -> set[End]:
        """Return the low nodes of a component in its cheapest labelling.

        A Cast costs the start of a kernel, and 6 bytes per element to read one type and write the other. An arc of a
        networkx graph takes 0.7 KB, so one is built only for components with arcs to both terminals.
        """
        network: nx.DiGraph[End] = nx.DiGraph()
        ends = {LOW} & {arc.low for arc in arcs} | {HIGH} & {arc.high for arc in arcs}
        for v in nodes:
            gain = self._gain(v)
            ends.add(LOW if gain > 0 else HIGH)
            network.add_edge(*((LOW, v) if gain > 0 else (v, HIGH)), capacity=abs(gain))
        if ends != {LOW, HIGH}:
            return set(nodes) if ends == {LOW} else set()
        for arc in arcs:
            cost_so_far = network.get_edge_data(arc.low, arc.high, {"capacity": 0})["capacity"]
            cost = _CAST + 6 * self._elements(arc.value)
            added = round(_UNIT * arc.share * cost) if arc.share < inf else inf
            network.add_edge(arc.low, arc.high, capacity=cost_so_far + added)
        low = eliminate(network, LOW, HIGH) if len(network) > _MAX_CUT_NODES else None
        if low is None:
            _, (low, _) = nx.minimum_cut(network, LOW, HIGH, flow_func=boykov_kolmogorov)
        return set(low) - {LOW}

    def _elements(self, value: ValueId) -> int:
        return min(size(self.problem.view, value), _MAX_ELEMENTS)

    def _gain(self, v: int) -> int:
        """Return the gain of a vertex from a low type, in capacity units; negative for a gain from float32.

        It is two bytes per element upstream of a lowered product. Elsewhere, one unit breaks ties: an exact op is
        better low if all its inputs can be, and any other op is better in float32, so that an op that rounds is lowered
        only to save a Cast.
        """
        if self.earns(v):
            return 2 * _UNIT * sum(map(self._elements, self.results(v)))
        read = list(filter(self.varies, self.problem.op(v).operands))
        copies = read and exact(self.problem.op(v)) and all(self.maker_end(value) != HIGH for value in read)
        return 1 if copies else -1

    def _add(self, low: End, high: End, value: ValueId, share: float) -> None:
        """Add an arc: if `low` is low and `high` is float32, it costs `share` of a Cast of the value."""
        if low not in (high, HIGH) and high != LOW and (low, high) != (LOW, HIGH):
            self.arcs.append(Arc(low, high, value, share))

    def _price_cast(self, value: ValueId) -> None:
        """Add the arcs of a value: one Cast serves all readers of the other type.

        Several free readers share it through an auxiliary node: "up" for a low value and float32 readers, "down" for
        the reverse. No arc passes through a fixed end, so components are separate there.
        """
        home, ends = self.maker_end(value), self.reader_ends(value)
        others = ends - {home}
        if not others or not any(isinstance(end, int) for end in (home, *others)):
            return  # no Cast, or a Cast under every labelling
        only = next(iter(others)) if len(others) == 1 else None
        share = 1 + _FUSION * self._fuses(value)
        for fixed, direction in ((HIGH, "up"), (LOW, "down")):
            node: End = fixed if fixed in others else only if only is not None else (direction, value)
            arcs = [(home, node, share), *((node, end, inf) for end in others if isinstance(node, tuple))]
            for a, b, cost in arcs if home != fixed else ():
                self._add(*((a, b) if fixed == HIGH else (b, a)), value, cost)

    def _fuses(self, value: ValueId) -> bool:
        """True if the runtime fuses the maker and the only reader of a value if there is no Cast between them."""
        view = self.problem.view
        op, uses = view.producer(value), view.uses[value]
        if op is None or len(uses) != 1 or value in view.yielded:
            return False
        reader = view.ops[uses[0].op]
        pays = reader.kind != "Softmax" or not self.problem.only_before_products or reader.id in self.upstream
        return pays and reader.kind in _FUSED_READERS.get(op.kind, ())

    def _group(self, cluster: Cluster, entry: ValueId) -> None:
        """Reward equal types in a group of ops with a common kernel."""
        nodes, gain = self._members(cluster.ops), _FUSION * (len(cluster.ops) - 1)
        all_low, all_high = ("low", cluster.ops[0]), ("high", cluster.ops[0])
        if HIGH not in nodes:
            self._add(LOW, all_low, entry, gain)
            for node in nodes - {LOW}:
                self._add(all_low, node, entry, inf)
        elif not cluster.tail:
            return
        else:  # a norm with a float32 body, whose scale and bias may be low
            self._scale(cluster, entry, gain + 2)
            nodes = self._members(op for op in cluster.ops if op not in cluster.tail)
        self._add(all_high, HIGH, entry, gain)
        for node in nodes - {LOW, HIGH}:
            self._add(node, all_high, entry, inf)

    def _scale(self, cluster: Cluster, entry: ValueId, gain: float) -> None:
        """Let scale and bias of a float32 norm be low if its input is, unless a float32 reader needs the Cast.

        The fused kernel computes in float32 inside and absorbs the Casts around the body. Where onnxruntime requires
        equal types (`scale_is_tied`), the input is low only together with scale and bias.
        """
        p, home = self.problem, self.maker_end(entry)
        bound = scale_is_tied(p.view, cluster, p.to)
        read = {end for value in p.view.ops[cluster.ops[-1]].results for end in self.reader_ends(value)}
        if not bound and (cluster.kind != "rms_normalization" or read <= {HIGH}):
            return
        others = self.reader_ends(entry, without=cluster.ops)
        unread = p.only_before_products and cluster.ops[-1] not in self.upstream
        for node in self._members(cluster.tail) - {LOW}:
            if node != HIGH and not unread:
                self._add(LOW, node, entry, gain)
            for other in (others | {home}) - {LOW}:
                self._add(node, other, entry, inf)
            if bound and HIGH not in others and home != LOW:
                self._add(home, node, entry, inf)

    def _members(self, ops: Iterable[OpId]) -> set[End]:
        p = self.problem
        found = ((v, p.vertices[v].refusal) for v in p.of_ops(ops) if p.op(v).kind != "Cast")
        return {self.ends[v] for v, refusal in found if refusal is None or refusal.rule != reasons.KEPT_VARIABLE}

    def _follow(self, low: set[int]) -> None:
        p, is_low = self.problem, {LOW, *(self.ends[v] for v in low)}
        for v in sorted(self.follows):
            source = p.op(v).inputs[0]
            producer = p.view.producer(source)
            if source is None or p.vertices[v].refusal is not None or (producer is not None and p.widens(producer)):
                continue
            ends = {self.maker_end(source)} if p.view.constant(source) is None else self.reader_ends(source)
            if ends and ends <= is_low:
                low.add(v)


def eliminate(network: nx.DiGraph[End], source: End, sink: End) -> set[End] | None:
    """Return the nodes on the source's side of a minimum cut; None if the network is too wide.

    Each step minimizes over the node with the fewest neighbors and leaves a table over them (bucket elimination;
    Dechter, "Bucket Elimination: A Unifying Framework for Probabilistic Inference", 1996). O(nodes · 2^width):
    transformers have a width of at most 5, and one with 22,500 nodes takes 1.5 s, and 4.6 s by preflow-push.
    """
    inner = [node for node in network if node not in (source, sink)]
    tables: list[tuple[tuple[End, ...], np.ndarray]] = []
    tables_of: dict[End, set[int]] = {node: set() for node in inner}
    neighbors: dict[End, set[End]] = {node: set() for node in inner}
    for a, b, data in network.edges(data=True):
        names = tuple(n for n in (a, b) if n not in (source, sink))
        table = np.zeros((2,) * len(names))  # 0: the side of the sink, 1: the side of the source
        table[tuple(1 if n == a else 0 for n in names)] = data["capacity"]
        for n in names:
            tables_of[n].add(len(tables))
            neighbors[n].update(m for m in names if m != n)
        tables.append((names, table))
    rank = {node: at for at, node in enumerate(inner)}
    queue = [(len(neighbors[node]), rank[node]) for node in inner]
    heapq.heapify(queue)
    best: dict[End, tuple[tuple[End, ...], np.ndarray]] = {}
    while queue:
        degree, at = heapq.heappop(queue)
        node = inner[at]
        if node in best or degree != len(neighbors[node]):
            continue
        if degree > _MAX_NEIGHBORS:
            return None
        rest = tuple(sorted(neighbors[node], key=rank.__getitem__))
        scope = (node, *rest)
        total = np.zeros((2,) * len(scope))
        for used in tuple(tables_of[node]):
            names, table = tables[used]
            order = sorted(range(len(names)), key=lambda axis: scope.index(names[axis]))
            total += table.transpose(order).reshape([2 if n in names else 1 for n in scope])
            for n in names:
                tables_of[n].discard(used)
        best[node] = rest, total.argmin(0)
        tables.append((rest, total.min(0)))
        for n in rest:
            tables_of[n].add(len(tables) - 1)
            neighbors[n].update(rest)
            neighbors[n].difference_update((node, n))
            heapq.heappush(queue, (len(neighbors[n]), rank[n]))
    side: dict[End, int] = {}
    for node, (rest, choice) in reversed(best.items()):
        side[node] = int(choice[tuple(side[n] for n in rest)])
    return {node for node, label in side.items() if label}
