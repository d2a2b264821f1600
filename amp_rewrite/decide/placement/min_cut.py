"""A flow network between two terminals, and its cheapest cut.

Greig, Porteous and Seheult, Exact maximum a posteriori estimation for binary images (1989): a cut is a labelling.
Goldberg and Tarjan, A new approach to the maximum-flow problem (1988): the flow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from amp_rewrite.decide.union_find import UnionFind

UNCUTTABLE = 1 << 70
"""Cost of an arc that no cut parts: above any sum of real costs."""
FIXED = 1 << 110
"""Pull at a node whose side is known: above any sum of arcs."""


@dataclass
class FlowNetwork:
    """Nodes on the low side (the source's) or the high side (the sink's), and the costs of parting them.

    A positive `pull[v]` is paid when v is high, a negative one when it is low; `out[u][v]` when u is low and v is high.
    Costs are integers, so a cut is exact.
    """

    pull: list[int] = field(default_factory=list)
    out: list[dict[int, int]] = field(default_factory=list)

    def node(self) -> int:
        """Add a node and return it."""
        self.pull.append(0)
        self.out.append({})
        return len(self.pull) - 1

    def arc(self, low: int, high: int, cost: int) -> None:
        """Charge `cost` when one node is low and another high."""
        if low != high:
            self.out[low][high] = self.out[low].get(high, 0) + cost

    def lowest(self) -> list[bool]:
        """Return True for each node on the low side of the cheapest cut; of several, of the one with the fewest.

        Nodes that their own costs decide are removed first; the remaining regions are solved one by one.
        """
        settled = _Settling(self)
        settled.run()
        side = settled.side
        for region in self._regions(side):
            low = _Flow(region, self.out, settled.pull).low_side()
            for v in region:
                side[v] = v in low
        return [label is True for label in side]

    def _regions(self, side: Sequence[bool | None]) -> Iterable[list[int]]:
        """Return the connected sets of undecided nodes."""
        sets = UnionFind(v for v, label in enumerate(side) if label is None)
        for u in sets.parent:
            sets.join((u, *self.out[u]))
        return sets.groups()


class _Settling:
    """Decide the nodes that are on one side whatever the others are, until none is left. O(nodes + arcs).

    A node is low if the high side costs more than the low side can cost at most. It is high if the low side costs no
    less than the high side can cost at most. So the cheapest cut with the fewest low nodes remains.
    """

    def __init__(self, network: FlowNetwork) -> None:
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
        """Decide all nodes that can be decided; `pull` then includes the pull of decided neighbours."""
        pending = list(range(len(self.side)))
        while pending:
            v = pending.pop()
            if self.side[v] is not None:
                continue
            low = self.pull[v] > self.leaving[v]
            if low or -self.pull[v] >= self.entering[v]:
                self._decide(v, low=low)
                pending += (*self.out[v], *self.into[v])

    def _decide(self, v: int, *, low: bool) -> None:
        self.side[v] = low
        for w, cost in self.out[v].items():
            self.entering[w] -= cost
            self.pull[w] += cost if low else 0
        for u in self.into[v]:
            self.leaving[u] -= self.out[u][v]
            self.pull[u] -= 0 if low else self.out[u][v]


class _Flow:
    """The largest flow through one region, from nodes pulled high to nodes pulled low, by push and relabel.

    A node that is pulled high pushes its pull to its neighbours until opposite pulls absorb it. So the work is near the
    border of the low side, whatever its size. O(nodes³) at worst.
    """

    def __init__(self, region: Sequence[int], out: Sequence[Mapping[int, int]], pull: Sequence[int]) -> None:
        self.region = region
        at = {v: i for i, v in enumerate(region)}
        self.excess = [max(0, -pull[v]) for v in region]
        self.sink = [max(0, pull[v]) for v in region]
        self.room: list[dict[int, int]] = [{} for _ in region]
        for i, v in enumerate(region):
            for w, cost in out[v].items():
                if w in at:
                    self.room[at[w]][i] = self.room[at[w]].get(i, 0) + cost
                    self.room[i].setdefault(at[w], 0)
        self.height = self._distances()

    def low_side(self) -> set[int]:
        """Return the nodes with a way to a pull to the low side after the largest flow: the smallest low side."""
        count = len(self.region)
        active = deque(u for u, excess in enumerate(self.excess) if excess and self.height[u] < count)
        work = 0
        while active:
            u = active.popleft()
            self._push(u, active)
            if self.excess[u]:
                work += 1
                self.height[u] = 1 + min((self.height[w] for w, room in self.room[u].items() if room), default=count)
                if self.height[u] < count:
                    active.appendleft(u)
            if work > count:
                work = 0
                self.height = self._distances()
                active = deque(u for u in active if self.height[u] < count)
        return {v for v, far in zip(self.region, self._distances(), strict=True) if far < count}

    def _push(self, u: int, active: deque[int]) -> None:
        """Push the excess of a node to its own pull, then to lower nodes."""
        taken = min(self.excess[u], self.sink[u])
        self.sink[u] -= taken
        self.excess[u] -= taken
        for w, room in self.room[u].items() if self.excess[u] else ():
            if room and self.height[w] < self.height[u]:
                fits = min(room, self.excess[u])
                if not self.excess[w]:
                    active.append(w)
                self.room[u][w] = room - fits
                self.room[w][u] += fits
                self.excess[u] -= fits
                self.excess[w] += fits
                if not self.excess[u]:
                    return

    def _distances(self) -> list[int]:
        """Return the number of steps from each node to a pull to the low side with room; the number of nodes if it
        reaches none."""
        count = len(self.region)
        distances = [0 if sink else count for sink in self.sink]
        reached = [u for u, far in enumerate(distances) if not far]
        for u in reached:
            for w in self.room[u]:
                if distances[w] == count and self.room[w][u]:
                    distances[w] = distances[u] + 1
                    reached.append(w)
        return distances
