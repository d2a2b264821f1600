"""Minimum cuts between float32 and the low type, one for each component of free variables."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple

import networkx as nx
import numpy as np
from networkx.algorithms.flow import boykov_kolmogorov
from networkx.utils import UnionFind

from amp_rewrite.ir.view import ValueId

LOW, HIGH = "low", "high"
"""The terminals of the cut: source and sink."""
End = int | str | tuple[str, int]
"""A vertex, the terminal of a type that is fixed, or an auxiliary node."""


class Arc(NamedTuple):
    """Cost of one low and one float32 end: a share of a Cast of a value."""

    low: End
    high: End
    value: ValueId
    share: float


UNIT = 1000
"""Units of capacity to a byte. Gains of one unit, which `placement.py` gives, decide ties."""
_MOST = 100
"""Nodes of a component that networkx cuts; it takes 0.06 s for 300, where elimination takes 0.01."""
_WIDEST = 16
"""Neighbours of a node, for which a table has 65 536 entries."""


def components(free: Collection[int], arcs: Sequence[Arc]) -> Iterator[tuple[list[int], list[Arc]]]:
    """Yield the free variables and the arcs of each component; arcs leave it only to the terminals."""
    sets: UnionFind[End] = UnionFind()
    for arc in arcs:
        sets.union(*(node for node in (arc.low, arc.high) if node not in (LOW, HIGH)))
    nodes, of = defaultdict[End, list[int]](list), defaultdict[End, list[Arc]](list)
    for v in free:
        nodes[sets[v]].append(v)
    for arc in arcs:
        of[sets[arc.high if arc.low == LOW else arc.low]].append(arc)
    yield from ((own, of[root]) for root, own in nodes.items())


def cheapest(gains: Mapping[int, int], arcs: Sequence[Arc], cost: Callable[[ValueId], int]) -> set[End]:
    """Return the low nodes of a component.

    `gains`: what the low type of a variable is worth in units; float32, if negative. `cost`: that of a Cast, in bytes.

    In a networkx graph an arc takes 0.7 KB: only components that touch both terminals become one.
    """
    ends = {LOW} & {arc.low for arc in arcs} | {HIGH} & {arc.high for arc in arcs}
    ends |= {LOW if gain > 0 else HIGH for gain in gains.values()}
    if ends != {LOW, HIGH}:
        return set(gains) if ends == {LOW} else set()
    network: nx.DiGraph[End] = nx.DiGraph()
    for v, gain in gains.items():
        network.add_edge(*((LOW, v) if gain > 0 else (v, HIGH)), capacity=abs(gain))
    for arc in arcs:
        known = network.get_edge_data(arc.low, arc.high, {"capacity": 0})["capacity"]
        more = round(UNIT * arc.share * cost(arc.value)) if arc.share < inf else inf
        network.add_edge(arc.low, arc.high, capacity=known + more)
    low = eliminate(network, LOW, HIGH) if len(network) > _MOST else None
    if low is None:
        _, (low, _) = nx.minimum_cut(network, LOW, HIGH, flow_func=boykov_kolmogorov)
    return set(low) - {LOW}


def eliminate(network: nx.DiGraph[End], source: End, sink: End) -> set[End] | None:
    """Return the nodes on the side of the source in a minimum cut; None for a network too wide for it.

    Each step minimizes over the node with the fewest neighbours and leaves a table over these (bucket elimination;
    Dechter, "Bucket Elimination: A Unifying Framework for Probabilistic Inference", 1996). O(nodes · 2^width): the
    width of transformers is at most 5, and 22 500 nodes of one take 1.5 s, where preflow-push takes 4.6.
    """
    inner = [node for node in network if node not in (source, sink)]
    tables: list[tuple[tuple[End, ...], np.ndarray]] = []
    of: dict[End, set[int]] = {node: set() for node in inner}
    near: dict[End, set[End]] = {node: set() for node in inner}
    for a, b, data in network.edges(data=True):
        names = tuple(n for n in (a, b) if n not in (source, sink))
        table = np.zeros((2,) * len(names))  # 0: on the side of the sink, 1: of the source
        table[tuple(1 if n == a else 0 for n in names)] = data["capacity"]
        for n in names:
            of[n].add(len(tables))
            near[n].update(m for m in names if m != n)
        tables.append((names, table))
    rank = {node: at for at, node in enumerate(inner)}
    queue = [(len(near[node]), rank[node]) for node in inner]
    heapq.heapify(queue)
    best: dict[End, tuple[tuple[End, ...], np.ndarray]] = {}
    while queue:
        degree, at = heapq.heappop(queue)
        node = inner[at]
        if node in best or degree != len(near[node]):
            continue
        if degree > _WIDEST:
            return None
        rest = tuple(sorted(near[node], key=rank.__getitem__))
        scope = (node, *rest)
        total = np.zeros((2,) * len(scope))
        for used in tuple(of[node]):
            names, table = tables[used]
            order = sorted(range(len(names)), key=lambda axis: scope.index(names[axis]))
            total += table.transpose(order).reshape([2 if n in names else 1 for n in scope])
            for n in names:
                of[n].discard(used)
        best[node] = rest, total.argmin(0)
        tables.append((rest, total.min(0)))
        for n in rest:
            of[n].add(len(tables) - 1)
            near[n].update(rest)
            near[n].difference_update((node, n))
            heapq.heappush(queue, (len(near[n]), rank[n]))
    side: dict[End, int] = {}
    for node, (rest, choice) in reversed(best.items()):
        side[node] = int(choice[tuple(side[n] for n in rest)])
    return {node for node, label in side.items() if label}
