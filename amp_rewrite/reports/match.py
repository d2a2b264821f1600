"""Match the rows of two reports, although nodes were renamed, inserted or removed.

The evidence is: names, everything upstream of a row, everything downstream of it, up to the inputs and outputs of the
model. The rules below weigh it, the strongest first; rows that none of them settles stay unmatched. Constants, copies
and casts between floats do not count as ops: conversions add and remove them. Neither do ops from which no output is
computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import count

from amp_rewrite.ir.op_classes import COMMUTATIVE, QUANTIZERS
from amp_rewrite.reports.op_changes import Matches
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.row_graph import RowGraph
from amp_rewrite.reports.rows import FIRST_INPUT, NO_ROW, PortRow, Row

_ALIGNED = 4_000_000
"""Pairs of rows up to which the rest is aligned."""
_Interned = defaultdict[Hashable, int]
"""Numbers of shapes; a new one gets the next."""


def match(a: Report, b: Report) -> tuple[tuple[int, int], ...]:
    """Return the pairs of equal ops (row of `a`, row of `b`), in the order of `b`. O(rows + reads), nearly."""
    return matched(RowGraph(a), RowGraph(b))


def matched(a: RowGraph, b: RowGraph) -> tuple[tuple[int, int], ...]:
    """Return the pairs of rows of two reports, as `match` does."""
    if a.report.rows == b.report.rows and (a.report.inputs, a.outputs) == (b.report.inputs, b.outputs):
        return tuple(zip(a.live, b.live, strict=True))
    inputs, outputs = (paired(*ports) for ports in ((a.report.inputs, b.report.inputs), (a.outputs, b.outputs)))
    mine, theirs = _ReportSide(a, *_numbered(inputs, outputs, 0)), _ReportSide(b, *_numbered(inputs, outputs, 1))
    interned = _Interned(count(1).__next__)
    pairs = _Pairs(mine, theirs, a.live, b.live)
    pairs.by(_WHOLE, _constants, interned)
    for word in (_kind, _op):
        for evidence in _EVIDENCE:
            pairs.by(evidence, word, interned)
    for word in (_kind, _op):
        pairs.align(word)
    return tuple(sorted(pairs.to_b.items(), key=lambda pair: pair[1]))


def crossed(a: RowGraph, b: RowGraph, matches: Matches) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield operands of matching ops computed alike by ops of other types.

    Each is a pair of readers, the place in their reads, and the rows above it that differ first; an output of the model
    is a reader at place `NO_ROW`, by its position. Ops whose operands commute read them in any order.
    """
    to_b = dict(matches.rows)
    operands = [(i, j, place, r, s) for i, j in matches.rows for place, r, s in _operands(a, b, i, j, to_b)]
    outputs = ((i, j, a.source(a.outputs[i].after), b.source(b.outputs[j].after)) for i, j in matches.outputs)
    operands += [(i, j, NO_ROW, r, s) for i, j, r, s in outputs]
    moved = [
        operand for operand in operands if operand[3] >= 0 and operand[4] >= 0 and to_b.get(operand[3]) != operand[4]
    ]
    if not moved:
        return
    interned = _Interned(count(1).__next__)
    sides = [_ReportSide(graph, *_numbered(matches.inputs, matches.outputs, k)) for k, graph in enumerate((a, b))]
    kinds, others = (side.up(_unquantized, interned) for side in sides)
    exact, other_exact = (side.up(_types, interned) for side in sides)
    for i, j, place, r, s in moved:
        if kinds[r] == others[s] and exact[r] != other_exact[s]:
            above: tuple[int, int] | None = (r, s)
            while above is not None and _types(a.report.rows[r]) == _types(b.report.rows[s]):
                r, s = above
                reads = zip(a.reads[r], b.reads[s], strict=False)
                above = next(((x, y) for x, y in reads if x >= 0 and y >= 0 and exact[x] != other_exact[y]), None)
            yield i, j, place, r, s


