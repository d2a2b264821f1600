"""Match the rows of two reports, although nodes were renamed, inserted or removed.

The evidence is: names, everything upstream of a row, everything downstream of it. The rules below weigh it, the
strongest first; rows that none of them settles stay unmatched. Constants and casts between floats do not count as
ops: conversions add and remove them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from amp_rewrite.ir.op_classes import CASTS
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.rows import NO_ROW, Row

# Steps of alignment, over all gaps; rows that would cost more stay unmatched.
_ALIGNMENT = 2_000_000


def match(a: Report, b: Report) -> tuple[tuple[int, int], ...]:
    """Return the pairs (row of `a`, row of `b`) that are the same op, in the order of `b`. O(rows + reads), nearly."""
    shapes: dict[Hashable, int] = {}
    mine, theirs = _Side.of(a, shapes), _Side.of(b, shapes)
    pairs = _Pairs(mine, theirs, mine.live, theirs.live)
    for evidence in _EVIDENCE:
        pairs.by(evidence)
    pairs.spread()
    for word in (_kind, lambda row: row.op):
        pairs.align(word)
        pairs.spread()
    return tuple(sorted(pairs.to_b.items(), key=lambda pair: pair[1]))


def compared(report: Report) -> tuple[int, ...]:
    """Return the rows that count as ops: neither constants nor casts between floats, or to the type that they read."""
    return tuple(i for i, row in enumerate(report.rows) if not _passed_over(row))


def _passed_over(row: Row) -> bool:
    if row.op == "Constant":
        return True
    if row.op not in CASTS or not row.inputs or not row.outputs:
        return False
    return row.inputs[0] == row.outputs[0] or (row.inputs[0] in _FLOATS and row.outputs[0] in _FLOATS)


_FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class _Side:
    """One report with an index: the readers of each row, and the shape of the graph above and below it.

    `up` and `down` are equal numbers for equal ones, across both sides: subgraphs are interned, not hashed.
    """

    rows: tuple[Row, ...]
    live: tuple[int, ...]
    readers: Sequence[Sequence[tuple[int, int]]]
    up: Sequence[int]
    down: Sequence[int]

    @classmethod
    def of(cls, report: Report, shapes: dict[Hashable, int]) -> _Side:
        rows = report.rows
        live = compared(report)
        readers: list[list[tuple[int, int]]] = [[] for _ in rows]
        up = [0] * len(rows)
        down = [0] * len(rows)
        for i in live:
            for slot, read in enumerate(rows[i].reads):
                if read != NO_ROW:
                    readers[read].append((slot, i))
            above = tuple(up[read] if read != NO_ROW else NO_ROW for read in rows[i].reads)
            up[i] = shapes.setdefault(("up", _kind(rows[i]), above), len(shapes) + 1)
        for i in reversed(live):
            below = tuple(sorted((slot, down[reader]) for slot, reader in readers[i]))
            down[i] = shapes.setdefault(("down", _kind(rows[i]), below), len(shapes) + 1)
        return cls(rows, live, readers, up, down)


def _kind(row: Row) -> str:
    return row.key or row.op


@dataclass(frozen=True, slots=True)
class _Evidence:
    """The facts that two rows must share: the name, the graph above, the graph below."""

    named: bool = False
    up: bool = False
    down: bool = False

    def key(self, side: _Side, i: int) -> Hashable:
        """Return the facts of a row; None for a row without the name that they need."""
        row = side.rows[i]
        if self.named and not row.named:
            return None
        name = (row.scope, row.name, row.op) if self.named else ()
        return name, self.up and side.up[i], self.down and side.down[i]


# Names that exporters number shift when an op is inserted: one alone is weaker than a whole subgraph.
_EVIDENCE = (
    _Evidence(named=True, up=True, down=True),
    _Evidence(up=True, down=True),
    _Evidence(named=True, up=True),
    _Evidence(named=True, down=True),
    _Evidence(down=True),
    _Evidence(up=True),
    _Evidence(named=True),
)


@dataclass
class _Pairs:
    """Pairs so far."""

    a: _Side
    b: _Side
    left_a: Sequence[int]
    left_b: Sequence[int]
    to_b: dict[int, int] = field(default_factory=dict)
    to_a: dict[int, int] = field(default_factory=dict)
    fresh: deque[tuple[int, int]] = field(default_factory=deque)

    def join(self, i: int, j: int) -> None:
        self.to_b[i] = j
        self.to_a[j] = i
        self.fresh.append((i, j))

    def by(self, evidence: _Evidence) -> None:
        """Join the unmatched rows that share this evidence, in order, where both sides have as many of them."""
        self._forget_matched()
        mine = _grouped(self.a, self.left_a, evidence)
        theirs = _grouped(self.b, self.left_b, evidence) if mine else {}
        for key, group in mine.items():
            other = theirs.get(key, ())
            if len(group) == len(other):
                for i, j in zip(group, other, strict=True):
                    self.join(i, j)

    def _forget_matched(self) -> None:
        self.left_a = [i for i in self.left_a if i not in self.to_b]
        self.left_b = [j for j in self.left_b if j not in self.to_a]

    def spread(self) -> None:
        """Pair the neighbours of each pair: producers of the same input, and readers in the same slot."""
        while self.fresh:
            i, j = self.fresh.popleft()
            above = self.a.rows[i], self.b.rows[j]
            for read, other in zip(above[0].reads, above[1].reads, strict=False):
                if read != NO_ROW and other != NO_ROW and self._alike(read, other):
                    self.join(read, other)
            mine = self._unmatched_readers(self.a, i, self.to_b)
            theirs = self._unmatched_readers(self.b, j, self.to_a)
            for key, group in mine.items():
                other_group = theirs.get(key, [])
                if len(group) == len(other_group):
                    for reader, other in zip(group, other_group, strict=True):
                        if self._alike(reader, other):
                            self.join(reader, other)

    def _unmatched_readers(self, side: _Side, i: int, taken: dict[int, int]) -> dict[tuple[int, str], list[int]]:
        groups: dict[tuple[int, str], list[int]] = defaultdict(list)
        for slot, reader in side.readers[i]:
            if reader not in taken:
                groups[slot, _kind(side.rows[reader])].append(reader)
        return groups

    def _alike(self, i: int, j: int) -> bool:
        """True if two rows are both free and do the same, and none of their names leads elsewhere."""
        return i not in self.to_b and j not in self.to_a and _kind(self.a.rows[i]) == _kind(self.b.rows[j])

    def align(self, word: Callable[[Row], str]) -> None:
        """Between two pairs in the same order, join a longest common run of words."""
        self._forget_matched()
        budget = _ALIGNMENT
        for mine, theirs in list(self._gaps()) if self.left_a and self.left_b else ():
            words = [word(self.a.rows[i]) for i in mine], [word(self.b.rows[j]) for j in theirs]
            blocks, spent = common(*words, budget)
            budget -= spent
            for at, other in blocks:
                self.join(mine[at], theirs[other])

    def _gaps(self) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the unmatched rows between neighbouring anchors, where both sides have some."""
        mine, theirs = deque(self.left_a), deque(self.left_b)
        for i, j in [*_increasing(sorted(self.to_b.items())), (len(self.a.rows), len(self.b.rows))]:
            gap = _before(mine, i), _before(theirs, j)
            if all(gap):
                yield gap


