"""A flow network between two terminals, and its cheapest cut.

Greig, Porteous and Seheult, Exact maximum a posteriori estimation for binary images (1989), for what a cut has to do
with labels; Dinitz, Algorithm for solution of a problem of maximum flow (1970), for the flow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

UNCUTTABLE = 1 << 70
"""The cost of an arc that no cut parts: above any sum of real costs."""
FIXED = 1 << 110
"""The pull at a node whose side is known: above any sum of arcs."""


@dataclass
class Network:
    """Nodes on the low side (the source's) or the high side (the sink's), and what it costs to part them.

    `pull[v]` is paid when v is high, or, negative, when it is low; `out[u][v]` when u is low and v is high.
    Costs are whole numbers, so that a cut is exact.
    """

    pull: list[int] = field(default_factory=list)
    out: list[dict[int, int]] = field(default_factory=list)

    def node(self) -> int:
        """A new node."""
        self.pull.append(0)
        self.out.append({})
        return len(self.pull) - 1

    def arc(self, low: int, high: int, cost: int) -> None:
        """Charge `cost` when one node is low and another high."""
        if low != high:
            self.out[low][high] = self.out[low].get(high, 0) + cost

    def lowest(self) -> list[bool]:
        """Which nodes are low in the cheapest cut; of several, in the one with the fewest.

        Nodes that one glance decides are taken out first, the regions that they leave are solved apart.
        """
        settled = _Settling(self)
        settled.run()
        side = settled.side
        for region in self._regions(side):
            low = _Flow(region, self.out, settled.pull).low_side()
            for v in region:
                side[v] = v in low
        return [label is True for label in side]

    def _regions(self, side: Sequence[bool | None]) -> Iterator[list[int]]:
        """The undecided nodes that arcs join."""
        near: list[list[int]] = [[] for _ in side]
        for u, arcs in enumerate(self.out):
            if side[u] is None:
                for v in arcs:
                    if side[v] is None:
                        near[u].append(v)
                        near[v].append(u)
        seen = [label is not None for label in side]
        for start in range(len(side)):
            if seen[start]:
                continue
            seen[start] = True
            region = [start]
            for u in region:
                for v in near[u]:
                    if not seen[v]:
                        seen[v] = True
                        region.append(v)
            yield region


class _Settling:
    """Decides the nodes that are on one side whatever the others do, again and again. O(nodes + arcs).

    A node is low if being high costs more than all that being low can cost, and high if being low costs no less
    than all that being high can cost: so of several cheapest cuts the one with the fewest low nodes is left.
    """

    def __init__(self, network: Network) -> None:
        self.out = network.out
        self.into: list[list[int]] = [[] for _ in network.out]
        self.pull = list(network.pull)
        self.leaving = [sum(arcs.values()) for arcs in network.out]
        self.entering = [0] * len(network.out)
        for u, arcs in enumerate(network.out):
            for v, cost in arcs.items():
                self.into[v].append(u)
                self.entering[v] += cost
        self.side: list[bool | None] = [None] * len(network.out)

    def run(self) -> None:
        """Decide what can be; `pull` then holds what decided neighbours pull, too."""
        pending = list(range(len(self.side)))
        while pending:
            v = pending.pop()
            if self.side[v] is not None:
                continue
            if self.pull[v] > self.leaving[v]:
                self._low(v, pending)
            elif -self.pull[v] >= self.entering[v]:
                self._high(v, pending)

    def _low(self, v: int, pending: list[int]) -> None:
        self.side[v] = True
        for w, cost in self.out[v].items():
            self.entering[w] -= cost
            self.pull[w] += cost
            pending.append(w)
        for u in self.into[v]:
            self.leaving[u] -= self.out[u][v]
            pending.append(u)

    def _high(self, v: int, pending: list[int]) -> None:
        self.side[v] = False
        for u in self.into[v]:
            self.leaving[u] -= self.out[u][v]
            self.pull[u] -= self.out[u][v]
            pending.append(u)
        for w, cost in self.out[v].items():
            self.entering[w] -= cost
            pending.append(w)


class _Flow:
    """The largest flow through one region, by Dinitz's method: shortest ways first, all of one length at a time.

    O(nodes² arcs) at worst, on paths and trees far less.
    """

    def __init__(self, region: Sequence[int], out: Sequence[Mapping[int, int]], pull: Sequence[int]) -> None:
        self.region = region
        at = {v: i for i, v in enumerate(region)}
        self.source, self.sink = len(region), len(region) + 1
        self.ends: list[int] = []
        self.room: list[int] = []
        self.arcs: list[list[int]] = [[] for _ in range(len(region) + 2)]
        for i, v in enumerate(region):
            for w, cost in out[v].items():
                if w in at:
                    self._arc(i, at[w], cost)
            if pull[v] > 0:
                self._arc(self.source, i, pull[v])
            elif pull[v] < 0:
                self._arc(i, self.sink, -pull[v])

    def _arc(self, u: int, v: int, room: int) -> None:
        self.arcs[u].append(len(self.ends))
        self.arcs[v].append(len(self.ends) + 1)
        self.ends += [v, u]
        self.room += [room, 0]

    def low_side(self) -> set[int]:
        """The nodes that are still reached from the source when no more flows: the smallest low side there is."""
        depth = self._depths()
        while depth[self.sink] >= 0:
            self._fill(depth)
            depth = self._depths()
        return {v for i, v in enumerate(self.region) if depth[i] >= 0}

    def _depths(self) -> list[int]:
        depth = [-1] * len(self.arcs)
        depth[self.source] = 0
        reached = [self.source]
        for u in reached:
            for arc in self.arcs[u]:
                v = self.ends[arc]
                if depth[v] < 0 and self.room[arc]:
                    depth[v] = depth[u] + 1
                    reached.append(v)
        return depth

    def _fill(self, depth: list[int]) -> None:
        """Fill every shortest way from source to sink."""
        upcoming = [0] * len(self.arcs)
        path: list[int] = []
        u = self.source
        while True:
            if u == self.sink:
                u = self._push(path)
            arc = self._onward(u, depth, upcoming)
            if arc is not None:
                path.append(arc)
                u = self.ends[arc]
            elif path:
                depth[u] = -1  # a dead end for all that is left of this round
                u = self.ends[path.pop() ^ 1]
            else:
                return

    def _onward(self, u: int, depth: list[int], upcoming: list[int]) -> int | None:
        arcs = self.arcs[u]
        while upcoming[u] < len(arcs):
            arc = arcs[upcoming[u]]
            if self.room[arc] and depth[self.ends[arc]] == depth[u] + 1:
                return arc
            upcoming[u] += 1
        return None

    def _push(self, path: list[int]) -> int:
        """Send what fits along a path, and step back to before its first full arc."""
        fits = min(self.room[arc] for arc in path)
        for arc in path:
            self.room[arc] -= fits
            self.room[arc ^ 1] += fits
        full = next(i for i, arc in enumerate(path) if not self.room[arc])
        u = self.ends[path[full] ^ 1]
        del path[full:]
        return u
