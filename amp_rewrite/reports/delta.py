"""Differences between two models, as data, text, JSON, Markdown, annotations and figures."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from amp_rewrite.errors import PolicyError, advice
from amp_rewrite.reports.render import annotation, count, cut, markdown_table, plain, table
from amp_rewrite.reports.result import Result
from amp_rewrite.reports.rows import CastChange, Change, ReportData

if TYPE_CHECKING:
    from amp_rewrite.ir.view import View
    from amp_rewrite.reports.page.page import Figure

KINDS = ("lowered", "raised", "retyped", "attribute", "added", "removed", "casts")
FLOAT32 = "float32"
"""The kind of ops in float32 only in B: raised, or added in float32."""
_MAX_BYTES = 60_000  # a GitHub comment is limited to 65536 characters
_MAX_CELL = 200
_MAX_ANNOTATIONS = 9  # GitHub shows ten of one level per step; the tenth counts the others
_MAX_LINES = 8
"""Maximum number of summary lines per kind of difference."""


@dataclass(frozen=True, slots=True, repr=False)
class Delta(Result):
    """Differences between two models, A and B.

    Attributes:
        a: name of A.
        b: name of B.
        changes: changed ops, in the order of `KINDS`.
        casts: casts in only one of the models.
        settings: name, value in A and value in B of each setting that differs. Settings explain differences, but do
            not count as differences.
        alike: number of matched ops with matched inputs.
        ops: number of ops in the larger model.
        unrelated: True if too few ops match for two versions of one model.
        report: the report of B, for the page, if available.
        view: the view of B, for the page, if available.
    """

    a: str
    b: str
    changes: tuple[Change, ...] = ()
    casts: tuple[CastChange, ...] = ()
    settings: tuple[tuple[str, str, str], ...] = ()
    alike: int = field(default=0, compare=False)
    ops: int = field(default=0, compare=False)
    unrelated: bool = field(default=False, compare=False)
    report: ReportData | None = field(default=None, compare=False)
    view: View | None = field(default=None, compare=False)

    @property
    def brief(self) -> str:
        """Both models, and the differences in one line."""
        return f"{self.a} → {self.b}: {self.summary()}"

    @property
    def counts(self) -> Mapping[str, int]:
        counts = Counter(change.kind for change in self.changes)
        return {kind: len(self.casts) if kind == "casts" else counts[kind] for kind in KINDS}

    @property
    def differs(self) -> bool:
        return bool(self.changes or self.casts)

    def fails(self, kinds: Collection[str] = ()) -> bool:
        """True if there is a difference of one of these kinds, or of any kind if none is named.

        Args:
            kinds: kinds of differences; "float32" selects ops that are raised, or added in float32.

        Raises:
            PolicyError: a kind is unknown.
        """
        allowed = (*KINDS, FLOAT32)
        for kind in kinds:
            if kind not in allowed:
                hint = advice(kind, allowed, f"use some of {', '.join(allowed)}")
                raise PolicyError(f"unknown kind of difference {kind!r}; {hint}")
        failing = kinds or KINDS
        return any(_fails_on(change, failing) for change in self.changes) or ("casts" in failing and bool(self.casts))

    def figures(self) -> Sequence[Figure]:
        """Return the changes as a table, and model B as a graph with its changes."""
        from amp_rewrite.reports.page.report_figures import changes_figure, marked_graph  # late: few runs draw

        vertices = [change.vertex for change in self.changes]
        table = changes_figure(self.summary(), self._rows(), self.settings, vertices)
        if self.report is None:
            return (table,)
        by_vertex: dict[int, list[Change]] = {}
        for change in self.changes:
            if change.vertex is not None:
                by_vertex.setdefault(change.vertex, []).append(change)
        added = (cast.place for cast in self.casts if cast.place is not None)
        return table, marked_graph(self.report, self.view, by_vertex, added)

    def summary(self) -> str:
        """Return one line, such as "2 lowered, 1 added, casts +3 -1" or "no difference"."""
        parts = [f"{number} {kind}" for kind, number in self.counts.items() if number and kind != "casts"]
        if self.casts:
            signs = Counter(cast.sign for cast in self.casts)
            parts.append("casts " + " ".join(f"{sign}{signs[sign]}" for sign in "+-" if signs[sign]))
        return ", ".join(parts) or "no difference"

    def to(self, form: str, fail_on: Collection[str] | None = None, *, verbose: bool = False) -> str:
        """Return the differences in one form.

        Args:
            form: "text", "json", "markdown" or "github".
            fail_on: as in `github`.
            verbose: as in `text`; the other forms always name each op.
        """
        if form == "text":
            return self.text(verbose=verbose)
        if form == "github":
            return self.github(fail_on)
        return {"json": self.to_json, "markdown": self.markdown}[form]()

    def text(self, *, verbose: bool = False) -> str:
        """Return the differences as text: a summary by type, or with `verbose` each op. Ends with a newline."""
        if not self.differs:
            return "no difference\n"
        notice = f"{self.a} and {self.b} are unrelated models: {self.alike} of {count(self.ops, 'op')} agree"
        if self.unrelated and not verbose:
            return plain(f"{notice}; --verbose compares them anyway") + "\n"
        lines = [plain(notice)] if self.unrelated else []
        lines += [self.summary(), *table([(f"{name}:", f"{a} → {b}") for name, a, b in self.settings])]
        return "\n".join([*lines, *(self._each() if verbose else self._by_type())]) + "\n"

    def _each(self) -> Iterator[str]:
        for kind, group in self._by_kind().items():
            yield from ("", kind)
            yield from table([(c.title, c.op, f"{c.types}  {c.variable}".rstrip(), c.why) for c in group])
        if self.casts:
            yield from ("", "casts")
            yield from table([(c.sign, c.scope + c.value, f"{c.before} → {c.after}", c.why) for c in self.casts])

    def _by_type(self) -> Iterator[str]:
        """Yield a table for each kind, with the number of equal changes by op type, the most frequent first."""
        groups = {
            kind: Counter(("", change.op, change.types, change.variable) for change in changes)
            for kind, changes in self._by_kind().items()
        }
        if self.casts:
            groups["casts"] = Counter((cast.sign, "", f"{cast.before} → {cast.after}", "") for cast in self.casts)
        for kind, counts in groups.items():
            ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
            rows = [(f"{sign}{n}", *filter(None, (op, types)), of) for (sign, op, types, of), n in ordered]
            yield from ("", kind, *table(rows[:_MAX_LINES], right=">"))
            if len(rows) > _MAX_LINES:
                yield f"  … and {count(len(rows) - _MAX_LINES, 'line')} more"
        yield from ("", "name each op with --verbose")

    def to_json(self) -> str:
        """Return everything as JSON, in a stable order. Ends with a newline."""
        document = {name: getattr(self, name) for name in ("a", "b", "alike", "ops", "unrelated", "differs")}
        document |= {"schema": 1, "counts": dict(self.counts)}
        document["changes"] = [_encoded(change, "vertex") for change in self.changes]
        document["casts"] = [_encoded(cast, "place") for cast in self.casts]
        document["settings"] = {name: [a, b] for name, a, b in self.settings}
        return json.dumps(document, indent=2, sort_keys=True, allow_nan=False) + "\n"

    def markdown(self) -> str:
        """Return Markdown for a comment on a pull request, with as many ops as fit. Ends with a newline."""
        lines = [f"**Precision: {self.summary()}**"]
        rows = [[cut(cell, _MAX_CELL) for cell in row] for row in self._rows()]
        if rows:
            drawn = markdown_table(("change", "op", "type", "dtype", "why"), rows)
            ends = accumulate(len(line.encode()) + 1 for line in drawn)  # the limit is in bytes
            pairs = enumerate(zip(drawn, ends, strict=True))
            fitting = [line for i, (line, end) in pairs if i < 2 or end <= _MAX_BYTES]  # the first two are the head
            lines += ["", *fitting]
            omitted = len(rows) - (len(lines) - 4)
            lines += ["", f"… and {omitted} more."] if omitted else []
        return "\n".join(lines) + "\n"

    def github(self, fail_on: Collection[str] | None = None) -> str:
        """Return annotations, one per difference: errors for failing kinds, warnings for others.

        Args:
            fail_on: as in `fails`; if empty, every kind fails; if None, no kind fails.
        """
        failing = () if fail_on is None else fail_on or KINDS
        marks: dict[str, list[tuple[str, str]]] = {"error": [], "warning": []}
        for c in self.changes:
            title, message = f"{c.kind}: {c.name}", f"{c.title} ({c.op}) {c.types} {c.why}".rstrip()
            marks["error" if _fails_on(c, failing) else "warning"].append((title, message))
        for cast in self.casts:
            message = f"{cast.before} → {cast.after} {cast.why}".rstrip()
            marks["error" if "casts" in failing else "warning"].append((f"cast {cast.sign} {cast.value}", message))
        lines = []
        for level, texts in marks.items():
            lines += [annotation(level, message, {"title": title}) for title, message in texts[:_MAX_ANNOTATIONS]]
            omitted = len(texts) - _MAX_ANNOTATIONS
            lines += [annotation(level, f"and {omitted} more", {})] if omitted > 0 else []
        return "".join(line + "\n" for line in lines) or annotation("notice", "no difference", {}) + "\n"

    def _rows(self) -> Iterator[tuple[str, str, str, str, str]]:
        yield from ((c.kind, c.title, c.op, c.types, c.why) for c in self.changes)
        yield from ((f"cast {c.sign}", c.scope + c.value, "Cast", f"{c.before} → {c.after}", c.why) for c in self.casts)

    def _by_kind(self) -> dict[str, list[Change]]:
        return {kind: list(group) for kind, group in groupby(self.changes, key=lambda change: change.kind)}


def _encoded(change: Change | CastChange, omit: str) -> dict[str, object]:
    encoded = asdict(change)
    del encoded[omit]
    return encoded


def _fails_on(change: Change, kinds: Collection[str]) -> bool:
    float32 = change.kind == "raised" or (change.kind == "added" and change.after == FLOAT32)
    return change.kind in kinds or (FLOAT32 in kinds and float32)
