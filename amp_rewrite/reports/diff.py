"""Differences between two reports, on which continuous integration may fail."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from amp_rewrite.ir.gc_paused import gc_paused
from amp_rewrite.reports.delta import KINDS, Delta
from amp_rewrite.reports.match import crossed, matched, order, paired
from amp_rewrite.reports.op_changes import BothModels, CastChange, Change, Matches, PlacedCast, PlacedChange
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.row_graph import RowGraph
from amp_rewrite.reports.rows import NO_ROW, CastRow, Row
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
    (a, view_a), (b, view_b) = report_and_view(a), report_and_view(b)
    mine, theirs = RowGraph(a), RowGraph(b)
    pairs = matched(mine, theirs)
    matches = Matches(pairs, paired(a.inputs, b.inputs), paired(a.outputs, b.outputs))
    to_b = dict(pairs)
    kept = {j for _, j in pairs}
    changes, differing = list(_port_changes(a, b, matches)), set()
    for i, j in pairs:
        after = _reordered(b.rows[j], order(a.rows[i], mine.reads[i], theirs.reads[j], to_b))
        if found := list(_changes(a.rows[i], after)):
            changes += [PlacedChange(change, i, j) for change in found]
            differing.add(j)
    changes += _crossings(mine, theirs, matches)
    changes += [PlacedChange(_one_sided("added", b.rows[j]), None, j) for j in theirs.live if j not in kept]
    changes += [PlacedChange(_one_sided("removed", a.rows[i]), i, None) for i in mine.live if i not in to_b]
    casts = tuple(_cast_changes(mine, theirs, to_b))
    alike, ops = _alike(mine, theirs, to_b), max(len(mine.live), len(theirs.live))
    least = _NAMESAKES if _interface(a) == _interface(b) else _RELATED
    return Delta(
        a.model.name,
        b.model.name,
        tuple(placed.change for placed in changes),
        tuple(placed.change for placed in casts),
        _settings(a, b),
        alike=alike,
        ops=ops,
        unrelated=ops >= _FEWEST and alike < least * ops,
        sides=BothModels((a, b), (view_a, view_b), matches, tuple(changes), casts),
    )


def _alike(a: RowGraph, b: RowGraph, to_b: Mapping[int, int]) -> int:
    return sum(
        a.report.rows[i].key == b.report.rows[j].key
        and [to_b.get(read, read) if read >= 0 else NO_ROW for read in a.reads[i]]
        == [read if read >= 0 else NO_ROW for read in b.reads[j]]
        for i, j in to_b.items()
    )


def _interface(report: Report) -> set[str]:
    return {port.name for port in (*report.inputs, *report.outputs)}


_Move = tuple[str, str, str]
"""Of what something changed, and its types before and after."""


def _changes(before: Row, after: Row) -> Iterator[Change]:
    if before[_COMPARED] == after[_COMPARED] and before.dtype == after.dtype and before.variables == after.variables:
        return
    moves = [*_main_moves(before, after), *_slot_moves(before, after)]
    types = {_kind(was, now): (of, was, now) for of, was, now in reversed(moves) if was != now}
    kinds = dict(_attribute_moves(before, after)) | types
    former = before.path if before.path != after.path else ""
    for kind in KINDS:
        if kind in kinds:
            variable, was, now = kinds[kind]
            yield Change(kind, after.path, after.op, after.scope, was, now, variable, former, after.why)


def _reordered(row: Row, places: Sequence[int] | None) -> Row:
    if places is None or max(places, default=0) >= len(row.inputs) or places == sorted(places):
        return row
    via = {str(slot): row.via[str(place)] for slot, place in enumerate(places) if str(place) in row.via}
    return row._replace(inputs=tuple(row.inputs[place] for place in places), via=via)


_COMPARED = slice(Row._fields.index("inputs"), None)


def _main_moves(before: Row, after: Row) -> Iterator[_Move]:
    """Yield the types of variables; the type of the op as a whole if the two share no variable."""
    shared = [
        (name, dtype, after.variables[name]) for name, dtype in before.variables.items() if name in after.variables
    ]
    yield from shared or [("", before.dtype, after.dtype)]


def _slot_moves(before: Row, after: Row) -> Iterator[_Move]:
    """Yield the types of inputs and outputs that both ops have, where both are known.

    Of an operator that the standard does not define, also of those that only one has.
    """
    for side, mine, theirs in (("input", before.inputs, after.inputs), ("output", before.outputs, after.outputs)):
        for slot, (was, now) in enumerate(zip(mine, theirs, strict=False)):
            if was and now and "unknown" not in was + now:
                ways = [row.via.get(str(slot), "") if side == "input" else "" for row in (before, after)]
                yield (f"{side} {slot}", _by_way(was, ways[0]), _by_way(now, ways[1]))
        if "::" in before.op and _ports(mine) != _ports(theirs):
            yield (f"{side}s", ", ".join(mine), ", ".join(theirs))
    for place in sorted({*before.via, *after.via}, key=int):
        if int(place) >= len(before.inputs):  # what a body hands out
            yield (f"input {place}", before.via.get(place, "exact"), after.via.get(place, "exact"))


def _ports(types: Collection[str]) -> list[bool]:
    """Return which ports are there, without those left out at the end."""
    there = [bool(dtype) for dtype in types]
    while there and not there[-1]:
        there.pop()
    return there


def _by_way(dtype: str, via: str) -> str:
    return f"{dtype} via {via}" if via else dtype


def _attribute_moves(before: Row, after: Row) -> Iterator[tuple[str, _Move]]:
    for name in sorted({*before.attributes, *after.attributes}, reverse=True):
        was, now = (row.attributes.get(name, "default") for row in (before, after))
        if was != now:
            yield ("attribute", (name, was, now))


def _port_changes(a: Report, b: Report, matches: Matches) -> Iterator[PlacedChange]:
    """Yield the changes of the model's inputs and outputs."""
    for what, mine, theirs, pairs, first in (
        ("graph input", a.inputs, b.inputs, matches.inputs, (len(a.rows), len(b.rows))),
        ("graph output", a.outputs, b.outputs, matches.outputs, (_first_output(a), _first_output(b))),
    ):
        for i, j in pairs:
            was, now = _by_way(mine[i].dtype, mine[i].via), _by_way(theirs[j].dtype, theirs[j].via)
            if was != now:
                former = mine[i].name if mine[i].name != theirs[j].name else ""
                change = Change(_kind(was, now), theirs[j].name, what, before=was, after=now, was=former)
                yield PlacedChange(change, first[0] + i, first[1] + j)
        for kind, ports, kept in (("added", theirs, {j for _, j in pairs}), ("removed", mine, {i for i, _ in pairs})):
            for i, port in enumerate(ports):
                if i not in kept and (port.reads or what == "graph output"):
                    types = {"after": port.dtype} if kind == "added" else {"before": port.dtype}
                    places = (None, first[1] + i) if kind == "added" else (first[0] + i, None)
                    yield PlacedChange(Change(kind, port.name, what, **types), *places)


