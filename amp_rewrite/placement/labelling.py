"""The question which vertices are low, as costs; and its exact answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from amp_rewrite.placement.network import FIXED, UNCUTTABLE, Network

LOW, HIGH = -1, -2
"""Ends of a conversion or pair that are no vertex, but have a type."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """One value: who makes it, who reads it, and what a Cast of it costs, in either direction."""

    home: int
    readers: tuple[int, ...]
    cost: int


@dataclass(frozen=True, slots=True)
class Pair:
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

        def label(v: int) -> bool:
            return v == LOW if v < 0 else low[v]

        total = sum(loss for v, loss in enumerate(self.loss) if not low[v])
        total += sum(p.cost for p in self.pairs if label(p.first) is not label(p.second))
        for value in self.conversions:
            made = label(value.home)
            total += value.cost if any(label(reader) is not made for reader in value.readers) else 0
        return total

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
