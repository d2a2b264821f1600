"""Differences between two reports, on which continuous integration may fail."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import asdict, dataclass, field

from amp_rewrite.errors import PolicyError, advice
from amp_rewrite.ir.gc_paused import gc_paused
from amp_rewrite.reports.match import Flow, matched, paired
from amp_rewrite.reports.render import annotation, count, markdown_table, plain, table
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.result import Result
from amp_rewrite.reports.rows import NO_ROW, CastRow, Row
from amp_rewrite.reports.sources import ReportSource, report_in
from amp_rewrite.settings.options import STATED

KINDS = ("lowered", "raised", "retyped", "attribute", "added", "removed", "casts")
_MARKDOWN_ROWS = 200  # a comment on GitHub holds 65536 characters
_ANNOTATIONS = 9  # GitHub shows ten of one level per step; the tenth counts the rest
_RANK = {"float16": 1, "bfloat16": 1, "float32": 2, "float64": 2}
_SHOWN = 8
"""Lines of the summary per kind of difference."""
_FEWEST = 5
"""Ops of the larger model from which on two models can be called unrelated."""
_RELATED, _NAMESAKES = 0.25, 0.05
"""Share of the larger model's ops that two versions of one model have in common at least, and with equal names of
inputs and outputs. Of the shipped models, 436 of 442 pairs of different architectures have less, and all 310 pairs of
one and what a conversion made of it have more."""


@dataclass(frozen=True, slots=True)
class Change:
    """One op that differs, or one input or output of the model, whose `op` is "graph input" or "graph output".

    `name` is the one in B, or the one in A of an op that was removed; `was` is the name in A if that differs. `before`
    and `after` are element types, empty where the op is absent, or the values of an attribute: "float32 via float16" is
    a value rounded to float16 on its way. `variable` says of what: a type variable, "input 0", "output 1" or an
    attribute; empty for the op as a whole. `why` is the rule behind the type in B.
    """

    kind: str
    name: str
    op: str
    scope: str = ""
    before: str = ""
    after: str = ""
    variable: str = ""
    was: str = ""
    why: str = ""

    @property
    def types(self) -> str:
        """ "float32 → float16", or the one type that there is."""
        return " → ".join(filter(None, (self.before, self.after)))

    @property
    def title(self) -> str:
        """Name, with the former one."""
        return f"{self.name} (was {self.was})" if self.was else self.name


@dataclass(frozen=True, slots=True)
class CastChange:
    """A cast that only one of the two has: `sign` is "+" for B, "-" for A."""

    sign: str
    value: str
    before: str
    after: str
    scope: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Delta(Result):
    """Differences of B from A. `settings` explain them, but do not count as differences.

    Attributes:
        a: name of A.
        b: name of B.
        changes: ops that differ.
        casts: Casts that differ.
        settings: name, value in A, value in B; they explain differences, but do not count as such.
        alike: number of ops that compute the same from the same ops.
        ops: number of ops of the larger model.
        unrelated: True if so few are alike that these are two models, not two versions of one.
    """

    a: str
    b: str
    changes: tuple[Change, ...] = ()
    casts: tuple[CastChange, ...] = ()
    settings: tuple[tuple[str, str, str], ...] = ()
    alike: int = field(default=0, compare=False)
    ops: int = field(default=0, compare=False)
    unrelated: bool = field(default=False, compare=False)

    @property
    def brief(self) -> str:
        """Both models, and the differences in one line."""
        return f"{self.a} → {self.b}: {self.summary()}"

    def records(self) -> Iterator[Mapping[str, object]]:
        """Yield the changes, then those of casts, as dictionaries."""
        yield from map(asdict, self.changes)
        yield from ({"kind": f"cast {c.sign}", "name": c.value, "op": "Cast", **asdict(c)} for c in self.casts)

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of differences of each kind."""
        counts = Counter(change.kind for change in self.changes)
        return {kind: len(self.casts) if kind == "casts" else counts[kind] for kind in KINDS}

    @property
    def differs(self) -> bool:
        """True if there is any difference."""
        return bool(self.changes or self.casts)

    def fails(self, kinds: Collection[str] = ()) -> bool:
        """True if there is a difference of one of these kinds; of any kind if none is named.

        Args:
            kinds: kinds of differences.

        Raises:
            PolicyError: a kind is unknown.
        """
        for kind in kinds:
            if kind not in KINDS:
                hint = advice(kind, KINDS, f"use some of {', '.join(KINDS)}")
                raise PolicyError(f"unknown kind of difference {kind!r}; {hint}")
        return any(self.counts[kind] for kind in kinds or KINDS)

    def summary(self) -> str:
        """Return one line: "2 lowered, 1 added, casts +3 -1"; "no difference"."""
        parts = [f"{number} {kind}" for kind, number in self.counts.items() if number and kind != "casts"]
        if self.casts:
            signs = Counter(cast.sign for cast in self.casts)
            parts.append("casts " + " ".join(f"{sign}{signs[sign]}" for sign in "+-" if signs[sign]))
        return ", ".join(parts) or "no difference"

    def to(self, form: str, fail_on: Collection[str] | None = None, *, verbose: bool | None = None) -> str:
        """Return the differences in one form.

        Args:
            form: "text", "json", "markdown" or "github", which marks failures of a check.
            fail_on: as in `github`.
            verbose: as in `text`; the other forms name each op.
        """
        if form == "text":
            return self.text(verbose=verbose)
        if form == "github":
            return self.github(fail_on)
        return {"json": self.to_json, "markdown": self.markdown}[form]()

    def text(self, *, verbose: bool | None = None) -> str:
        """Return the differences as text, with each op. Ends with a newline.

        Args:
            verbose: None: one line for unrelated models; False: a summary by type, for a terminal; True: each op.
        """
        if not self.differs:
            return "no difference\n"
        if self.unrelated and not verbose:
            return f"{self._strangers()}; --verbose compares them all the same\n"
        lines = [self._strangers()] if self.unrelated else []
        lines += [self.summary(), *table([(f"{name}:", f"{a} → {b}") for name, a, b in self.settings])]
        if verbose is False:
            return "\n".join([*lines, *self._by_type()]) + "\n"
        for kind, group in self._by_kind().items():
            lines += ["", kind, *table([(c.title, c.op, c.types, c.variable, c.why) for c in group])]
        if self.casts:
            rows = [(c.sign, c.scope + c.value, f"{c.before} → {c.after}", c.why) for c in self.casts]
            lines += ["", "casts", *table(rows)]
        return "\n".join(lines) + "\n"

    def _strangers(self) -> str:
        return plain(f"{self.a} and {self.b} are unrelated models: {self.alike} of {count(self.ops, 'op')} agree")

    def _by_type(self) -> Iterator[str]:
        """Yield a table for each kind: how many ops of a type changed in the same way, the most frequent first."""
        groups = {
            kind: Counter(("", change.op, change.types, change.variable) for change in changes)
            for kind, changes in self._by_kind().items()
        }
        if self.casts:
            groups["casts"] = Counter((cast.sign, "", f"{cast.before} → {cast.after}", "") for cast in self.casts)
        for kind, counts in groups.items():
            ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
            rows = [(f"{sign}{n}", *filter(None, (op, types)), of) for (sign, op, types, of), n in ordered]
            yield from ("", kind, *table(rows[:_SHOWN], right=">"))
            if len(rows) > _SHOWN:
                yield f"  … and {count(len(rows) - _SHOWN, 'line')} more"
        yield from ("", "name each op with --verbose")

    def to_json(self) -> str:
        """Return everything as JSON, in a stable order. Ends with a newline."""
        document = asdict(self) | {"schema": 1, "counts": dict(self.counts), "differs": self.differs}
        document["settings"] = {name: [a, b] for name, a, b in self.settings}
        return json.dumps(document, indent=2, sort_keys=True, allow_nan=False) + "\n"

    def markdown(self) -> str:
        """Return a section for a comment on a pull request. Ends with a newline."""
        lines = [f"**Precision: {self.summary()}**"]
        rows = [(c.kind, c.title, c.op, c.types, c.why) for group in self._by_kind().values() for c in group]
        rows += [(f"cast {c.sign}", c.scope + c.value, "Cast", f"{c.before} → {c.after}", c.why) for c in self.casts]
        if rows:
            lines += ["", *markdown_table(("change", "op", "type", "dtype", "why"), rows[:_MARKDOWN_ROWS])]
        if len(rows) > _MARKDOWN_ROWS:
            lines += ["", f"… and {len(rows) - _MARKDOWN_ROWS} more."]
        return "\n".join(lines) + "\n"

    def github(self, fail_on: Collection[str] | None = None) -> str:
        """Return annotations, one per difference: errors for the kinds that the check fails on, warnings for others.

        Args:
            fail_on: as in `fails`: empty means every kind; None means that nothing fails.
        """
        lines: list[str] = []
        for kind, group in self._by_kind().items():
            texts = [(f"{kind}: {c.name}", f"{c.title} ({c.op}) {c.types} {c.why}".rstrip()) for c in group]
            lines += _annotations(kind, texts, fail_on)
        texts = [(f"cast {c.sign} {c.value}", f"{c.before} → {c.after} {c.why}".rstrip()) for c in self.casts]
        lines += _annotations("casts", texts, fail_on)
        return "".join(line + "\n" for line in lines) or annotation("notice", "no difference", {}) + "\n"

    def _by_kind(self) -> dict[str, list[Change]]:
        groups = {kind: [change for change in self.changes if change.kind == kind] for kind in KINDS}
        return {kind: group for kind, group in groups.items() if group}