def _first_output(report: Report) -> int:
    return len(report.rows) + len(report.inputs)


_TYPE = re.compile(r"\w+")


def _kind(was: str, now: str) -> str:
    ranks = []
    for text in (was, now):
        types = _TYPE.findall(text.replace(" via ", " "))
        ranks.append(min((_RANK.get(name, 0) for name in types if name in _RANK), default=0))
    containers = [text.partition(" via ")[0].rpartition("(")[0] for text in (was, now)]
    if 0 in ranks or ranks[0] == ranks[1] or containers[0] != containers[1]:
        return "retyped"
    return "lowered" if ranks[1] < ranks[0] else "raised"


def _crossings(a: RowGraph, b: RowGraph, matches: Matches) -> Iterator[PlacedChange]:
    """Yield operands and outputs of the model that come from another op, which computes the same in other types."""
    for i, j, place, source, other in crossed(a, b, matches):
        row = b.report.rows[other]
        for change in _changes(a.report.rows[source], row):
            of = f"{row.op} {change.variable}".strip()
            if place == NO_ROW:
                first = _first_output(a.report), _first_output(b.report)
                change = replace(change, name=b.outputs[j].name, op="graph output", scope="", variable=of, was="")
                yield PlacedChange(change, first[0] + i, first[1] + j)
            else:
                reader = b.report.rows[j]
                slot = f"input {place}: {of}"
                change = replace(change, name=reader.path, op=reader.op, scope=reader.scope, variable=slot, was="")
                yield PlacedChange(change, i, j)


