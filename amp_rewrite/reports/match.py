"""Matching of two reports: a report as a graph of ops, and the pairs of equal ops.

Constants, copies and casts between floats are values here, not ops: conversions add and remove them. Neither do ops
count from which no output is computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from itertools import count

from amp_rewrite.ir.op_classes import CASTS, COMMUTATIVE
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.rows import FIRST_INPUT, FLOATING, NO_ROW, PortRow, Row

_ALIGNED = 4_000_000
"""Pairs of rows up to which the rest is aligned."""
Pairs = Sequence[tuple[int, int]]
"""Positions in A and in B of what is the same."""


# -- a report as a graph -------------------------------------------------------------------------------------


def _passed_over(row: Row) -> bool:
    if row.op in ("Constant", "Identity"):
        return True
    if row.op not in CASTS or not row.inputs or not row.outputs:
        return False
    return row.inputs[0] == row.outputs[0] or {row.inputs[0], row.outputs[0]} <= FLOATING


@dataclass(frozen=True)
class RowGraph:
    """A report as a graph of its ops. Sources are rows, `NO_ROW`, or inputs as in `PortRow.after`."""

    report: Report

    @cached_property
    def _sources(self) -> tuple[Sequence[Sequence[int]], Sequence[int]]:
        """By row the sources of its reads and of its result, through constants, copies and casts."""
        fed: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, port in enumerate(self.report.inputs):
            for at, place in zip(port.reads[::2], port.reads[1::2], strict=True):
                fed[at].append((place, FIRST_INPUT - number))
        source: list[int] = []
        reads: list[Sequence[int]] = []
        for i, row in enumerate(self.report.rows):
            own = [source[read] if read != NO_ROW else NO_ROW for read in row.reads]
            most = len(row.inputs) + 2 * len(row.outputs) + 2
            for place, number in fed.get(i, ()):
                if place < most:
                    own += [NO_ROW] * (place + 1 - len(own))
                    own[place] = number
            reads.append(own)
            source.append((own[0] if own else NO_ROW) if _passed_over(row) else i)
        return reads, source

    @property
    def reads(self) -> Sequence[Sequence[int]]:
        """By row the sources of its reads."""
        return self._sources[0]

    def source(self, after: int) -> int:
        """Return the source behind a position in `CastRow.after` or `PortRow.after`."""
        return self._sources[1][after] if after >= 0 else after

    @cached_property
    def live(self) -> Sequence[int]:
        """Rows of ops with an effect on an output; all ops of a report without outputs."""
        rows, reads = self.report.rows, self.reads
        alive = [not self.report.outputs] * len(rows)
        for port in self.report.outputs:
            if (source := self.source(port.after)) >= 0:
                alive[source] = True
        for i in range(len(rows) - 1, -1, -1):
            for read in reads[i] if alive[i] else ():
                if read >= 0:
                    alive[read] = True
        return [i for i, row in enumerate(rows) if alive[i] and not _passed_over(row)]


# -- pairs ---------------------------------------------------------------------------------------------------


def match(a: Report, b: Report) -> Pairs:
    """Return the pairs of equal ops (row of `a`, row of `b`), in the order of `b`. O(rows + reads), nearly."""
    return matched(RowGraph(a), RowGraph(b))


def matched(a: RowGraph, b: RowGraph) -> Pairs:
    """Return the pairs of rows of two reports, as `match` does.

    Rows pair by what they have in common, the strongest first: the name, the graph above up to the inputs, the graph
    below down to the outputs. Names that exporters number shift when an op is inserted, so that one alone is weaker
    than a whole graph. What is left between pairs is aligned in the order of the rows.
    """
    interned: defaultdict[Hashable, int] = defaultdict(count(1).__next__)
    sides = tuple(
        _facts(graph, inputs, outputs, interned)
        for graph, inputs, outputs in zip(
            (a, b),
            _numbered(paired(a.report.inputs, b.report.inputs)),
            _numbered(paired(a.report.outputs, b.report.outputs)),
            strict=True,
        )
    )
    to_b: dict[int, int] = {}
    to_a: dict[int, int] = {}
    for wanted in _EVIDENCE:
        mine, theirs = (
            _grouped((i for i in graph.live if i not in known), facts, wanted)
            for graph, facts, known in zip((a, b), sides, (to_b, to_a), strict=True)
        )
        for key, group in mine.items():
            others = theirs.get(key, ())
            if len(group) == len(others):  # several alike are in one order on both sides
                to_b.update(zip(group, others, strict=True))
                to_a.update(zip(others, group, strict=True))
    _align(a, b, to_b, to_a)
    return tuple(sorted(to_b.items(), key=lambda pair: pair[1]))


def paired(a: Sequence[PortRow], b: Sequence[PortRow]) -> Pairs:
    """Return the positions of equal inputs, or outputs: by name, then the others in order."""
    places = {port.name: j for j, port in enumerate(b)}
    named = [(i, places[port.name]) for i, port in enumerate(a) if port.name in places]
    taken_a, taken_b = {i for i, _ in named}, {j for _, j in named}
    rest = (i for i in range(len(a)) if i not in taken_a), (j for j in range(len(b)) if j not in taken_b)
    return (*named, *zip(*rest, strict=False))


def _numbered(pairs: Pairs) -> tuple[Mapping[int, int], Mapping[int, int]]:
    return {i: number for number, (i, _) in enumerate(pairs)}, {j: number for number, (_, j) in enumerate(pairs)}


_NAME, _CONSTANTS, _UP, _DOWN = range(4)
_EVIDENCE = (
    (_CONSTANTS, _UP, _DOWN),
    (_NAME, _UP, _DOWN),
    (_UP, _DOWN),
    (_NAME, _UP),
    (_NAME, _DOWN),
    (_DOWN,),
    (_UP,),
    (_NAME,),
)
"""What rows have in common to pair, the strongest first."""
_Facts = Sequence[Hashable]


def _facts(
    graph: RowGraph, inputs: Mapping[int, int], outputs: Mapping[int, int], interned: defaultdict[Hashable, int]
) -> Sequence[_Facts]:
    """Return name, names of constants, and the graphs above and below of each row; equal numbers are equal graphs.

    `inputs` and `outputs`: the numbers of those that both reports have.
    """
    rows, reads, live = graph.report.rows, graph.reads, graph.live
    up, down = [0] * len(rows), [0] * len(rows)
    for i in live:
        above = [up[read] if read >= 0 else _entry(read, inputs) for read in reads[i]]
        if rows[i].op in COMMUTATIVE:
            above = sorted(number for number in above if number != NO_ROW)
        up[i] = interned["up", rows[i].op, *above]
    below: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for place, port in enumerate(graph.report.outputs):
        if place in outputs:
            below[graph.source(port.after)].append((NO_ROW, outputs[place]))
    for i in reversed(live):
        down[i] = interned["down", rows[i].op, *sorted(below[i])]
        for place, read in enumerate(reads[i]):
            if read >= 0:
                below[read].append((0 if rows[i].op in COMMUTATIVE else place, down[i]))
    names = ((row.scope, row.name, row.op) if row.named else None for row in rows)
    return list(zip(names, ((row.op, row.constants) for row in rows), up, down, strict=True))


def _entry(read: int, inputs: Mapping[int, int]) -> int:
    number = inputs.get(FIRST_INPUT - read) if read != NO_ROW else None
    return NO_ROW if number is None else FIRST_INPUT - number


def _grouped(left: Iterable[int], facts: Sequence[_Facts], wanted: Iterable[int]) -> dict[_Facts, list[int]]:
    groups: dict[_Facts, list[int]] = defaultdict(list)
    for i in left:
        key = tuple([facts[i][fact] for fact in wanted])
        if None not in key:
            groups[key].append(i)
    return groups


def _align(a: RowGraph, b: RowGraph, to_b: dict[int, int], to_a: dict[int, int]) -> None:
    """Pair rows between pairs in the same order, by longest common runs of ops."""
    left = [sum(i not in known for i in graph.live) for graph, known in ((a, to_b), (b, to_a))]
    if not 0 < left[0] * left[1] <= _ALIGNED:
        return
    mine = [to_b.get(i, a.report.rows[i].op) for i in a.live]
    theirs = [j if j in to_a else b.report.rows[j].op for j in b.live]
    for start, other, size in SequenceMatcher(None, mine, theirs, autojunk=False).get_matching_blocks():
        for i, j in zip(a.live[start : start + size], b.live[other : other + size], strict=True):
            if i not in to_b and j not in to_a:
                to_b[i], to_a[j] = j, i