def _annotations(kind: str, texts: list[tuple[str, str]], fail_on: Collection[str] | None) -> Iterator[str]:
    level = "error" if fail_on is not None and (not fail_on or kind in fail_on) else "warning"
    for title, message in texts[:_ANNOTATIONS]:
        yield annotation(level, message, {"title": title})
    if len(texts) > _ANNOTATIONS:
        yield annotation(level, f"and {len(texts) - _ANNOTATIONS} more {kind}", {"title": kind})


@gc_paused()
def diff(a: ReportSource, b: ReportSource) -> Delta:
    """Return the differences of B from A. Both are reports, results of conversions, or models; or paths of such.

    Renamed ops, and ops beside inserted ones, are recognized by what they compute from and for; an op that
    cannot be recognized counts as removed and added. Constants and copies are values here, not ops, and casts between
    floats count as casts, whether a conversion would insert them or the model has them as nodes. An op from which no
    output is computed does not count. Of a report of version 1 the types are compared, not what it lacks.

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
    a, b = report_in(a), report_in(b)
    mine, theirs = Flow(a), Flow(b)
    pairs = matched(mine, theirs)
    to_b = dict(pairs)
    kept = {j for _, j in pairs}
    attributes = min(a.schema, b.schema) > 1
    changes = list(_port_changes(a, b))
    for i, j in pairs:
        changes += _changes(a.rows[i], b.rows[j], attributes=attributes)
    changes += [_one_sided("added", b.rows[j]) for j in theirs.live if j not in kept]
    changes += [_one_sided("removed", a.rows[i]) for i in mine.live if i not in to_b]
    casts = tuple(_cast_changes(mine, theirs, to_b))
    alike, ops = _alike(mine, theirs, to_b), max(len(mine.live), len(theirs.live))
    least = _NAMESAKES if _interface(a) == _interface(b) else _RELATED
    unrelated = ops >= _FEWEST and alike < least * ops
    return Delta(a.model.name, b.model.name, tuple(changes), casts, _settings(a, b), alike, ops, unrelated)


def _alike(a: Flow, b: Flow, to_b: Mapping[int, int]) -> int:
    """Return the number of pairs that compute the same from matching ops."""
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


def _changes(before: Row, after: Row, *, attributes: bool) -> Iterator[Change]:
    """Yield the changes of one op, the first of each kind."""
    if before[_COMPARED] == after[_COMPARED] and before.dtype == after.dtype and before.variables == after.variables:
        return
    moves = [*_main_moves(before, after), *_slot_moves(before, after, vias=attributes)]
    kinds = {_kind(was, now): (of, was, now) for of, was, now in reversed(moves) if was != now}
    if attributes:
        kinds = dict(_attribute_moves(before, after)) | kinds
    former = before.path if before.path != after.path else ""
    for kind in KINDS:
        if kind in kinds:
            variable, was, now = kinds[kind]
            yield Change(kind, after.path, after.op, after.scope, was, now, variable, former, after.why)


_COMPARED = slice(Row._fields.index("inputs"), None)


def _main_moves(before: Row, after: Row) -> Iterator[_Move]:
    """Yield the types of variables; the type of the op as a whole if the two share no variable."""
    shared = [
        (name, dtype, after.variables[name]) for name, dtype in before.variables.items() if name in after.variables
    ]
    yield from shared or [("", before.dtype, after.dtype)]


def _slot_moves(before: Row, after: Row, *, vias: bool) -> Iterator[_Move]:
    """Yield the types of inputs and outputs that both ops have, where both are known.

    Of an operator that the standard does not define, also of those that only one has.
    """
    for side, mine, theirs in (("input", before.inputs, after.inputs), ("output", before.outputs, after.outputs)):
        for slot, (was, now) in enumerate(zip(mine, theirs, strict=False)):
            if was and now and "unknown" not in was + now:
                ways = [row.via.get(str(slot), "") if vias and side == "input" else "" for row in (before, after)]
                yield (f"{side} {slot}", _by_way(was, ways[0]), _by_way(now, ways[1]))
        if "::" in before.op and _ports(mine) != _ports(theirs):
            yield (f"{side}s", ", ".join(mine), ", ".join(theirs))
    for place in sorted({*before.via, *after.via}, key=int) if vias else ():
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
    """Yield the kind of difference and the values of attributes, the first attribute last."""
    for name in sorted({*before.attributes, *after.attributes}, reverse=True):
        was, now = (row.attributes.get(name, "default") for row in (before, after))
        if was != now:
            yield ("attribute", (name, was, now))


def _port_changes(a: Report, b: Report) -> Iterator[Change]:
    """Yield the changes of the model's inputs and outputs; none if one report does not have them."""
    if not (a.outputs and b.outputs):
        return
    for what, mine, theirs in (("graph input", a.inputs, b.inputs), ("graph output", a.outputs, b.outputs)):
        pairs = paired(mine, theirs)
        for i, j in pairs:
            was, now = _by_way(mine[i].dtype, mine[i].via), _by_way(theirs[j].dtype, theirs[j].via)
            if was != now:
                former = mine[i].name if mine[i].name != theirs[j].name else ""
                yield Change(_kind(was, now), theirs[j].name, what, before=was, after=now, was=former)
        for kind, ports, kept in (("added", theirs, {j for _, j in pairs}), ("removed", mine, {i for i, _ in pairs})):
            for i, port in enumerate(ports):
                if i not in kept and (port.reads or what == "graph output"):
                    types = {"after": port.dtype} if kind == "added" else {"before": port.dtype}
                    yield Change(kind, port.name, what, **types)