def _one_sided(kind: str, row: Row) -> Change:
    types = {"after": row.dtype} if kind == "added" else {"before": row.dtype}
    return Change(kind, row.path, row.op, row.scope, why=row.why if kind == "added" else "", **types)


def _cast_changes(a: RowGraph, b: RowGraph, to_b: Mapping[int, int]) -> Iterator[PlacedCast]:
    mine = _casts(a, {i: ("both", j) for i, j in to_b.items()})
    theirs = _casts(b, {j: ("both", j) for j in to_b.values()})
    extra = [cast for key, group in theirs.items() for cast in group[len(mine.get(key, ())) :]]
    missing = [cast for key, group in mine.items() for cast in group[len(theirs.get(key, ())) :]]
    renamed = _loose(cast for _, cast in extra) & _loose(cast for _, cast in missing)
    for sign, casts in (("+", extra), ("-", missing)):
        quiet = Counter(renamed)
        for place, cast in casts:
            if quiet[loose := _types_of_loose(cast)] > 0:
                quiet[loose] -= 1
            else:
                change = CastChange(sign, cast.value, cast.from_, cast.to, cast.scope, cast.reason)
                yield PlacedCast(change, place)


def _loose(casts: Iterable[CastRow]) -> Counter[tuple[str, str]]:
    """Return the types of casts of constants and inputs, which only their names tell apart.

    Pairs of them are the same cast under another name: in which type a row reads, and through which, the row says.
    """
    return Counter(types for cast in casts if (types := _types_of_loose(cast)) != _NOT_LOOSE)


_NOT_LOOSE = ("", "")


def _types_of_loose(cast: CastRow) -> tuple[str, str]:
    return (cast.from_, cast.to) if cast.after == NO_ROW else _NOT_LOOSE


def _casts(graph: RowGraph, identity: Mapping[int, Hashable]) -> dict[Hashable, list[tuple[int, CastRow]]]:
    groups: dict[Hashable, list[tuple[int, CastRow]]] = defaultdict(list)
    for place, cast in enumerate(graph.report.casts):
        if cast.origin != "folded" and not cast.dead and cast.from_ != cast.to:
            after = graph.source(cast.after)
            source: Hashable = (cast.scope, cast.value)
            if after >= 0:
                source = (identity.get(after, (id(graph), after)), cast.slot)
            groups[source, cast.from_, cast.to].append((place, cast._replace(after=max(after, NO_ROW))))
    return groups


def _settings(a: Report, b: Report) -> tuple[tuple[str, str, str], ...]:
    """Return further differences; settings only where both reports are conversions."""
    settings = ("to", *STATED, "lists", "fingerprint")
    names = ("opsets", *(() if a.inventory or b.inventory else settings))
    values = ((name, _spell(getattr(a.model, name)), _spell(getattr(b.model, name))) for name in names)
    return tuple((name, mine, theirs) for name, mine, theirs in values if mine != theirs)


def _spell(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {version}" for name, version in value.items())
    return "default" if value is None else str(value)
