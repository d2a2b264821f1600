"""Differences between two reports, for people and for continuous integration."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping

from amp_rewrite.ir.gc_paused import gc_paused
from amp_rewrite.reports.delta import KINDS, Delta
from amp_rewrite.reports.match import RowGraph, matched, paired
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.rows import NO_ROW, CastChange, CastRow, Change, Marked, PortRow, Row
from amp_rewrite.reports.sources import ReportSource, report_and_view
from amp_rewrite.settings.request import STATED

_RANK = {"float16": 1, "bfloat16": 1, "float32": 2, "float64": 2}
_FEWEST = 5
"""Ops of the larger model from which on two models can be called unrelated."""
_RELATED, _NAMESAKES = 0.25, 0.05
"""Share of the larger model's ops that two versions of one model have in common at least, and with equal names of
inputs and outputs. Of the shipped models, 436 of 442 pairs of different architectures have less, and all 310 pairs of
one and what a conversion made of it have more."""
_Placed = tuple[Change, int | None]
"""A change and its vertex in B: rows, then inputs, then outputs; None for what B lacks."""


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
    mine, theirs = RowGraph(a), RowGraph(b)
    to_b = dict(matched(mine, theirs))
    kept = set(to_b.values())
    placed: list[_Placed] = [*_port_changes(a, b)]
    placed += [(change, j) for i, j in to_b.items() for change in _changes(a.rows[i], b.rows[j])]
    placed += [(_one_sided("added", b.rows[j]), j) for j in theirs.live if j not in kept]
    placed += [(_one_sided("removed", a.rows[i]), None) for i in mine.live if i not in to_b]
    placed.sort(key=lambda one: KINDS.index(one[0].kind))
    casts = list(_cast_changes(mine, theirs, to_b))
    alike, ops = _alike(mine, theirs, to_b), max(len(mine.live), len(theirs.live))
    least = _NAMESAKES if _interface(a) == _interface(b) else _RELATED
    return Delta(
        a.model.name,
        b.model.name,
        tuple(change for change, _ in placed),
        tuple(change for change, _ in casts),
        _settings(a, b),
        alike=alike,
        ops=ops,
        unrelated=ops >= _FEWEST and alike < least * ops,
        marked=Marked(b, view, [vertex for _, vertex in placed], [at for _, at in casts]),
    )


def _alike(a: RowGraph, b: RowGraph, to_b: Mapping[int, int]) -> int:
    read = [[to_b.get(read, read) if read >= 0 else NO_ROW for read in a.reads[i]] for i in to_b]
    also = [[read if read >= 0 else NO_ROW for read in b.reads[j]] for j in to_b.values()]
    return sum(one == other for one, other in zip(read, also, strict=True))


def _interface(report: Report) -> set[str]:
    return {port.name for port in (*report.inputs, *report.outputs)}


# -- ops -----------------------------------------------------------------------------------------------------

_Move = tuple[str, str, str]
"""Of what something changed, and its types before and after."""


def _changes(before: Row, after: Row) -> Iterator[Change]:
    """Yield the first change of each kind."""
    moves = [*_main_moves(before, after), *_slot_moves(before, after)]
    types = {_kind(was, now): (of, was, now) for of, was, now in reversed(moves) if was != now}
    former = before.path if before.path != after.path else ""
    for kind, (variable, was, now) in (dict(_attribute_moves(before, after)) | types).items():
        yield Change(kind, after.path, after.op, after.scope, was, now, variable, former, after.why)


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


def _one_sided(kind: str, row: Row) -> Change:
    types = {"after": row.dtype} if kind == "added" else {"before": row.dtype}
    return Change(kind, row.path, row.op, row.scope, why=row.why if kind == "added" else "", **types)


# -- inputs, outputs, casts, settings ------------------------------------------------------------------------


def _port_changes(a: Report, b: Report) -> Iterator[_Placed]:
    first = len(b.rows)
    for what, mine, theirs in (("graph input", a.inputs, b.inputs), ("graph output", a.outputs, b.outputs)):
        pairs = paired(mine, theirs)
        for i, j in pairs:
            was, now = mine[i].dtype, theirs[j].dtype
            if was != now:
                former = mine[i].name if mine[i].name != theirs[j].name else ""
                yield Change(_kind(was, now), theirs[j].name, what, before=was, after=now, was=former), first + j
        kept = {i for i, _ in pairs}, {j for _, j in pairs}
        for i, port in enumerate(mine):
            if i not in kept[0] and _used(port, what):
                yield Change("removed", port.name, what, before=port.dtype), None
        for j, port in enumerate(theirs):
            if j not in kept[1] and _used(port, what):
                yield Change("added", port.name, what, after=port.dtype), first + j
        first += len(theirs)


def _used(port: PortRow, what: str) -> bool:
    return bool(port.reads) or what == "graph output"


def _cast_changes(a: RowGraph, b: RowGraph, to_b: Mapping[int, int]) -> Iterator[tuple[CastChange, int | None]]:
    mine = _casts(a, {i: ("both", j) for i, j in to_b.items()})
    theirs = _casts(b, {j: ("both", j) for j in to_b.values()})
    extra = [cast for key, group in theirs.items() for cast in group[len(mine.get(key, ())) :]]
    missing = [cast for key, group in mine.items() for cast in group[len(theirs.get(key, ())) :]]
    renamed = _loose(cast for _, cast in extra) & _loose(cast for _, cast in missing)
    for sign, casts in (("+", extra), ("-", missing)):
        quiet = Counter(renamed)
        for place, cast in casts:
            if cast.after == NO_ROW and quiet[cast.from_, cast.to] > 0:
                quiet[cast.from_, cast.to] -= 1
            else:
                change = CastChange(sign, cast.value, cast.from_, cast.to, cast.scope, cast.reason)
                yield change, place if sign == "+" else None


def _loose(casts: Iterable[CastRow]) -> Counter[tuple[str, str]]:
    """Return the types of casts of constants and inputs: pairs of them are one cast under two names."""
    return Counter((cast.from_, cast.to) for cast in casts if cast.after == NO_ROW)


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
    settings = ("to", *STATED, "lists", "fingerprint")
    names = ("opsets", *(() if a.inventory or b.inventory else settings))
    values = ((name, _spell(getattr(a.model, name)), _spell(getattr(b.model, name))) for name in names)
    return tuple((name, mine, theirs) for name, mine, theirs in values if mine != theirs)


def _spell(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {version}" for name, version in value.items())
    return "default" if value is None else str(value)
