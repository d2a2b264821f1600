"""Matching of two reports: their live ops, and the pairs of equal ones.

Constants, copies and casts between floats are values here, not ops: conversions add and remove them. Neither do ops
count from which no output is computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import count

from amp_rewrite.ir.op_classes import CASTS, COMMUTATIVE
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.rows import FIRST_INPUT, FLOATING, NO_ROW, CastRow, PortRow, Row

_ALIGNED = 4_000_000
"""Pairs of rows up to which the rest is aligned."""
Pairs = Sequence[tuple[int, int]]
"""Positions in A and in B of what is the same."""


# -- what counts ---------------------------------------------------------------------------------------------


def live(report: Report) -> list[int]:
    """Return the rows of ops with an effect on an output; of all ops in a report without outputs."""
    alive = [not (report.outputs or _copies(row)) for row in report.rows]
    for port in report.outputs:
        if port.after >= 0:
            alive[port.after] = True
    for i in range(len(report.rows) - 1, -1, -1):
        for read in report.rows[i].reads if alive[i] else ():
            if read >= 0:
                alive[read] = True
    return [i for i, is_alive in enumerate(alive) if is_alive]


def _copies(row: Row) -> bool:
    """True for constants, copies and casts between floats, which `Row.reads` looks through."""
    ends = row.inputs[:1] + row.outputs[:1]
    return row.op in ("Constant", "Identity") or (row.op in CASTS and (len({*ends}) < 2 or {*ends} <= FLOATING))


def live_casts(report: Report) -> list[tuple[int, CastRow]]:
    """Return the casts that change a type in the result, with their positions."""
    casts = enumerate(report.casts)
    return [(at, c) for at, c in casts if c.origin != "folded" and c.readers and c.from_ != c.to]


# -- pairs ---------------------------------------------------------------------------------------------------


def match(a: Report, b: Report) -> Pairs:
    """Return the pairs of equal ops (row of `a`, row of `b`), in the order of `b`. O(rows + reads), nearly.

    Rows pair by what they have in common, the strongest first: the name, the graph above up to the inputs, the graph
    below down to the outputs. Names that exporters number shift when an op is inserted, so that one alone is weaker
    than a whole graph. What is left between pairs is aligned in the order of the rows.
    """
    interned: defaultdict[Hashable, int] = defaultdict(count(1).__next__)
    inputs, outputs = paired(a.inputs, b.inputs), paired(a.outputs, b.outputs)
    facts = [
        _facts(report, _numbers(inputs, side), _numbers(outputs, side), interned) for side, report in enumerate((a, b))
    ]
    to_b: dict[int, int] = {}
    to_a: dict[int, int] = {}
    for wanted in _EVIDENCE:
        mine, theirs = (_grouped(side, known, wanted) for side, known in zip(facts, (to_b, to_a), strict=True))
        for key, group in mine.items():
            others = theirs.get(key, ())
            if len(group) == len(others):  # several alike are in one order on both sides
                to_b.update(zip(group, others, strict=True))
                to_a.update(zip(others, group, strict=True))
    _align((a, list(facts[0])), (b, list(facts[1])), to_b, to_a)
    return tuple(sorted(to_b.items(), key=lambda pair: pair[1]))


def paired(a: Sequence[PortRow], b: Sequence[PortRow]) -> Pairs:
    """Return the positions of equal inputs, or outputs: by name, then the others in order."""
    places = {port.name: j for j, port in enumerate(b)}
    named = {i: places[port.name] for i, port in enumerate(a) if port.name in places}
    rest = (i for i in range(len(a)) if i not in named), (j for j in range(len(b)) if j not in {*named.values()})
    return (*named.items(), *zip(*rest, strict=False))


def _numbers(pairs: Pairs, side: int) -> Mapping[int, int]:
    return {pair[side]: number for number, pair in enumerate(pairs)}


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
_Facts = Mapping[int, Sequence[Hashable]]


def _facts(
    report: Report, inputs: Mapping[int, int], outputs: Mapping[int, int], interned: defaultdict[Hashable, int]
) -> _Facts:
    """Return name, names of constants, and the graphs above and below of each live row; equal numbers: equal graphs.

    `inputs` and `outputs`: the numbers of those that both reports have.
    """
    rows, counted = report.rows, live(report)
    up: dict[int, int] = {FIRST_INPUT - place: FIRST_INPUT - number for place, number in inputs.items()}
    down: dict[int, int] = {}
    for i in counted:
        above = [up.get(read, NO_ROW) for read in rows[i].reads]
        if rows[i].op in COMMUTATIVE:
            above = sorted(number for number in above if number != NO_ROW)
        up[i] = interned["up", rows[i].op, *above]
    below: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for place, port in enumerate(report.outputs):
        if place in outputs:
            below[port.after].append((NO_ROW, outputs[place]))
    for i in reversed(counted):
        down[i] = interned["down", rows[i].op, *sorted(below[i])]
        for place, read in enumerate(rows[i].reads):
            below[read].append((0 if rows[i].op in COMMUTATIVE else place, down[i]))
    named = {i: (rows[i].scope, rows[i].name, rows[i].op) if rows[i].named else None for i in counted}
    return {i: (named[i], (rows[i].op, rows[i].constants), up[i], down[i]) for i in counted}


def _grouped(facts: _Facts, known: Mapping[int, int], wanted: Iterable[int]) -> dict[Hashable, list[int]]:
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for i, own in facts.items():
        key = tuple([own[fact] for fact in wanted])
        if i not in known and None not in key:
            groups[key].append(i)
    return groups


_Side = tuple[Report, list[int]]
"""A report and its live rows."""


def _align(a: _Side, b: _Side, to_b: dict[int, int], to_a: dict[int, int]) -> None:
    """Pair rows between pairs in the same order, by longest common runs of ops."""
    left = [sum(i not in known for i in rows) for (_, rows), known in ((a, to_b), (b, to_a))]
    if not 0 < left[0] * left[1] <= _ALIGNED:
        return
    mine = [to_b.get(i, a[0].rows[i].op) for i in a[1]]
    theirs = [j if j in to_a else b[0].rows[j].op for j in b[1]]
    for start, other, size in SequenceMatcher(None, mine, theirs, autojunk=False).get_matching_blocks():
        for i, j in zip(a[1][start : start + size], b[1][other : other + size], strict=True):
            if i not in to_b and j not in to_a:
                to_b[i], to_a[j] = j, i
