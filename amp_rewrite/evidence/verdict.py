"""Result of a comparison of two models: the verdict, its reason and its numbers, as data, text and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from amp_rewrite.reports.evidence import ALLCLOSE, Criterion, Difference, OutputRow
from amp_rewrite.reports.json_records import line_by_line
from amp_rewrite.reports.render import count, table
from amp_rewrite.reports.result import Result

if TYPE_CHECKING:
    from amp_rewrite.evidence.data.feed import Feed
    from amp_rewrite.reports.page.page import Figure

SCHEMA = 1

_STEPS = 100
"""Steps to start with."""
_ROUNDED = 0.16
"""Largest error of an output that roundings of bfloat16 explain: twice the tolerance to start with."""


@dataclass(frozen=True, slots=True)
class ModelRun:
    """A model by name, and how it ran: "float32 on CPUExecutionProvider"."""

    model: str
    as_: str

    def __str__(self) -> str:
        return f"{self.model}: {self.as_}"


@dataclass(frozen=True, slots=True)
class FedData:
    """The data of both models."""

    origin: str
    random: bool
    batches: int

    @classmethod
    def of(cls, feed: Feed, rows: Iterable[OutputRow]) -> FedData:
        """Return the data of a feed, as far as rows judge it."""
        return cls(feed.origin, feed.random, len({row.batch for row in rows}))

    def __str__(self) -> str:
        return f"{self.origin}: {count(self.batches, 'batch', 'batches')}"


@dataclass(frozen=True, repr=False)
class Verdict(Result):
    """Verdict on a candidate's outputs against a reference's, with its reason.

    It is `ok` only if every row is, every output has at least one compared value, and there are no `refusals`.

    Attributes:
        reference: how the reference ran.
        candidate: how the candidate ran.
        fed: the data.
        criterion: tolerance or measure.
        rows: one per output and run: a batch, or with feedback a step on it.
        refusals: differences in names and number of outputs.
        notes: caveats, for example that the data were random.
        states: words of `feedback` for outputs that look like states and were not fed back.
    """

    reference: ModelRun
    candidate: ModelRun
    fed: FedData
    criterion: Criterion
    rows: tuple[OutputRow, ...]
    refusals: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    states: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if the candidate passes."""
        return not self._objections

    def __bool__(self) -> bool:
        return self.ok

    @property
    def because(self) -> str:
        """Return the reason in one line: the first objection and the number of others, or the compared values."""
        objections = self._objections
        if objections:
            more = f" ({count(len(objections) - 1, 'more failure')})" if len(objections) > 1 else ""
            return objections[0] + more
        values = sum(row.difference.compared for row in self.rows)
        where = f"{count(len(self.outputs), 'output')} and {count(self.fed.batches, 'batch', 'batches')}"
        return f"{count(values, 'value')} compared in {where}"

    @property
    def brief(self) -> str:
        """Verdict and reason."""
        return f"{'ok' if self.ok else 'failed'}: {self.because}"

    def figures(self) -> Sequence[Figure]:
        """Return the scores of the outputs, against the limit."""
        from amp_rewrite.reports.page.measured_figures import outputs_figure  # late: few runs draw

        return (outputs_figure(self.rows, self.criterion, self.brief, self._remarks),)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the compared outputs, in the reference's order."""
        return tuple(dict.fromkeys(row.output for row in self.rows))

    @property
    def worst(self) -> tuple[OutputRow, ...]:
        """Return the worst row of each output: by score, unless something else decided."""
        rows = [[row for row in self.rows if row.output == output] for output in self.outputs]
        return tuple(max(found, key=lambda row: _badness(self.criterion, row.difference)) for found in rows)

    @property
    def largest(self) -> float | None:
        """Return the largest error relative to the largest value of its output; None without finite values."""
        return max((r.difference.scaled for r in self.rows if r.difference.scaled is not None), default=None)

    @property
    def score(self) -> float | None:
        """Worst score of an output in a batch; None without a score."""
        scores = [row.difference.score for row in self.rows if row.difference.score is not None]
        return (min(scores) if self.criterion.higher else max(scores)) if scores else None

    @property
    def reached(self) -> str:
        """Tolerance of a failed candidate to pass with, if errors alone fail; "" for other criteria."""
        failed = [row.difference.score for row in self.rows if not row.difference.ok]
        largest = self.largest or math.inf
        if not failed or None in failed or largest > _ROUNDED or self.criterion.name not in (ALLCLOSE, "scaled"):
            return ""
        step = 10.0 ** math.floor(math.log10(largest))
        passing = f"{math.ceil(largest / step) * step:g}"
        return f"the largest error is {largest:.2g}, so it passes with a tolerance of {passing}"

    @property
    def _remarks(self) -> tuple[str, ...]:
        if self.ok or self.refusals:
            return self.notes
        return (
            *self.notes,
            *filter(None, [self.reached]),
            "`amp-rewrite locate` names the op that the error comes from",
        )

    @property
    def _objections(self) -> tuple[str, ...]:
        if self.refusals:
            return self.refusals
        if not self.rows:
            return ("nothing was compared: there was no batch, or no output",)
        failures = [
            f"output {r.label!r}, batch {r.place}: {r.difference.because}" for r in self.rows if not r.difference.ok
        ]
        filled = {row.output for row in self.rows if row.difference.compared or not row.difference.ok}
        empty = [
            f"output {output!r}: in no batch was there a value to compare; feed data that gives some"
            for output in self.outputs
            if output not in filled
        ]
        return (*failures, *empty)

    def text(self, *, verbose: bool = False, command: str = "") -> str:
        """Return a text: how both ran, a table of the worst batch per output (`verbose`: of all), the verdict.

        `command`: the next one to run.
        """
        facts = (
            ("reference", str(self.reference)),
            ("candidate", str(self.candidate)),
            ("data", str(self.fed)),
            ("passes if", str(self.criterion)),
        )
        lines = [f"{self.candidate.model} against {self.reference.model}", *table(facts)]
        if self.rows:
            shown = [i for i, name in enumerate(_HEAD) if name != "score" or self.criterion.name != "scaled"]
            cells = map(_cells, self.rows if verbose else self.worst)
            head, right = [_HEAD[i] for i in shown], " >>>>"[: len(shown) - 4]
            lines += ["", *table([[row[i] for i in shown] for row in cells], head=head, right=right)]
        lines += ["", self.brief]
        lines += [f"note: {note}" for note in self._remarks]
        lines += [f"next: {command}"] if command else []
        return "\n".join(lines) + "\n"

    @property
    def advised(self) -> tuple[str, ...]:
        """Options of the command line to feed the states back."""
        words = [word for text in self.states for word in ("--feedback", text)]
        return (*words, "--steps", str(_STEPS)) if words and self.fed.batches == 1 else tuple(words)

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
            "limit": self.criterion.limit,
            "higher": self.criterion.higher,
            "notes": self.notes,
        }
        return json_of(head, worst=map(_encoded, self.worst), rows=map(_encoded, self.rows))


