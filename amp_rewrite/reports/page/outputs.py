"""Figure of scores against the tolerance: of each output in a verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from amp_rewrite.reports.evidence import Difference, OutputRow
from amp_rewrite.reports.page.chart import (
    Axis,
    Line,
    finite,
    number_text,
    numbers,
    remarks,
    rows,
    sample,
    spot,
    upright,
)
from amp_rewrite.reports.page.markup import element, short
from amp_rewrite.reports.page.page import Figure

_OUTPUTS, _BATCHES = 40, 50
"""Outputs that are drawn, and batches of each; the worst ones of more."""


@dataclass(frozen=True, slots=True)
class CriterionLine:
    """The criterion in words, the name of its score, the limit, and True if a higher score is better."""

    words: str
    score: str
    limit: float
    higher: bool


def outputs_figure(
    compared: Sequence[OutputRow], allowed: CriterionLine, verdict: str, notes: Sequence[str] = ()
) -> Figure:
    """Return the scores of outputs as a figure."""
    by_output: dict[str, list[OutputRow]] = {row.label: [] for row in compared}
    for row in sorted(compared, key=lambda row: _badness(row.difference, allowed), reverse=True):
        by_output[row.label].append(row)
    worst_first = sorted(by_output, key=lambda name: _badness(by_output[name][0].difference, allowed), reverse=True)
    named = set(worst_first[:_OUTPUTS])
    chosen = {name: group[:_BATCHES] for name, group in by_output.items() if name in named}
    shown = [(row, row.difference) for group in chosen.values() for row in group]
    axis = _axis([difference.score for _, difference in shown], allowed)
    lines = []
    for name, group in chosen.items():
        worst = group[0].difference
        number = f"{'' if worst.ok else '✗ '}{number_text(worst.score)}"
        number = number if worst.score is not None else "equal" if worst.ok else "fails"
        lines.append(Line(name, list(_marks(axis, group, allowed)), number))
    lead = _lead(compared, len(shown), verdict)
    legend = [
        sample("low", "a batch that passes", "dot"),
        sample("hollow", "a batch that fails", "dot"),
        *([sample("tolerance", f"allowed: {allowed.limit:g}", "line")] if math.isfinite(allowed.limit) else []),
    ]
    head = ("output", "decides", "batch", "score", "error of the largest value")
    cells = (
        (row.label, "ok" if d.ok else d.because, row.place, *map(number_text, (d.score, d.scaled))) for row, d in shown
    )
    chart = [rows(axis, lines, name=lead, legend=legend)] if len(shown) > 1 else []  # one point is not a chart
    drawing = element("div", *chart, *remarks(notes), numbers(head, cells, right=3))
    drawn: dict[str, object] = {
        "criterion": allowed.words,
        "limit": finite(allowed.limit),
        "higher": allowed.higher,
        "rows": [
            {"output": row.label, "batch": row.batch, "score": finite(d.score), "scaled": finite(d.scaled), "ok": d.ok}
            for row, d in shown
        ],
        "compared": len(compared),
        "verdict": verdict,
        "notes": list(notes),
    }
    return Figure("outputs", "Outputs against the tolerance", lead, drawing, drawn)


def _badness(difference: Difference, allowed: CriterionLine) -> tuple[bool, float]:
    score, ok = difference.score, difference.ok
    if score is None or math.isnan(score):
        return not ok, -math.inf if ok else math.inf
    return not ok, -score if allowed.higher else score


def _axis(sizes: Sequence[float | None], allowed: CriterionLine) -> Axis:
    """Return the axis of scores; exact zeros and dust stand at the left end, not to squeeze the others."""
    if allowed.higher:
        return Axis.linear(f"{allowed.score}, higher is better", [*sizes, allowed.limit])
    least = allowed.limit * 1e-6 if allowed.limit else 0.0
    above = (size for size in sizes if size is not None and size > least)
    return Axis.logarithmic(allowed.score, [allowed.limit, 3 * allowed.limit, *above])


def _marks(axis: Axis, group: Sequence[OutputRow], allowed: CriterionLine) -> Iterator[Element]:
    yield from upright(axis, allowed.limit, "tolerance")
    for row in reversed(group):  # the worst is in front
        score, ok = row.difference.score, row.difference.ok
        number = math.inf if score is None and not ok else score
        if number is not None and not math.isfinite(number):
            number = -math.inf if allowed.higher else math.inf
        words = f"batch {row.place}: {number_text(score)}{'' if ok else ', ' + row.difference.because}"
        yield from spot(axis, number, "low" if ok else "hollow", words)


def _lead(compared: Sequence[OutputRow], shown: int, verdict: str) -> str:
    if not compared:
        return f"Nothing was compared. {short(verdict)}."
    failed = sum(not row.difference.ok for row in compared)
    dots = "Each dot is one output in one batch; " if len(compared) > 1 else ""
    words = f"{dots}{failed} of {len(compared)} failed. Verdict: {short(verdict)}."
    if shown < len(compared):
        words += f" The {shown} worst are drawn: {_BATCHES} batches of {_OUTPUTS} outputs at most."
    return words