def _operands(a: RowGraph, b: RowGraph, i: int, j: int, to_b: Mapping[int, int]) -> Iterator[tuple[int, int, int]]:
    """Yield the operands of a pair of ops, place by place; none for a pair that commutes and reads the same."""
    mine, theirs = a.reads[i], b.reads[j]
    if order(a.report.rows[i], mine, theirs, to_b) is None:
        yield from ((place, r, s) for place, (r, s) in enumerate(zip(mine, theirs, strict=False)))


def order(row: Row, mine: Sequence[int], theirs: Sequence[int], to_b: Mapping[int, int]) -> list[int] | None:
    """Return the order of a commuting op's operands in its pair; None for other operands."""
    if row.op not in COMMUTATIVE:
        return None
    mine, theirs = ([*reads, *[NO_ROW] * (len(row.inputs) - len(reads))] for reads in (mine, theirs))
    wanted = [to_b.get(read, read) for read in mine]
    places = sorted(range(len(theirs)), key=theirs.__getitem__)
    ranked = sorted(range(len(wanted)), key=wanted.__getitem__)
    if sorted(wanted) != [theirs[place] for place in places]:
        return None
    return [place for _, place in sorted(zip(ranked, places, strict=True))]


def paired(a: Sequence[PortRow], b: Sequence[PortRow]) -> tuple[tuple[int, int], ...]:
    """Return the positions of equal inputs, or outputs: by name, then the others in order."""
    places = {port.name: j for j, port in enumerate(b)}
    named = [(i, places[port.name]) for i, port in enumerate(a) if port.name in places]
    taken_a, taken_b = {i for i, _ in named}, {j for _, j in named}
    rest = (i for i in range(len(a)) if i not in taken_a), (j for j in range(len(b)) if j not in taken_b)
    return (*named, *zip(*rest, strict=False))


def _numbered(
    inputs: Iterable[tuple[int, int]], outputs: Iterable[tuple[int, int]], side: int
) -> tuple[Mapping[int, int], Mapping[int, int]]:
    return tuple({pair[side]: number for number, pair in enumerate(pairs)} for pairs in (inputs, outputs))  # type: ignore[return-value]


Word = Callable[[Row], Hashable]
"""The part of a row that stands for it in the shape of a graph."""


@dataclass(frozen=True)
class _ReportSide:
    """One report, with the numbers of its inputs and outputs that both reports have."""

    graph: RowGraph
    inputs: Mapping[int, int]
    outputs: Mapping[int, int]
    _shapes: dict[tuple[str, Word], list[int]] = field(default_factory=dict, repr=False)

    @property
    def rows(self) -> tuple[Row, ...]:
        return self.graph.report.rows

    def up(self, word: Word, interned: _Interned) -> Sequence[int]:
        """Return the shape of the graph above each row, with a word for each op.

        Equal numbers stand for equal shapes, across both sides: subgraphs are interned, not hashed. An op of no word
        has the shape of what it reads.
        """
        if ("up", word) not in self._shapes:
            rows, reads = self.rows, self.graph.reads
            up = self._shapes["up", word] = [0] * len(rows)
            for i in self.graph.live:
                above = [up[read] if read >= 0 else self._entry(read) for read in reads[i]]
                if rows[i].op in COMMUTATIVE:
                    above.sort()
                name = word(rows[i])
                up[i] = interned["up", name, *above] if name or not above else above[0]
        return self._shapes["up", word]

    def down(self, word: Word, interned: _Interned) -> Sequence[int]:
        """Return the shape of the graph below each row, as `up` does."""
        if ("down", word) not in self._shapes:
            rows, readers_of, leaves = self.rows, self.graph.readers, self._leaves()
            down = self._shapes["down", word] = [0] * len(rows)
            for i in reversed(self.graph.live):
                below = [(0 if rows[r].op in COMMUTATIVE else place, down[r]) for place, r in readers_of[i]]
                if i in leaves:
                    below += leaves[i]
                if len(below) > 1:
                    below.sort()
                down[i] = interned["down", word(rows[i]), *below]
        return self._shapes["down", word]

    def _leaves(self) -> Mapping[int, Sequence[tuple[int, int]]]:
        leaves: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for place, port in enumerate(self.graph.outputs):
            if place in self.outputs:
                leaves[self.graph.source(port.after)].append((NO_ROW, self.outputs[place]))
        return leaves

    def _entry(self, read: int) -> int:
        number = self.inputs.get(FIRST_INPUT - read) if read != NO_ROW else None
        return NO_ROW if number is None else FIRST_INPUT - number


