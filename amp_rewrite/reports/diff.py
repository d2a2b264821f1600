"""Differences between two reports, for people and for continuous integration."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping

from amp_rewrite.ir.gc_paused import gc_paused
from amp_rewrite.reports.delta import KINDS, Delta
from amp_rewrite.reports.match import live, live_casts, match, paired
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.rows import FIRST_INPUT, NO_ROW, CastChange, CastRow, Change, Row
from amp_rewrite.reports.sources import ReportSource, report_and_view
from amp_rewrite.settings.request import STATED

_RANK = {"float16": 1, "bfloat16": 1, "float32": 2, "float64": 2}
_FEWEST = 5
"""Ops of the larger model from which on two models can be called unrelated."""
_RELATED, _NAMESAKES = 0.25, 0.05
"""Share of the larger model's ops that two versions of one model have in common at least, and with equal names of
inputs and outputs. Of the shipped models, 436 of 442 pairs of different architectures have less, and all 310 pairs of
one and what a conversion made of it have more."""


@gc_paused()
def diff(a: ReportSource, b: ReportSource) -> Delta:
    """Return the differences of B from A. Both are reports, results of conversions, or models; or paths of such.

    Renamed ops, and ops beside inserted ones, are recognized by what they compute from and for; an op that
    cannot be recognized counts as removed and added. Constants and copies are values here, not ops, and casts between
    floats count as casts, whether a conversion would insert them or the model has them as nodes. An op from which no
    output is computed does not count.

    Args:
        a: the report of the older model.
        b: the report of the newer one.

    Returns:
        The differences, which print as text, JSON, Markdown or annotations of GitHub.

    Example:
        >>> import amp_rewrite
        >>> a, b = (amp_rewrite.convert("model.onnx", to=to).report for to in ("float16", "bfloat16"))
        >>> amp_rewrite.diff(a, b).differs
        True
    """
    (a, _), (b, view) = report_and_view(a), report_and_view(b)
    mine, theirs = live(a), live(b)
    to_b = dict(match(a, b))
    kept = set(to_b.values())
    changes = [*_port_changes(a, b, mine, theirs)]
    changes += [change for i, j in to_b.items() for change in _changes(a.rows[i], b.rows[j], j)]
    changes += [_added(b.rows[j], j) for j in theirs if j not in kept]
    changes += [_removed(a.rows[i]) for i in mine if i not in to_b]
    changes.sort(key=lambda change: KINDS.index(change.kind))
    alike, ops = _alike(a, b, to_b), max(len(mine), len(theirs))
    least = _NAMESAKES if _interface(a) == _interface(b) else _RELATED
    return Delta(
        a.model.name,
        b.model.name,
        tuple(changes),
        tuple(_cast_changes(a, b, to_b)),
        _settings(a, b),
        alike=alike,
        ops=ops,
        unrelated=ops >= _FEWEST and alike < least * ops,
        report=b,
        view=view,
    )


def _alike(a: Report, b: Report, to_b: Mapping[int, int]) -> int:
    """Return the number of pairs that read the same pairs."""

    def read(report: Report, row: int, names: Mapping[int, int]) -> list[int]:
        return [names.get(source, source) if source >= 0 else NO_ROW for source in report.rows[row].reads]

    return sum(read(a, i, to_b) == read(b, j, {}) for i, j in to_b.items())


def _interface(report: Report) -> set[str]:
    return {port.name for port in (*report.inputs, *report.outputs)}


# -- ops -----------------------------------------------------------------------------------------------------

_Move = tuple[str, str, str]
"""Of what something changed, and its types before and after."""


def _changes(before: Row, after: Row, vertex: int) -> Iterator[Change]:
    """Yield the first change of each kind."""
    moves = [*_main_moves(before, after), *_slot_moves(before, after)]
    types = {_kind(was, now): (of, was, now) for of, was, now in reversed(moves) if was != now}
    former = before.path if before.path != after.path else ""
    for kind, (variable, was, now) in (dict(_attribute_moves(before, after)) | types).items():
        yield Change(kind, after.path, after.op, after.scope, was, now, variable, former, after.why, vertex)


def _main_moves(before: Row, after: Row) -> Iterator[_Move]:
    """Yield the types of variables; the type of the op as a whole if the two share no variable."""
    shared = [name for name in before.variables if name in after.variables]
    names = shared if len(after.variables) > 1 else [""] * len(shared)
    yield from ((name, before.variables[of], after.variables[of]) for name, of in zip(names, shared, strict=True))
    if not shared:
        yield "", before.dtype, after.dtype


def _slot_moves(before: Row, after: Row) -> Iterator[_Move]:
    """Yield the known types of the inputs and outputs of both ops.

    Of an operator that the standard does not define, also of those that only one has.
    """
    for side, mine, theirs in (("input", before.inputs, after.inputs), ("output", before.outputs, after.outputs)):
        for slot, (was, now) in enumerate(zip(mine, theirs, strict=False)):
            if was and now and "unknown" not in was + now:
                yield f"{side} {slot}", was, now
        if "::" in before.op and _ports(mine) != _ports(theirs):
            yield f"{side}s", ", ".join(mine), ", ".join(theirs)


def _ports(types: Collection[str]) -> list[bool]:
    there = [bool(dtype) for dtype in types]
    while there and not there[-1]:
        there.pop()
    return there


def _attribute_moves(before: Row, after: Row) -> Iterator[tuple[str, _Move]]:
    for name in sorted({*before.attributes, *after.attributes}, reverse=True):
        was, now = (row.attributes.get(name, "default") for row in (before, after))
        if was != now:
            yield "attribute", (name, was, now)


_TYPE = re.compile(r"\w+")


def _kind(was: str, now: str) -> str:
    ranks = [min((_RANK[name] for name in _TYPE.findall(text) if name in _RANK), default=0) for text in (was, now)]
    containers = [text.rpartition("(")[0] for text in (was, now)]
    if 0 in ranks or ranks[0] == ranks[1] or containers[0] != containers[1]:
        return "retyped"
    return "lowered" if ranks[1] < ranks[0] else "raised"


def _added(row: Row, vertex: int) -> Change:
    return Change("added", row.path, row.op, row.scope, after=row.dtype, why=row.why, vertex=vertex)


def _removed(row: Row) -> Change:
    return Change("removed", row.path, row.op, row.scope, before=row.dtype)


# -- inputs, outputs, casts, settings ------------------------------------------------------------------------


def _port_changes(a: Report, b: Report, mine: Collection[int], theirs: Collection[int]) -> Iterator[Change]:
    first = len(b.rows)
    used = [{read for i in rows for read in report.rows[i].reads} for report, rows in ((a, mine), (b, theirs))]
    for what, before, after in (("graph input", a.inputs, b.inputs), ("graph output", a.outputs, b.outputs)):
        pairs = paired(before, after)
        for i, j in pairs:
            was, now = before[i].dtype, after[j].dtype
            if was != now:
                former = before[i].name if before[i].name != after[j].name else ""
                name = after[j].name
                yield Change(_kind(was, now), name, what, before=was, after=now, was=former, vertex=first + j)
        kept = {i for i, _ in pairs}, {j for _, j in pairs}
        for i, port in enumerate(before):
            if i not in kept[0] and (what == "graph output" or FIRST_INPUT - i in used[0]):
                yield Change("removed", port.name, what, before=port.dtype)
        for j, port in enumerate(after):
            if j not in kept[1] and (what == "graph output" or FIRST_INPUT - j in used[1]):
                yield Change("added", port.name, what, after=port.dtype, vertex=first + j)
        first += len(after)


def _cast_changes(a: Report, b: Report, to_b: Mapping[int, int]) -> Iterator[CastChange]:
    mine, theirs = _casts(a, to_b), _casts(b, {j: j for j in to_b.values()})
    extra = [cast for key, group in theirs.items() for cast in group[len(mine.get(key, ())) :]]
    missing = [cast for key, group in mine.items() for cast in group[len(theirs.get(key, ())) :]]
    renamed = _loose(extra) & _loose(missing)
    for sign, casts in (("+", extra), ("-", missing)):
        quiet = Counter(renamed)
        for place, cast in casts:
            if cast.after < 0 and quiet[cast.from_, cast.to] > 0:
                quiet[cast.from_, cast.to] -= 1
            else:
                at = place if sign == "+" else None
                yield CastChange(sign, cast.value, cast.from_, cast.to, cast.scope, cast.reason, at)


_Cast = tuple[int, CastRow]
"""A cast with its position."""


def _loose(casts: Iterable[_Cast]) -> Counter[tuple[str, str]]:
    """Return the types of casts of constants and inputs: pairs of them are one cast under two names."""
    return Counter((cast.from_, cast.to) for _, cast in casts if cast.after < 0)


def _casts(report: Report, names: Mapping[int, int]) -> dict[Hashable, list[_Cast]]:
    """Return casts by what they cast: a result of a pair, of a row of one report alone, or a named value."""
    groups: dict[Hashable, list[_Cast]] = defaultdict(list)
    for place, cast in live_casts(report):
        source: Hashable = (cast.scope, cast.value)
        if cast.after >= 0:
            own = names.get(cast.after)
            source = ((id(report), cast.after) if own is None else own, cast.slot)
        groups[source, cast.from_, cast.to].append((place, cast))
    return groups


def _settings(a: Report, b: Report) -> tuple[tuple[str, str, str], ...]:
    settings = ("to", *STATED, "lists", "fingerprint")
    names = ("opsets", *(() if a.inventory or b.inventory else settings))
    values = ((name, _spell(getattr(a.model, name)), _spell(getattr(b.model, name))) for name in names)
    return tuple((name, mine, theirs) for name, mine, theirs in values if mine != theirs)


def _spell(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {version}" for name, version in value.items())
    return "default" if value is None else str(value)
