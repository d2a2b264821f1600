"""Differences between two models, as data, text, JSON, Markdown, annotations and figures."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from amp_rewrite.errors import PolicyError, advice
from amp_rewrite.reports.render import annotation, count, cut, markdown_table, plain, table
from amp_rewrite.reports.result import Result
from amp_rewrite.reports.rows import CastChange, Change, Marked

if TYPE_CHECKING:
    from amp_rewrite.reports.page.page import Figure

KINDS = ("lowered", "raised", "retyped", "attribute", "added", "removed", "casts")
FLOAT32 = "float32"
"""The word of a check for ops that are float32 in B alone: raised, or added in float32."""
_MARKDOWN_ROWS = 200
_MARKDOWN_LIMIT = 60_000  # a comment on GitHub holds 65536 characters
_MARKDOWN_CELL = 200
_MARKDOWN_HEAD = ("change", "op", "type", "dtype", "why")
_HEAD_LINES = 2
_UNSUMMED = 20
"""Differences that need no sums by type above their table."""
_ANNOTATIONS = 9  # GitHub shows ten of one level per step; the tenth counts the rest
_SHOWN = 8
"""Lines of the summary per kind of difference."""


@dataclass(frozen=True, slots=True, repr=False)
class Delta(Result):
    """Differences of B from A. `settings` explain them, but do not count as differences.

    Attributes:
        a: name of A.
        b: name of B.
        changes: ops that differ, by kind.
        casts: Casts that differ.
        settings: name, value in A, value in B; they explain differences, but do not count as such.
        alike: number of ops that compute the same from the same ops.
        ops: number of ops of the larger model.
        unrelated: True if so few are alike that these are two models, not two versions of one.
        marked: model B with its changes, for a page; None for a difference that was made by hand.
    """

    a: str
    b: str
    changes: tuple[Change, ...] = ()
    casts: tuple[CastChange, ...] = ()
    settings: tuple[tuple[str, str, str], ...] = ()
    alike: int = field(default=0, compare=False)
    ops: int = field(default=0, compare=False)
    unrelated: bool = field(default=False, compare=False)
    marked: Marked | None = field(default=None, compare=False)

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
            kinds: kinds of differences; "float32" stands for ops that are raised, or added in float32.

        Raises:
            PolicyError: a kind is unknown.
        """
        known = (*KINDS, FLOAT32)
        for kind in kinds:
            if kind not in known:
                hint = advice(kind, known, f"use some of {', '.join(known)}")
                raise PolicyError(f"unknown kind of difference {kind!r}; {hint}")
        wanted = kinds or KINDS
        return any(_fails_on(change, wanted) for change in self.changes) or ("casts" in wanted and bool(self.casts))

    def figures(self) -> Sequence[Figure]:
        """Return the changes as a table, and model B as a graph with its changes."""
        from amp_rewrite.reports.page.report_figures import changes_figure, marked_graph  # late: few runs draw

        graphs = () if self.marked is None else (marked_graph(self.marked, self.changes, self.b),)
        vertices = () if self.marked is None else self.marked.vertices
        return (changes_figure(list(self._rows()), self.counts, self.settings, vertices), *graphs)

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
            return f"{self._strangers()}; --verbose compares them anyway\n"
        lines = [self._strangers()] if self.unrelated else []
        lines += [self.summary(), *table([(f"{name}:", f"{a} → {b}") for name, a, b in self.settings])]
        if verbose is False:
            return "\n".join([*lines, *self._by_type()]) + "\n"
        for kind, group in self._by_kind().items():
            lines += ["", kind, *table([(c.title, c.op, f"{c.types}  {c.variable}".rstrip(), c.why) for c in group])]
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
        document = asdict(replace(self, marked=None)) | {"schema": 1, "counts": dict(self.counts)}
        del document["marked"]
        document["differs"] = self.differs
        document["settings"] = {name: [a, b] for name, a, b in self.settings}
        return json.dumps(document, indent=2, sort_keys=True, allow_nan=False) + "\n"

    def markdown(self) -> str:
        """Return a section for a comment on a pull request: sums by type, and each op. Ends with a newline."""
        lines = [f"**Precision: {self.summary()}**"]
        rows = list(self._rows())
        if len(rows) > _UNSUMMED:
            sums = Counter((kind, op, types) for kind, _, op, types, _ in rows).most_common(_SHOWN)
            cells = [[cut(cell, _MARKDOWN_CELL) for cell in (str(number), *key)] for key, number in sums]
            lines += ["", *markdown_table(("number", "change", "type", "dtype"), cells)]
        head, *body = [[cut(cell, _MARKDOWN_CELL) for cell in row] for row in (_MARKDOWN_HEAD, *rows[:_MARKDOWN_ROWS])]
        kept = _fitting(markdown_table(head, body), _MARKDOWN_LIMIT - sum(len(line) + 1 for line in lines))
        if rows:
            lines += ["", *kept]
        if len(rows) > (shown := len(kept) - 2):
            lines += ["", f"… and {len(rows) - shown} more."]
        return "\n".join(lines) + "\n"

    def github(self, fail_on: Collection[str] | None = None) -> str:
        """Return annotations, one per difference: errors for failing kinds, warnings for others.

        Args:
            fail_on: as in `fails`: empty means every kind; None means that no kind fails.
        """
        lines: list[str] = []
        for kind, group in self._by_kind().items():
            errors = [c for c in group if fail_on is not None and _fails_on(c, fail_on or KINDS)]
            for level, some in (("error", errors), ("warning", [c for c in group if c not in errors])):
                texts = [(f"{kind}: {c.name}", f"{c.title} ({c.op}) {c.types} {c.why}".rstrip()) for c in some]
                lines += _annotations(level, kind, texts)
        texts = [(f"cast {c.sign} {c.value}", f"{c.before} → {c.after} {c.why}".rstrip()) for c in self.casts]
        failed = fail_on is not None and (not fail_on or "casts" in fail_on)
        lines += _annotations("error" if failed else "warning", "casts", texts)
        return "".join(line + "\n" for line in lines) or annotation("notice", "no difference", {}) + "\n"

    def _rows(self) -> Iterator[tuple[str, str, str, str, str]]:
        for group in self._by_kind().values():
            yield from ((c.kind, c.title, c.op, c.types, c.why) for c in group)
        yield from ((f"cast {c.sign}", c.scope + c.value, "Cast", f"{c.before} → {c.after}", c.why) for c in self.casts)

    def _by_kind(self) -> dict[str, list[Change]]:
        groups = {kind: [change for change in self.changes if change.kind == kind] for kind in KINDS}
        return {kind: group for kind, group in groups.items() if group}


def _fitting(lines: Sequence[str], room: int) -> list[str]:
    """Return the head of a Markdown table and as many of its lines as have room, in bytes."""
    ends = accumulate(len(line.encode()) + 1 for line in lines)
    return [line for i, (line, end) in enumerate(zip(lines, ends, strict=True)) if i < _HEAD_LINES or end <= room]


def _fails_on(change: Change, kinds: Collection[str]) -> bool:
    float32 = change.kind == "raised" or (change.kind == "added" and change.after == FLOAT32)
    return change.kind in kinds or (FLOAT32 in kinds and float32)


def _annotations(level: str, kind: str, texts: list[tuple[str, str]]) -> Iterator[str]:
    for title, message in texts[:_ANNOTATIONS]:
        yield annotation(level, message, {"title": title})
    if len(texts) > _ANNOTATIONS:
        yield annotation(level, f"and {len(texts) - _ANNOTATIONS} more {kind}", {"title": kind})