def _kind(row: Row) -> str:
    """Return the key of a row; the op where the key only says in which slots constants are."""
    return row.op if row.constants and row.op in COMMUTATIVE else row.key or row.op


def _unquantized(row: Row) -> str:
    """Return the op of a row; no word for one that quantizes a value, or reads a quantized one."""
    return "" if row.op in QUANTIZERS else row.op


def _op(row: Row) -> str:
    return row.op


def _constants(row: Row) -> Hashable:
    return _kind(row), row.constants


def _types(row: Row) -> Hashable:
    return row.op, row.dtype, row.inputs, row.outputs, tuple(row.via.items()), tuple(row.attributes.items())


@dataclass(frozen=True, slots=True)
class _Evidence:
    """The facts that two rows must share: the name, the graph above, the graph below."""

    named: bool = False
    up: bool = False
    down: bool = False


_WHOLE = _Evidence(up=True, down=True)
# Names that exporters number shift when an op is inserted: one alone is weaker than a whole subgraph.
_EVIDENCE = (
    _Evidence(named=True, up=True, down=True),
    _WHOLE,
    _Evidence(named=True, up=True),
    _Evidence(named=True, down=True),
    _Evidence(down=True),
    _Evidence(up=True),
    _Evidence(named=True),
)


@dataclass
class _Pairs:
    """Pairs so far."""

    a: _ReportSide
    b: _ReportSide
    left_a: Sequence[int]
    left_b: Sequence[int]
    to_b: dict[int, int] = field(default_factory=dict)
    to_a: dict[int, int] = field(default_factory=dict)

    def join(self, i: int, j: int) -> None:
        self.to_b[i] = j
        self.to_a[j] = i

    def join_all(self, mine: Sequence[int], theirs: Sequence[int]) -> None:
        """Join rows in order, if there are as many on both sides."""
        if len(mine) == len(theirs):
            for i, j in zip(mine, theirs, strict=True):
                self.join(i, j)

    def by(self, evidence: _Evidence, word: Word, interned: _Interned) -> None:
        """Join unmatched rows by shared evidence, in order, if both sides have as many."""
        self._forget_matched()
        if not (self.left_a and self.left_b):
            return
        mine = _grouped(self.a, self.left_a, evidence, word, interned)
        theirs = _grouped(self.b, self.left_b, evidence, word, interned)
        for key, group in mine.items():
            self.join_all(group, theirs.get(key, ()))

    def _forget_matched(self) -> None:
        self.left_a = [i for i in self.left_a if i not in self.to_b]
        self.left_b = [j for j in self.left_b if j not in self.to_a]

    def align(self, word: Word) -> None:
        """Join rows between pairs in the same order, by longest common runs of words."""
        self._forget_matched()
        if len(self.left_a) * len(self.left_b) > _ALIGNED:
            return
        mine = [self.to_b.get(i, word(self.a.rows[i])) for i in self.a.graph.live]
        theirs = [j if j in self.to_a else word(self.b.rows[j]) for j in self.b.graph.live]
        for block in SequenceMatcher(None, mine, theirs, autojunk=False).get_matching_blocks():
            for at, other in zip(
                range(block.a, block.a + block.size), range(block.b, block.b + block.size), strict=True
            ):
                i, j = self.a.graph.live[at], self.b.graph.live[other]
                if i not in self.to_b and j not in self.to_a:
                    self.join(i, j)


def _grouped(
    side: _ReportSide, left: Iterable[int], evidence: _Evidence, word: Word, interned: _Interned
) -> dict[Hashable, list[int]]:
    """Return rows by the facts of some evidence; rows without the name that it needs are left out."""
    rows = side.rows
    shapes = [side.up(word, interned)] * evidence.up + [side.down(word, interned)] * evidence.down
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for i in left:
        row = rows[i]
        if not evidence.named:
            groups[tuple([shape[i] for shape in shapes])].append(i)
        elif row.named:
            groups[(row.scope, row.name, row.op, *[shape[i] for shape in shapes])].append(i)
    return groups
