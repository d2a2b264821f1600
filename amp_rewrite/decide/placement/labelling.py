"""The labelling problem: each vertex is low or high, at a cost; and its exact solution."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from amp_rewrite.decide.placement.min_cut import FIXED, UNCUTTABLE, FlowNetwork
from amp_rewrite.decide.union_find import UnionFind

LOW, HIGH = -1, -2
"""Ends of a conversion or pair that are a type instead of a vertex; positions in the list of `_ends`."""


class Conversion(NamedTuple):
    """One value: the end that makes it, the ends that read it, and the cost of a Cast of it, in either direction.

    `casts`: Casts that it adds to the model; 0 if the model already has a Cast there, from float32 to float32.
    """

    home: int
    readers: tuple[int, ...]
    cost: int
    casts: int = 1


class Pair(NamedTuple):
    """Two vertices that run as one if they have one type, and the cost if they do not."""

    first: int
    second: int
    cost: int


@dataclass(frozen=True)
class Labelling:
    """Vertices 0 to size - 1, each to be low or high, and the costs in attoseconds (1e-18 s).

    `loss[v]`: how much longer vertex v takes in float32. A value that is made in one type and read in the other takes
    one Cast, whatever the number of readers. `fixed` vertices have their label, `tied` ones have the same.
    """

    loss: tuple[int, ...]
    conversions: tuple[Conversion, ...] = ()
    pairs: tuple[Pair, ...] = ()
    fixed: Mapping[int, bool] | None = None
    tied: tuple[tuple[int, ...], ...] = ()

    def cost(self, low: Sequence[bool]) -> int:
        """Return the time that labels cost. O(vertices + uses)."""
        ends = _ends(low)
        total = sum(loss for loss, label in zip(self.loss, low, strict=True) if not label)
        total += sum(pair.cost for pair in self.pairs if _parted(pair, ends))
        return total + sum(value.cost for value in self.conversions if _cast(value, ends))

    def casts(self, low: Sequence[bool]) -> int:
        """Return the number of Casts that labels take."""
        ends = _ends(low)
        return sum(value.casts for value in self.conversions if _cast(value, ends))

    def improved(self, before: Sequence[bool], after: Sequence[bool], least: int = 1) -> list[bool]:
        """Return the labels `after`, but those `before` in each region where these take fewer Casts or cost less than
        `least` more.

        A region is a connected set of vertices whose labels differ; its cost does not depend on other regions.
        """
        regions = _Regions([v for v in range(len(self.loss)) if before[v] is not after[v]])
        if not regions.parent:
            return list(before)
        ends = [*((value.home, *value.readers) for value in self.conversions), *(pair[:2] for pair in self.pairs)]
        for joined in (*ends, *self.tied):
            regions.join(joined)
        for v in regions.parent:
            regions.count((v,), (self.loss[v] if before[v] else -self.loss[v], 0))
        old, new = _ends(before), _ends(after)
        for pair in self.pairs:
            if parted := _parted(pair, new) - _parted(pair, old):
                regions.count((pair.first, pair.second), (parted * pair.cost, 0))
        for value in self.conversions:
            if more := _cast(value, new) - _cast(value, old):
                regions.count((value.home, *value.readers), (more * value.cost, more * value.casts))
        return [after[v] if regions.better(v, least) else before[v] for v in range(len(self.loss))]

    def best(self) -> list[bool]:
        """Return the labels of the least cost; of several, those with the fewest low vertices.

        Tied vertices that are fixed to different labels are all high.
        """
        network = FlowNetwork()
        at = self._nodes(network)
        low = network.node()
        network.pull[low] = FIXED
        high = network.node()
        network.pull[high] = -FIXED
        ends = {**dict(enumerate(at)), LOW: low, HIGH: high}
        for v, loss in enumerate(self.loss):
            network.pull[at[v]] += loss
        for pair in self.pairs:
            network.arc(ends[pair.first], ends[pair.second], pair.cost)
            network.arc(ends[pair.second], ends[pair.first], pair.cost)
        for value in self.conversions:
            _convert(network, ends[value.home], tuple(dict.fromkeys(ends[r] for r in value.readers)), value.cost)
        labels = network.lowest()
        return [labels[node] for node in at]

    def _nodes(self, network: FlowNetwork) -> list[int]:
        """Return the node of each vertex: one for tied vertices, pulled to their fixed label."""
        sets = UnionFind(range(len(self.loss)))
        for group in self.tied:
            sets.join(group)
        roots = list(map(sets.root, range(len(self.loss))))
        nodes = {root: network.node() for root in dict.fromkeys(roots)}
        pulls: dict[int, set[bool]] = {}
        for v, label in (self.fixed or {}).items():
            pulls.setdefault(nodes[roots[v]], set()).add(label)
        for node, labels in pulls.items():
            network.pull[node] += FIXED if labels == {True} else -FIXED
        return [nodes[root] for root in roots]


def _ends(low: Sequence[bool]) -> list[bool]:
    """Return the labels, then those of HIGH and LOW, so that every end is a position in the list."""
    return [*low, False, True]


def _parted(pair: Pair, ends: Sequence[bool]) -> bool:
    return ends[pair.first] is not ends[pair.second]


def _cast(value: Conversion, ends: Sequence[bool]) -> bool:
    return (not ends[value.home]) in map(ends.__getitem__, value.readers)


class _Regions(UnionFind):
    """Connected vertices, and the change that new labels of a region bring: cost, and Casts."""

    def __init__(self, vertices: Iterable[int]) -> None:
        super().__init__(vertices)
        self.change: dict[int, list[int]] = {}

    def count(self, ends: Iterable[int], more: tuple[int, int]) -> None:
        """Add a change at these ends to their region. Call it after the last `join`."""
        v = next((v for v in ends if v in self.parent), None)
        if v is not None:
            change = self.change.setdefault(self.root(v), [0, 0])
            change[0] += more[0]
            change[1] += more[1]

    def better(self, v: int, least: int) -> bool:
        """True if the region of a vertex costs at least `least` less, and takes no more Casts."""
        if v not in self.parent:
            return False
        cost, casts = self.change.get(self.root(v), (0, 0))
        return cost <= -least and casts <= 0


def _convert(network: FlowNetwork, home: int, readers: tuple[int, ...], cost: int) -> None:
    """Charge one Cast down if any reader is low and the home is not, and one up in the opposite case.

    Several readers share a Cast through a node of its own: low as long as no reader is high, or once one is low.
    """
    readers = tuple(r for r in readers if r != home)
    if len(readers) == 1:
        network.arc(home, readers[0], cost)
        network.arc(readers[0], home, cost)
    elif readers:
        up, down = network.node(), network.node()
        network.arc(home, up, cost)
        network.arc(down, home, cost)
        for reader in readers:
            network.arc(up, reader, UNCUTTABLE)
            network.arc(reader, down, UNCUTTABLE)
