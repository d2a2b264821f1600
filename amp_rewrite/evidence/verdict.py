"""Result of a comparison of two models: the verdict, its reason and its numbers, as data, text and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from amp_rewrite.evidence.metric import Criterion, Difference, worse
from amp_rewrite.reports.render import count, table

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Ran:
    """A model by name, and how it ran: "float32 on CPUExecutionProvider"."""

    model: str
    as_: str


@dataclass(frozen=True, slots=True)
class Row:
    """One output in one batch. For one tensor of a sequence, `part` is "[0]", "[1]" …"""

    output: str
    batch: int
    difference: Difference
    part: str = ""

    @property
    def label(self) -> str:
        """Return the name of the compared tensor: "y", "y[0]"."""
        return self.output + self.part


@dataclass(frozen=True, slots=True)
class Fed:
    """The data of both models."""

    origin: str
    random: bool
    batches: int


@dataclass(frozen=True)
class Verdict:
    """Verdict on a candidate's outputs against a reference's, with its reason.

    `ok` only if every row is ok, every output has at least one compared value, and `refusals` (differences in names and
    number of outputs) is empty. `notes` are caveats, for example that the data were random.
    """

    reference: Ran
    candidate: Ran
    fed: Fed
    criterion: Criterion
    rows: tuple[Row, ...]
    refusals: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if the candidate passes."""
        return not self._objections

    @property
    def because(self) -> str:
        """Return the reason in one line: the first objection and the number of others, or the compared values."""
        objections = self._objections
        if objections:
            more = f" (and {count(len(objections) - 1, 'more objection')})" if len(objections) > 1 else ""
            return objections[0] + more
        values = sum(row.difference.compared for row in self.rows)
        where = f"{count(len(self.outputs), 'output')} and {count(self.fed.batches, 'batch', 'batches')}"
        return f"{count(values, 'value')} compared in {where}"

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the compared outputs, in the reference's order."""
        return tuple(dict.fromkeys(row.output for row in self.rows))

    @property
    def worst(self) -> tuple[Row, ...]:
        """Return the worst row of each output or part: by score, unless something else decided."""
        found: dict[str, Row] = {}
        for row in self.rows:
            known = found.get(row.label)
            if known is None or _worse(self.criterion, row.difference, known.difference):
                found[row.label] = row
        return tuple(found.values())

    @property
    def _objections(self) -> tuple[str, ...]:
        if self.refusals:
            return self.refusals
        if not self.rows:
            return ("nothing was compared: there was no batch, or no output",)
        return (*self._failures(), *self._empty())

    def _failures(self) -> Iterable[str]:
        for row in self.rows:
            if not row.difference.ok:
                yield f"output {row.label!r}, batch {row.batch}: {row.difference.because}"

    def _empty(self) -> Iterable[str]:
        filled = {row.output for row in self.rows if row.difference.compared or not row.difference.ok}
        for output in self.outputs:
            if output not in filled:
                yield f"output {output!r}: in no batch was there a value to compare; feed data that gives some"

    def text(self, *, verbose: bool = False) -> str:
        """Return a text: how both ran, a table of the worst batch per output (`verbose`: all batches), the verdict."""
        lines = [
            f"{self.candidate.model} against {self.reference.model}",
            *table(self._facts()),
        ]
        rows = self.rows if verbose else self.worst
        if rows:
            lines += ["", *table(map(_cells, rows), head=_HEAD, right=" >>>>>")]
        lines += ["", f"{'ok' if self.ok else 'failed'}: {self.because}"]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)]) + "\n"

    def _facts(self) -> Sequence[tuple[str, str]]:
        batches = count(self.fed.batches, "batch", "batches")
        return (
            ("reference", f"{self.reference.model}: {self.reference.as_}"),
            ("candidate", f"{self.candidate.model}: {self.candidate.as_}"),
            ("data", f"{self.fed.origin}: {batches}"),
            ("passes if", str(self.criterion)),
        )

    def to_json(self) -> str:
        """Return JSON, one row per line; infinities and NaN are "inf", "-inf" and "nan". It ends with a newline.

        `docs/reference/verify.md` describes the fields. Equal verdicts give equal text.
        """
        head = {
            "schema": SCHEMA,
            "ok": self.ok,
            "because": self.because,
            "reference": {"model": self.reference.model, "ran": self.reference.as_},
            "candidate": {"model": self.candidate.model, "ran": self.candidate.as_},
            "data": asdict(self.fed),
            "criterion": str(self.criterion),
            "notes": list(self.notes),
        }
        lines = [f"  {json.dumps(name)}: {_json(value)}" for name, value in head.items()]
        for name, rows in (("worst", self.worst), ("rows", self.rows)):
            listed = ",\n".join(f"    {_json(_encoded(row))}" for row in rows)
            lines.append(f'  "{name}": [\n{listed}\n  ]' if listed else f'  "{name}": []')
        return "{\n" + ",\n".join(lines) + "\n}\n"


def _worse(by: Criterion, first: Difference, second: Difference) -> bool:
    if (first.score is None) != (second.score is None):
        unscored = first if first.score is None else second
        return (unscored is first) != unscored.ok  # equal by nature is best, refused is worst
    if first.score is None or second.score is None:
        return second.ok and not first.ok
    if first.ok != second.ok:
        return second.ok
    return worse(by, first.score, second.score)


_HEAD = ("output", "batch", "max abs", "max rel", "scaled", "score", "at", "reference", "candidate", "")


def _cells(row: Row) -> tuple[str, ...]:
    found = row.difference
    where = str(list(found.where)) if found.where is not None else "-"
    numbers = (_number(n) for n in (found.max_abs, found.max_rel, found.scaled, found.score))
    said = "" if found.ok else found.because
    return row.label, str(row.batch), *numbers, where, found.reference or "-", found.candidate or "-", said


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _encoded(row: Row) -> dict[str, object]:
    return {"output": row.label, "batch": row.batch, **asdict(row.difference)}


def _json(value: object) -> str:
    return json.dumps(_plain(value), allow_nan=False)


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
