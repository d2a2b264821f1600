"""Differences between two reports, for people and for continuous integration."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import count

from amp_rewrite.ir.gc_paused import gc_paused
from amp_rewrite.ir.op_classes import CASTS, COMMUTATIVE
from amp_rewrite.reports.delta import KINDS, Delta
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.rows import FIRST_INPUT, FLOATING, NO_ROW, CastChange, CastRow, Change, PortRow, Row
from amp_rewrite.reports.sources import ReportSource, report_and_view
from amp_rewrite.settings.request import RECORDED

_RANK = {"float16": 1, "bfloat16": 1, "float32": 2, "float64": 2}
_MIN_OPS = 5
"""Minimum size of the larger model, in ops, to call two models unrelated."""
_MIN_SHARE, _MIN_SHARE_SAME_PORTS = 0.25, 0.05
"""Minimum share of the larger model's ops in common between two versions of one model: in general, and if their inputs
and outputs have the same names. Of the shipped models, 436 of 442 pairs of different architectures have less in common,
and all 310 pairs of a model and its conversion have more."""


@gc_paused()
def diff(a: ReportSource, b: ReportSource) -> Delta:
    """Return the differences between A and B: reports, results of conversions, models, or paths to these.

    Renamed ops, and neighbors of inserted ops, are recognized by the ops upstream and downstream; an unrecognized op
    counts as removed and added. Constants and copies count as values, not as ops. Casts between floats count as casts,
    whether inserted by a conversion or nodes of the model. Ops that do not affect any output are ignored.

    Args:
        a: the older model, or its report.
        b: the newer model, or its report.

    Returns:
        The differences, to print as text, JSON, Markdown or GitHub annotations.

    Example:
        >>> import amp_rewrite
        >>> a, b = (amp_rewrite.convert("model.onnx", to=to).report for to in ("float16", "bfloat16"))
        >>> amp_rewrite.diff(a, b).differs
        True
    """
    (a, _), (b, view) = report_and_view(a), report_and_view(b)
    in_a, in_b = live(a), live(b)
    to_b = dict(match(a, b))
    matched = set(to_b.values())
    changes = [*_port_changes(a, b, in_a, in_b)]
    changes += [change for i, j in to_b.items() for change in _changes(a.rows[i], b.rows[j], j)]
    for vertex, row in ((j, b.rows[j]) for j in in_b if j not in matched):
        changes.append(Change("added", row.path, row.op, row.scope, after=row.dtype, why=row.why, vertex=vertex))
    for row in (a.rows[i] for i in in_a if i not in to_b):
        changes.append(Change("removed", row.path, row.op, row.scope, before=row.dtype))
    changes.sort(key=lambda change: KINDS.index(change.kind))
    alike, ops = _alike(a, b, to_b), max(len(in_a), len(in_b))
    minimum = _MIN_SHARE_SAME_PORTS if _port_names(a) == _port_names(b) else _MIN_SHARE
    return Delta(
        a.model.name,
        b.model.name,
        tuple(changes),
        tuple(_cast_changes(a, b, to_b)),
        _settings(a, b),
        alike=alike,
        ops=ops,
        unrelated=ops >= _MIN_OPS and alike < minimum * ops,
        report=b,
        view=view,
    )


def _alike(a: Report, b: Report, to_b: Mapping[int, int]) -> int:
    """Count the matched ops with matched inputs."""

    def read(report: Report, row: int, names: Mapping[int, int]) -> list[int]:
        return [names.get(source, source) if source >= 0 else NO_ROW for source in report.rows[row].reads]

    return sum(read(a, i, to_b) == read(b, j, {}) for i, j in to_b.items())


def _port_names(report: Report) -> set[str]:
    return {port.name for port in (*report.inputs, *report.outputs)}


# -- ops -----------------------------------------------------------------------------------------------------


def _changes(before: Row, after: Row, vertex: int) -> Iterator[Change]:
    """Yield the first change of each kind.

    The shared type variables come first (or the op's own type, if there are none), then the input and output slots.
    """
    shared = [name for name in before.variables if name in after.variables]
    has_several = len(after.variables) > 1
    retyped = [(name if has_several else "", before.variables[name], after.variables[name]) for name in shared]
    retyped = retyped or [("", before.dtype, after.dtype)]
    for side, in_a, in_b in (("input", before.inputs, after.inputs), ("output", before.outputs, after.outputs)):
        for slot, (was, now) in enumerate(zip(in_a, in_b, strict=False)):
            if was and now and "unknown" not in was + now:
                retyped.append((f"{side} {slot}", was, now))
        if "::" in before.op and _present(in_a) != _present(in_b):  # no schema tells which operands are optional
            retyped.append((f"{side}s", ", ".join(in_a), ", ".join(in_b)))
    changed: dict[str, tuple[str, str, str]] = {}
    for name in sorted({*before.attributes, *after.attributes}, reverse=True):
        was, now = (row.attributes.get(name, "default") for row in (before, after))
        if was != now:
            changed["attribute"] = (name, was, now)
    changed |= {_kind(was, now): (of, was, now) for of, was, now in reversed(retyped) if was != now}
    former = before.path if before.path != after.path else ""
    for kind, (variable, was, now) in changed.items():
        yield Change(kind, after.path, after.op, after.scope, was, now, variable, former, after.why, vertex)


def _present(types: Collection[str]) -> list[bool]:
    present = [bool(dtype) for dtype in types]
    while present and not present[-1]:
        present.pop()
    return present


_TYPE = re.compile(r"\w+")


def _kind(was: str, now: str) -> str:
    ranks = [min((_RANK[name] for name in _TYPE.findall(text) if name in _RANK), default=0) for text in (was, now)]
    containers = [text.rpartition("(")[0] for text in (was, now)]
    if 0 in ranks or ranks[0] == ranks[1] or containers[0] != containers[1]:
        return "retyped"
    return "lowered" if ranks[1] < ranks[0] else "raised"


# -- inputs, outputs, casts, settings ------------------------------------------------------------------------


def _port_changes(a: Report, b: Report, in_a: Collection[int], in_b: Collection[int]) -> Iterator[Change]:
    first = len(b.rows)
    used = [{read for i in rows for read in report.rows[i].reads} for report, rows in ((a, in_a), (b, in_b))]
    for what, before, after in (("graph input", a.inputs, b.inputs), ("graph output", a.outputs, b.outputs)):
        pairs = paired(before, after)
        for i, j in pairs:
            was, now = before[i].dtype, after[j].dtype
            if was != now:
                former = before[i].name if before[i].name != after[j].name else ""
                name = after[j].name
                yield Change(_kind(was, now), name, what, before=was, after=now, was=former, vertex=first + j)
        matched = {i for i, _ in pairs}, {j for _, j in pairs}
        for i, port in enumerate(before):
            if i not in matched[0] and (what == "graph output" or FIRST_INPUT - i in used[0]):
                yield Change("removed", port.name, what, before=port.dtype)
        for j, port in enumerate(after):
            if j not in matched[1] and (what == "graph output" or FIRST_INPUT - j in used[1]):
                yield Change("added", port.name, what, after=port.dtype, vertex=first + j)
        first += len(after)


def _cast_changes(a: Report, b: Report, to_b: Mapping[int, int]) -> Iterator[CastChange]:
    in_a, in_b = _casts(a, to_b), _casts(b, {j: j for j in to_b.values()})
    extra = [cast for key, group in in_b.items() for cast in group[len(in_a.get(key, ())) :]]
    missing = [cast for key, group in in_a.items() for cast in group[len(in_b.get(key, ())) :]]
    common = _casts_by_type(extra) & _casts_by_type(missing)
    for sign, casts in (("+", extra), ("-", missing)):
        renames = Counter(common)
        for place, cast in casts:
            if cast.after < 0 and renames[cast.from_, cast.to] > 0:
                renames[cast.from_, cast.to] -= 1
            else:
                at = place if sign == "+" else None
                yield CastChange(sign, cast.value, cast.from_, cast.to, cast.scope, cast.reason, at)


_Cast = tuple[int, CastRow]
"""A cast with its position."""


def _casts_by_type(casts: Iterable[_Cast]) -> Counter[tuple[str, str]]:
    """Count casts of constants and inputs by their types.

    A cast on each side with the same types is the same cast under another name.
    """
    return Counter((cast.from_, cast.to) for _, cast in casts if cast.after < 0)


def _casts(report: Report, names: Mapping[int, int]) -> dict[Hashable, list[_Cast]]:
    """Group casts by source: the output of a matched row, of an unmatched row, or a named value."""
    groups: dict[Hashable, list[_Cast]] = defaultdict(list)
    for place, cast in live_casts(report):
        source: Hashable = (cast.scope, cast.value)
        if cast.after >= 0:
            pair = names.get(cast.after)
            source = ((id(report), cast.after) if pair is None else pair, cast.slot)
        groups[source, cast.from_, cast.to].append((place, cast))
    return groups


def _settings(a: Report, b: Report) -> tuple[tuple[str, str, str], ...]:
    settings = ("to", *RECORDED, "lists", "fingerprint")
    names = ("opsets", *(() if a.inventory or b.inventory else settings))
    values = ((name, _text(getattr(a.model, name)), _text(getattr(b.model, name))) for name in names)
    return tuple((name, in_a, in_b) for name, in_a, in_b in values if in_a != in_b)


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {version}" for name, version in value.items())
    return "default" if value is None else str(value)


# -- live ops: all but constants, copies, casts between floats, and ops that do not affect any output ----------------


def live(report: Report) -> list[int]:
    """Return the rows of ops with an effect on an output, or of all ops in a report without outputs."""
    alive = [not (report.outputs or _is_copy(row)) for row in report.rows]
    for port in report.outputs:
        if port.after >= 0:
            alive[port.after] = True
    for i in range(len(report.rows) - 1, -1, -1):
        for read in report.rows[i].reads if alive[i] else ():
            if read >= 0:
                alive[read] = True
    return [i for i, is_alive in enumerate(alive) if is_alive]


def _is_copy(row: Row) -> bool:
    """True for constants, copies and casts between floats; `Row.reads` looks through these."""
    ends = row.inputs[:1] + row.outputs[:1]
    return row.op in ("Constant", "Identity") or (row.op in CASTS and (len({*ends}) < 2 or {*ends} <= FLOATING))


def live_casts(report: Report) -> list[tuple[int, CastRow]]:
    """Return the positions and rows of the result's casts between different types."""
    casts = enumerate(report.casts)
    return [(at, c) for at, c in casts if c.origin != "folded" and c.readers and c.from_ != c.to]


# -- pairs ---------------------------------------------------------------------------------------------------


_MAX_ALIGNED_PAIRS = 4_000_000
"""Maximum number of pairs of rows to align."""
Pairs = Sequence[tuple[int, int]]
"""Positions of equal items in A and in B."""


def match(a: Report, b: Report) -> Pairs:
    """Return the pairs of equal ops (row of `a`, row of `b`), in the order of `b`. Nearly O(rows + reads).

    Rows are matched by the facts they share, strongest first: the name, the graph upstream to the inputs, and the graph
    downstream to the outputs. A name is weaker than a whole graph, since exporters number names, and the numbers shift
    when an op is inserted. The remaining rows are aligned in order.
    """
    interned: defaultdict[Hashable, int] = defaultdict(count(1).__next__)
    inputs, outputs = paired(a.inputs, b.inputs), paired(a.outputs, b.outputs)
    facts = [
        _facts(report, _numbers(inputs, side), _numbers(outputs, side), interned) for side, report in enumerate((a, b))
    ]
    to_b: dict[int, int] = {}
    to_a: dict[int, int] = {}
    for evidence in _EVIDENCE:
        in_a, in_b = (_grouped(side, pairs, evidence) for side, pairs in zip(facts, (to_b, to_a), strict=True))
        for key, group in in_a.items():
            others = in_b.get(key, ())
            if len(group) == len(others):  # equal rows are in the same order on both sides
                to_b.update(zip(group, others, strict=True))
                to_a.update(zip(others, group, strict=True))
    _align((a, list(facts[0])), (b, list(facts[1])), to_b, to_a)
    return tuple(sorted(to_b.items(), key=lambda pair: pair[1]))


def paired(a: Sequence[PortRow], b: Sequence[PortRow]) -> Pairs:
    """Match inputs or outputs by name, then the others in order, and return their positions."""
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
"""Combinations of facts to match rows by, the strongest first."""
_Facts = Mapping[int, Sequence[Hashable]]


def _facts(
    report: Report, inputs: Mapping[int, int], outputs: Mapping[int, int], interned: defaultdict[Hashable, int]
) -> _Facts:
    """Return the name, constants, upstream and downstream graph of each live row; equal graphs have equal numbers.

    `inputs` and `outputs`: the numbers of inputs and outputs in both reports.
    """
    rows, counted = report.rows, live(report)
    up: dict[int, int] = {FIRST_INPUT - place: FIRST_INPUT - number for place, number in inputs.items()}
    down: dict[int, int] = {}
    for i in counted:
        sources = [up.get(read, NO_ROW) for read in rows[i].reads]
        if rows[i].op in COMMUTATIVE:
            sources = sorted(number for number in sources if number != NO_ROW)
        up[i] = interned["up", rows[i].op, *sources]
    readers: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for place, port in enumerate(report.outputs):
        if place in outputs:
            readers[port.after].append((NO_ROW, outputs[place]))
    for i in reversed(counted):
        down[i] = interned["down", rows[i].op, *sorted(readers[i])]
        for place, read in enumerate(rows[i].reads):
            readers[read].append((0 if rows[i].op in COMMUTATIVE else place, down[i]))
    named = {i: (rows[i].scope, rows[i].name, rows[i].op) if rows[i].named else None for i in counted}
    return {i: (named[i], (rows[i].op, rows[i].constants), up[i], down[i]) for i in counted}


def _grouped(facts: _Facts, matched: Mapping[int, int], evidence: Iterable[int]) -> dict[Hashable, list[int]]:
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for i, row in facts.items():
        key = tuple([row[fact] for fact in evidence])
        if i not in matched and None not in key:
            groups[key].append(i)
    return groups


_Side = tuple[Report, list[int]]
"""A report and its live rows."""


def _align(a: _Side, b: _Side, to_b: dict[int, int], to_a: dict[int, int]) -> None:
    """Match the remaining rows in order, by the longest common runs of ops."""
    rest = [sum(i not in pairs for i in rows) for (_, rows), pairs in ((a, to_b), (b, to_a))]
    if not 0 < rest[0] * rest[1] <= _MAX_ALIGNED_PAIRS:
        return
    in_a = [to_b.get(i, a[0].rows[i].op) for i in a[1]]
    in_b = [j if j in to_a else b[0].rows[j].op for j in b[1]]
    for start, other, size in SequenceMatcher(None, in_a, in_b, autojunk=False).get_matching_blocks():
        for i, j in zip(a[1][start : start + size], b[1][other : other + size], strict=True):
            if i not in to_b and j not in to_a:
                to_b[i], to_a[j] = j, i
