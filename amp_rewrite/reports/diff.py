"""Differences between two reports, on which continuous integration may fail."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import asdict, dataclass

from amp_rewrite.errors import PolicyError, advice
from amp_rewrite.reports.match import compared, match
from amp_rewrite.reports.render import annotation, markdown_table, table
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.rows import NO_ROW, CastRow, Row
from amp_rewrite.settings.options import STATED

KINDS = ("lowered", "raised", "retyped", "added", "removed", "casts")
_MARKDOWN_ROWS = 200  # a comment on GitHub holds 65536 characters
_ANNOTATIONS = 9  # GitHub shows ten of one level per step; the tenth counts the rest
_RANK = {"float16": 1, "bfloat16": 1, "float32": 2, "float64": 2}


@dataclass(frozen=True, slots=True)
class Change:
    """One op that differs. `name` is the one in B, or the one in A of an op that was removed.

    `was` is the name in A if that differs. `before` and `after` are element types, empty where the
    op is absent; `variable` is the type variable they belong to. `why` is the rule behind the type in B.
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


@dataclass(frozen=True, slots=True)
class Delta:
    """Differences of B from A. `settings` (name, in A, in B) explain them, but do not count as differences."""

    a: str
    b: str
    changes: tuple[Change, ...] = ()
    casts: tuple[CastChange, ...] = ()
    settings: tuple[tuple[str, str, str], ...] = ()

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of differences of each kind."""
        counts = Counter(change.kind for change in self.changes)
        return {kind: len(self.casts) if kind == "casts" else counts[kind] for kind in KINDS}

    @property
    def differs(self) -> bool:
        return bool(self.changes or self.casts)

    def fails(self, kinds: Collection[str] = ()) -> bool:
        """True if there is a difference of one of these kinds; of any kind if none is named.

        PolicyError for an unknown kind.
        """
        for kind in kinds:
            if kind not in KINDS:
                hint = advice(kind, KINDS, f"use some of {', '.join(KINDS)}")
                raise PolicyError(f"unknown kind of difference {kind!r}; {hint}")
        return any(self.counts[kind] for kind in kinds or KINDS)

    def summary(self) -> str:
        """One line: "2 lowered, 1 added, casts +3 -1"; "no difference"."""
        parts = [f"{number} {kind}" for kind, number in self.counts.items() if number and kind != "casts"]
        if self.casts:
            signs = Counter(cast.sign for cast in self.casts)
            parts.append("casts " + " ".join(f"{sign}{signs[sign]}" for sign in "+-" if signs[sign]))
        return ", ".join(parts) or "no difference"

    def to(self, form: str, fail_on: Collection[str] | None = None) -> str:
        """Return the differences as "text", "json", "markdown" or "github", which marks failures of a check."""
        if form == "github":
            return self.github(fail_on)
        return {"text": self.text, "json": self.to_json, "markdown": self.markdown}[form]()

    def text(self) -> str:
        """Return the differences as text. Ends with a newline."""
        if not self.differs:
            return "no difference\n"
        lines = [self.summary()]
        lines += table([(f"{name}:", f"{a} → {b}") for name, a, b in self.settings])
        for kind, group in self._by_kind().items():
            lines += ["", kind, *table([(c.title, c.op, c.types, c.variable, c.why) for c in group])]
        if self.casts:
            rows = [(c.sign, c.scope + c.value, f"{c.before} → {c.after}", c.why) for c in self.casts]
            lines += ["", "casts", *table(rows)]
        return "\n".join(lines) + "\n"

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

        `fail_on` as in `fails`: empty means every kind; None means that nothing fails.
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


def diff(a: Report, b: Report) -> Delta:
    """Return the differences of B from A.

    Renamed ops, and ops beside inserted ones, are recognized by what they compute from and for; an op that
    cannot be recognized counts as removed and added. Constants are values here, not ops, and casts between
    floats count as casts, whether a conversion would insert them or the model has them as nodes.
    """
    pairs = match(a, b)
    to_b = dict(pairs)
    kept = {j for _, j in pairs}
    changes = [c for i, j in pairs if (c := _change(a.rows[i], b.rows[j])) is not None]
    changes += [_one_sided("added", b.rows[j]) for j in compared(b) if j not in kept]
    changes += [_one_sided("removed", a.rows[i]) for i in compared(a) if i not in to_b]
    return Delta(a.model.name, b.model.name, tuple(changes), tuple(_cast_changes(a, b, to_b)), _settings(a, b))


def _change(before: Row, after: Row) -> Change | None:
    """Return the change of the types of one op; variables of both rows take precedence over the op as a whole."""
    if before.dtype == after.dtype and before.variables == after.variables:
        return None
    shared = [(name, before.variables[name], after.variables.get(name)) for name in before.variables]
    moves = [("", before.dtype, after.dtype)] if not any(now for _, _, now in shared) else []
    moves += [(name, was, now) for name, was, now in shared if now is not None]
    moved = [(_kind(was, now), name, was, now) for name, was, now in moves if was != now]
    if not moved:
        return None
    kind, variable, was, now = min(moved, key=lambda move: KINDS.index(move[0]))
    former = before.path if before.path != after.path else ""
    return Change(kind, after.path, after.op, after.scope, was, now, variable, former, after.why)


def _kind(was: str, now: str) -> str:
    step = _RANK.get(now, 0) - _RANK.get(was, 0)
    if was not in _RANK or now not in _RANK or not step:
        return "retyped"
    return "lowered" if step < 0 else "raised"


def _one_sided(kind: str, row: Row) -> Change:
    types = {"after": row.dtype} if kind == "added" else {"before": row.dtype}
    return Change(kind, row.path, row.op, row.scope, why=row.why if kind == "added" else "", **types)


def _cast_changes(a: Report, b: Report, to_b: Mapping[int, int]) -> Iterator[CastChange]:
    mine = _casts(a, {i: ("both", j) for i, j in to_b.items()})
    theirs = _casts(b, {j: ("both", j) for j in to_b.values()})
    for sign, casts, other in (("+", theirs, mine), ("-", mine, theirs)):
        for key, group in casts.items():
            for cast in group[len(other.get(key, ())) :]:
                yield CastChange(sign, cast.value, cast.from_, cast.to, cast.scope, cast.reason)


def _casts(report: Report, identity: Mapping[int, Hashable]) -> dict[Hashable, list[CastRow]]:
    """Return the casts after a conversion, by value and target type."""
    groups: dict[Hashable, list[CastRow]] = defaultdict(list)
    for cast in report.casts:
        if cast.origin != "folded":
            source: Hashable = (cast.scope, cast.value)
            if cast.after != NO_ROW:
                source = (identity.get(cast.after, (id(report), cast.after)), cast.slot)
            groups[source, cast.from_, cast.to].append(cast)
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
