"""Figure of a verdict: the score of each output in each batch, against what is allowed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from amp_rewrite.reports.page.axis import Axis, finite, number_text
from amp_rewrite.reports.page.bars import spot, upright
from amp_rewrite.reports.page.chart import Line, numbers, remarks, rows, sample
from amp_rewrite.reports.page.figure import Figure
from amp_rewrite.reports.page.markup import element, short

_OUTPUTS, _BATCHES = 40, 50
"""Outputs that are drawn, and batches of each; the worst ones of more."""


@dataclass(frozen=True, slots=True)
class Scored:
    """One output in one batch. `score` is None if something else decided, such as infinities; `because` says so."""

    output: str
    batch: int
    score: float | None
    scaled: float | None
    ok: bool
    because: str


@dataclass(frozen=True, slots=True)
class Allowed:
    """What decides: the criterion in words, the name of the score, its limit, and True if a higher score is better."""

    words: str
    score: str
    limit: float
    higher: bool


def outputs_figure(scores: Sequence[Scored], allowed: Allowed, verdict: str, notes: Sequence[str] = ()) -> Figure:
    """Return the scores of outputs as a figure.

    Args:
        scores: one for each output and batch.
        allowed: the criterion.
        verdict: the verdict in one line.
        notes: caveats.
    """
    by_output: dict[str, list[Scored]] = {}
    for score in scores:
        by_output.setdefault(score.output, []).append(score)
    for group in by_output.values():
        group.sort(key=lambda s: _badness(s, allowed), reverse=True)
    worst_first = sorted(by_output, key=lambda name: _badness(by_output[name][0], allowed), reverse=True)
    named = set(worst_first[:_OUTPUTS])
    chosen = {name: group[:_BATCHES] for name, group in by_output.items() if name in named}
    shown = [score for group in chosen.values() for score in group]
    axis = _axis(shown, allowed)
    lines = [Line(name, list(_marks(axis, group, allowed)), _number(group[0])) for name, group in chosen.items()]
    lead = _lead(scores, shown, verdict)
    legend = [
        sample("low", "a batch that passes", "dot"),
        sample("hollow", "a batch that fails", "dot"),
        *([sample("tolerance", f"allowed: {allowed.limit:g}", "line")] if math.isfinite(allowed.limit) else []),
    ]
    head = ("output", "decides", "batch", "score", "error of the largest value")
    cells = (
        (s.output, "ok" if s.ok else s.because, str(s.batch), number_text(s.score), _text(s.scaled)) for s in shown
    )
    drawing = element(
        "div", rows(axis, lines, name=lead, legend=legend), *remarks(notes), numbers(head, cells, right=3)
    )
    drawn: dict[str, object] = {
        "criterion": allowed.words,
        "limit": finite(allowed.limit),
        "higher": allowed.higher,
        "rows": [
            {"output": s.output, "batch": s.batch, "score": finite(s.score), "scaled": finite(s.scaled), "ok": s.ok}
            for s in shown
        ],
        "compared": len(scores),
        "verdict": verdict,
        "notes": list(notes),
    }
    return Figure("outputs", "Outputs against the tolerance", lead, drawing, drawn, notebook=True)


def _badness(score: Scored, allowed: Allowed) -> tuple[bool, float]:
    """Return a key by which worse batches are larger."""
    if score.score is None or math.isnan(score.score):
        return not score.ok, -math.inf if score.ok else math.inf
    return not score.ok, -score.score if allowed.higher else score.score


def _axis(shown: Sequence[Scored], allowed: Allowed) -> Axis:
    sizes = [score.score for score in shown]
    if allowed.higher:
        return Axis.linear(f"{allowed.score}, higher is better", [*sizes, allowed.limit])
    least = allowed.limit * 1e-6 if allowed.limit else 0.0  # exact zeros and dust stand at the left end
    return Axis.logarithmic(
        allowed.score, [allowed.limit, 3 * allowed.limit, *(s for s in sizes if s is not None and s > least)]
    )


def _marks(axis: Axis, group: Sequence[Scored], allowed: Allowed) -> Iterator[Element]:
    yield from upright(axis, allowed.limit, "tolerance")
    for score in reversed(group):  # the worst is in front
        number = math.inf if score.score is None and not score.ok else score.score
        if number is not None and not math.isfinite(number):
            number = -math.inf if allowed.higher else math.inf
        words = f"batch {score.batch}: {number_text(score.score)}{'' if score.ok else ', ' + score.because}"
        yield from spot(axis, number, "low" if score.ok else "hollow", words)


def _number(worst: Scored) -> str:
    if worst.score is None:
        return "equal" if worst.ok else "fails"
    return f"{'' if worst.ok else '✗ '}{number_text(worst.score)}"


def _text(number: float | None) -> str:
    return number_text(number)


def _lead(scores: Sequence[Scored], shown: Sequence[Scored], verdict: str) -> str:
    if not scores:
        return f"Nothing was compared. {short(verdict)}."
    failed = sum(not score.ok for score in scores)
    words = f"Each dot is one output in one batch; {failed} of {len(scores)} failed. Verdict: {short(verdict)}."
    if len(shown) < len(scores):
        words += f" The {len(shown)} worst are drawn: {_BATCHES} batches of {_OUTPUTS} outputs at most."
    return words