def json_of(head: Mapping[str, object], **lists: Iterable[object]) -> str:
    """Return JSON with one field, and one item of each list, per line; infinities and NaN are text."""
    encoded = {name: map(_json, items) for name, items in lists.items()}
    return line_by_line({name: _json(value) for name, value in head.items()}, encoded)


def _badness(by: Criterion, found: Difference) -> tuple[int, bool, float]:
    """Return the place of a difference in an order from best to worst: equal by nature, by score, refused."""
    if found.score is None:
        return (0 if found.ok else 2), False, 0.0
    score = math.inf if math.isnan(found.score) else -found.score if by.higher else found.score
    return 1, not found.ok, score


_HEAD = ("output", "batch", "max abs", "scaled", "score", "at", "reference", "candidate", "")


def _cells(row: OutputRow) -> tuple[str, ...]:
    difference = row.difference
    where = "-" if difference.where is None else str(list(difference.where))
    scores = (difference.max_abs, difference.scaled, difference.score)
    numbers = ("-" if score is None else f"{score:.3g}" for score in scores)
    values = (_short(difference.reference), _short(difference.candidate))
    return row.label, row.place, *numbers, where, *values, "" if difference.ok else difference.because


def _short(value: str) -> str:
    try:
        return f"{float(value):.5g}" if not value.lstrip("-").isdigit() else value
    except ValueError:
        return value or "-"


def _encoded(row: OutputRow) -> dict[str, object]:
    step = {} if row.step is None else {"step": row.step}
    return {"output": row.label, "batch": row.batch, **step, **asdict(row.difference)}


def _json(value: object) -> str:
    return json.dumps(plain_json(value), allow_nan=False)


def plain_json(value: object) -> object:
    """Return a value with infinities and NaN as text, in dictionaries, too."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: plain_json(item) for key, item in value.items()}
    return value
