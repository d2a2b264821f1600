"""The question which vertices are low, as costs; and its exact answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from amp_rewrite.decide.placement.min_cut import FIXED, UNCUTTABLE, Network

LOW, HIGH = -1, -2
"""Ends of a conversion or pair that are no vertex, but have a type; places in what `_ends` gives."""


class Conversion(NamedTuple):
    """One value: who makes it, who reads it, and what a Cast of it costs, in either direction.

    `casts`: how many it adds to the model; 0 if the model has one there that does nothing (float32 to float32).
    """

    home: int
    readers: tuple[int, ...]
    cost: int
    casts: int = 1


class Pair(NamedTuple):
    """Two vertices that run as one if they have one type, and what it costs if they do not."""

    first: int
    second: int
    cost: int


@dataclass(frozen=True)
class Labelling:
    """Vertices 0 to size - 1, each to be low or high, and the cost of that in attoseconds (1e-18 s).

    `loss[v]` is what vertex v takes longer in float32. A value that is made in one type and read in the other
    takes one Cast, however many read it. `fixed` vertices have their label, `tied` ones have the same.
    """

    loss: tuple[int, ...]
    conversions: tuple[Conversion, ...] = ()
    pairs: tuple[Pair, ...] = ()
    fixed: Mapping[int, bool] | None = None
    tied: tuple[tuple[int, ...], ...] = ()

    def cost(self, low: Sequence[bool]) -> int:
        """What labels cost. O(vertices + uses)."""
        ends = _ends(low)
        total = sum(loss for loss, label in zip(self.loss, low, strict=True) if not label)
        total += sum(pair.cost for pair in self.pairs if _parted(pair, ends))
        return total + sum(value.cost for value in self.conversions if _cast(value, ends))

    def casts(self, low: Sequence[bool]) -> int:
        """How many Casts labels take."""
        ends = _ends(low)
        return sum(value.casts for value in self.conversions if _cast(value, ends))

    def improved(self, before: Sequence[bool], after: Sequence[bool], least: int = 1) -> list[bool]:
        """The labels `after`, but `before` in each region where those take fewer Casts or cost less than `least` more.

        A region is what differs and hangs together: what one costs does not depend on the others.
        """
        regions = _Regions([v for v in range(len(self.loss)) if before[v] is not after[v]])
        if not regions.parent:
            return list(before)
        for value in self.conversions:
            regions.join((value.home, *value.readers))
        for pair in self.pairs:
            regions.join((pair.first, pair.second))
        for group in self.tied:
            regions.join(group)
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

    def allows(self, low: Sequence[bool]) -> bool:
        """Whether labels are as `fixed` and `tied` demand."""
        fixed = all(low[v] is label for v, label in (self.fixed or {}).items())
        return fixed and all(len({low[v] for v in group}) == 1 for group in self.tied)

    def best(self) -> list[bool]:
        """The labels of the least cost; of several, those with the fewest low vertices.

        Vertices that are tied and fixed otherwise are high, all of them.
        """
        network = Network()
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
        found = network.lowest()
        return [found[node] for node in at]

    def _nodes(self, network: Network) -> list[int]:
        """The node of each vertex: one for those that are tied, pulled to where they are fixed."""
        parent = list(range(len(self.loss)))

        def root(v: int) -> int:
            while parent[v] != v:
                parent[v] = parent[parent[v]]
                v = parent[v]
            return v

        for group in self.tied:
            for v in group[1:]:
                parent[root(v)] = root(group[0])
        nodes: dict[int, int] = {}
        for v in range(len(self.loss)):
            if root(v) not in nodes:
                nodes[root(v)] = network.node()
        pulls: dict[int, set[bool]] = {}
        for v, label in (self.fixed or {}).items():
            pulls.setdefault(nodes[root(v)], set()).add(label)
        for node, labels in pulls.items():
            network.pull[node] += FIXED if labels == {True} else -FIXED
        return [nodes[root(v)] for v in range(len(self.loss))]


def _ends(low: Sequence[bool]) -> list[bool]:
    """The labels with those of HIGH and LOW behind them, so that every end is a place there."""
    return [*low, False, True]


def _parted(pair: Pair, ends: Sequence[bool]) -> bool:
    return ends[pair.first] is not ends[pair.second]


def _cast(value: Conversion, ends: Sequence[bool]) -> bool:
    return (not ends[value.home]) in map(ends.__getitem__, value.readers)


class _Regions:
    """Vertices that hang together, and what a change of theirs brings: cost, and Casts."""

    def __init__(self, vertices: Iterable[int]) -> None:
        self.parent = {v: v for v in vertices}
        self.change: dict[int, list[int]] = {}

    def root(self, v: int) -> int:
        while self.parent[v] != v:
            self.parent[v] = self.parent[self.parent[v]]
            v = self.parent[v]
        return v

    def join(self, ends: Iterable[int]) -> None:
        """All of the ends that are vertices here hang together."""
        mine = [v for v in ends if v in self.parent]
        for v in mine[1:]:
            self.parent[self.root(v)] = self.root(mine[0])

    def count(self, ends: Iterable[int], more: tuple[int, int]) -> None:
        """Count what changes at these ends to their region; call it when all that hangs together is joined."""
        v = next((v for v in ends if v in self.parent), None)
        if v is not None:
            change = self.change.setdefault(self.root(v), [0, 0])
            change[0] += more[0]
            change[1] += more[1]

    def better(self, v: int, least: int) -> bool:
        """Whether the region of a vertex costs so much less, and takes no more Casts."""
        if v not in self.parent:
            return False
        cost, casts = self.change.get(self.root(v), (0, 0))
        return cost <= -least and casts <= 0


def _convert(network: Network, home: int, readers: tuple[int, ...], cost: int) -> None:
    """Charge one Cast down if any reader is low and the home is not, and one up if it is the other way round.

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