_TYPE = re.compile(r"\w+")


def _kind(was: str, now: str) -> str:
    """Return the direction of a change: by the narrowest type on the way, in the same container."""
    ranks = []
    for text in (was, now):
        types = _TYPE.findall(text.replace(" via ", " "))
        ranks.append(min((_RANK.get(name, 0) for name in types if name in _RANK), default=0))
    containers = [text.partition(" via ")[0].rpartition("(")[0] for text in (was, now)]
    if 0 in ranks or ranks[0] == ranks[1] or containers[0] != containers[1]:
        return "retyped"
    return "lowered" if ranks[1] < ranks[0] else "raised"


def _one_sided(kind: str, row: Row) -> Change:
    types = {"after": row.dtype} if kind == "added" else {"before": row.dtype}
    return Change(kind, row.path, row.op, row.scope, why=row.why if kind == "added" else "", **types)


def _cast_changes(a: Flow, b: Flow, to_b: Mapping[int, int]) -> Iterator[CastChange]:
    mine = _casts(a, {i: ("both", j) for i, j in to_b.items()})
    theirs = _casts(b, {j: ("both", j) for j in to_b.values()})
    extra = [cast for key, group in theirs.items() for cast in group[len(mine.get(key, ())) :]]
    missing = [cast for key, group in mine.items() for cast in group[len(theirs.get(key, ())) :]]
    renamed = _loose(extra) & _loose(missing)
    for sign, casts in (("+", extra), ("-", missing)):
        quiet = Counter(renamed)
        for cast in casts:
            if quiet[loose := _types_of_loose(cast)] > 0:
                quiet[loose] -= 1
            else:
                yield CastChange(sign, cast.value, cast.from_, cast.to, cast.scope, cast.reason)


def _loose(casts: Collection[CastRow]) -> Counter[tuple[str, str]]:
    """Return the types of casts of constants and inputs, which only their names tell apart.

    Pairs of them are the same cast under another name: in which type a row reads, and through which, the row says.
    """
    return Counter(types for cast in casts if (types := _types_of_loose(cast)) != _NOT_LOOSE)


_NOT_LOOSE = ("", "")


def _types_of_loose(cast: CastRow) -> tuple[str, str]:
    return (cast.from_, cast.to) if cast.after == NO_ROW else _NOT_LOOSE


def _casts(flow: Flow, identity: Mapping[int, Hashable]) -> dict[Hashable, list[CastRow]]:
    """Return the casts after a conversion, by value and target type."""
    groups: dict[Hashable, list[CastRow]] = defaultdict(list)
    for cast in flow.report.casts:
        if cast.origin != "folded" and not cast.dead and cast.from_ != cast.to:
            after = flow.source(cast.after)
            source: Hashable = (cast.scope, cast.value)
            if after >= 0:
                source = (identity.get(after, (id(flow), after)), cast.slot)
            groups[source, cast.from_, cast.to].append(cast._replace(after=max(after, NO_ROW)))
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