def _grouped(side: _Side, left: Iterable[int], evidence: _Evidence) -> dict[Hashable, list[int]]:
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for i in left:
        if (key := evidence.key(side, i)) is not None:
            groups[key].append(i)
    return groups


def _before(waiting: deque[int], limit: int) -> list[int]:
    taken = []
    while waiting and waiting[0] < limit:
        taken.append(waiting.popleft())
    return taken


def _increasing(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return a longest run of pairs that rises in both numbers, out of pairs that rise in the first. O(n log n)."""
    ends, at, before = list[int](), list[int](), list[int]()
    for k, (_, j) in enumerate(pairs):
        length = bisect_left(ends, j)
        before.append(at[length - 1] if length else -1)
        ends[length : length + 1] = [j]
        at[length : length + 1] = [k]
    run = []
    k = at[-1] if at else -1
    while k != -1:
        run.append(pairs[k])
        k = before[k]
    return run[::-1]


def common(a: Sequence[str], b: Sequence[str], budget: int) -> tuple[list[tuple[int, int]], int]:
    """Return a longest common subsequence as pairs of positions, and its number of steps; None over budget.

    E. Myers, "An O(ND) Difference Algorithm and Its Variations", 1986: the greedy algorithm.
    """
    furthest = {1: 0}
    trail: list[dict[int, int]] = []
    spent = 0
    for edits in range(len(a) + len(b) + 1):
        trail.append(dict(furthest))
        for k in range(-edits, edits + 1, 2):
            down = k == -edits or (k != edits and furthest[k - 1] < furthest[k + 1])
            x = furthest[k + 1] if down else furthest[k - 1] + 1
            while x < len(a) and x - k < len(b) and a[x] == b[x - k]:
                x += 1
                spent += 1
            furthest[k] = x
            if x >= len(a) and x - k >= len(b):
                return _walked(trail, len(a), len(b)), spent
        spent += 2 * edits + 1
        if spent > budget:
            return [], spent
    return [], spent


def _walked(trail: Sequence[dict[int, int]], x: int, y: int) -> list[tuple[int, int]]:
    """Return the diagonal steps of the path at whose end the trail stops."""
    pairs: list[tuple[int, int]] = []
    for edits in range(len(trail) - 1, -1, -1):
        furthest, k = trail[edits], x - y
        down = k == -edits or (k != edits and furthest[k - 1] < furthest[k + 1])
        before = k + 1 if down else k - 1
        start = furthest[before]
        while x > start and y > start - before:
            x, y = x - 1, y - 1
            pairs.append((x, y))
        x, y = start, start - before
    return pairs[::-1]
