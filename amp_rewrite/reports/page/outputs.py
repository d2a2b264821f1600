"""Figures of scores against what is allowed: of each output in a verdict, and of each trial of a repair."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from amp_rewrite.errors import count
from amp_rewrite.reports.measurements import Difference, OutputRow, TrialRow
from amp_rewrite.reports.page.axis import Axis, finite, number_text, record
from amp_rewrite.reports.page.chart import Line, numbers, plot, remarks, rows, sample
from amp_rewrite.reports.page.marks import dots, limit, spot, upright
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
        (row.label, "ok" if d.ok else d.because, str(row.batch), *map(number_text, (d.score, d.scaled)))
        for row, d in shown
    )
    chart = rows(axis, lines, name=lead, legend=legend)
    drawing = element("div", chart, *remarks(notes), numbers(head, cells, right=3))
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
    return Figure("outputs", "Outputs against the tolerance", lead, drawing, drawn, notebook=True)


def _badness(difference: Difference, allowed: CriterionLine) -> tuple[bool, float]:
    """Return a key by which worse batches are larger."""
    score, ok = difference.score, difference.ok
    if score is None or math.isnan(score):
        return not ok, -math.inf if ok else math.inf
    return not ok, -score if allowed.higher else score


def _axis(sizes: Sequence[float | None], allowed: CriterionLine, prefix: str = "") -> Axis:
    """Return the axis of scores; exact zeros and dust stand at the left end, not to squeeze the others."""
    if allowed.higher:
        return Axis.linear(f"{prefix}{allowed.score}, higher is better", [*sizes, allowed.limit])
    least = allowed.limit * 1e-6 if allowed.limit else 0.0
    above = (size for size in sizes if size is not None and size > least)
    return Axis.logarithmic(f"{prefix}{allowed.score}", [allowed.limit, 3 * allowed.limit, *above])


def _marks(axis: Axis, group: Sequence[OutputRow], allowed: CriterionLine) -> Iterator[Element]:
    yield from upright(axis, allowed.limit, "tolerance")
    for row in reversed(group):  # the worst is in front
        score, ok = row.difference.score, row.difference.ok
        number = math.inf if score is None and not ok else score
        if number is not None and not math.isfinite(number):
            number = -math.inf if allowed.higher else math.inf
        words = f"batch {row.batch}: {number_text(score)}{'' if ok else ', ' + row.difference.because}"
        yield from spot(axis, number, "low" if ok else "hollow", words)


def _lead(compared: Sequence[OutputRow], shown: int, verdict: str) -> str:
    if not compared:
        return f"Nothing was compared. {short(verdict)}."
    failed = sum(not row.difference.ok for row in compared)
    words = f"Each dot is one output in one batch; {failed} of {len(compared)} failed. Verdict: {short(verdict)}."
    if shown < len(compared):
        words += f" The {shown} worst are drawn: {_BATCHES} batches of {_OUTPUTS} outputs at most."
    return words


# -- a repair ------------------------------------------------------------------------------------------


def trials_figure(trials: Sequence[TrialRow], chosen: TrialRow, allowed: CriterionLine, *, solved: bool) -> Figure:
    """Return the trials of a repair as a figure.

    Args:
        trials: in the order of the search.
        chosen: the conversion that was made, as it really runs.
        allowed: the criterion.
        solved: True if the conversion is near enough and the search ended.
    """
    points = [*trials, chosen]
    ops = [point.float32_ops for point in points]
    x = Axis.linear("ops in float32", [max(min(ops) - 1, 0), max(ops) + 1], whole=True)
    y = _axis([point.score for point in points], allowed, "worst ")
    marks = limit(y, allowed.limit, f"allowed {allowed.limit:g}")
    for passes, kind in ((False, "hollow"), (True, "low")):
        marks += dots(x, y, ((t.float32_ops, _place(t, allowed), _tried(t)) for t in trials if t.ok is passes), kind)
    marks += dots(x, y, [(chosen.float32_ops, _place(chosen, allowed), f"chosen: {_tried(chosen)}")], "ring")
    outcome = "passes" if solved else "does not pass, or the search did not end"
    result = f"the conversion with {count(chosen.float32_ops, 'op')} in float32 {outcome} ({number_text(chosen.score)})"
    lead = f"{count(len(trials), 'trial')} of which ops stay float32; {result}. Passes if {allowed.words}."
    legend = [
        sample("low", "trial that passes", "dot"),
        sample("hollow", "trial that fails", "dot"),
        sample("ring", "the conversion that was made", "dot"),
    ]
    head = ("trial", "outcome", "pinned regions", "float32 ops", "score")
    cells = [_cells(str(i), trial) for i, trial in enumerate(trials, 1)]
    table = numbers(head, [*cells, _cells("chosen", chosen)], right=3)
    drawing = element("div", plot(x, y, marks, name=lead, legend=legend), table)
    drawn: dict[str, object] = {
        "criterion": allowed.words,
        "limit": finite(allowed.limit),
        "higher": allowed.higher,
        "solved": solved,
        "trials": [record(trial) for trial in trials],
        "chosen": record(chosen),
    }
    return Figure("repair", "Repair", lead, drawing, drawn, notebook=True)


def _place(trial: TrialRow, allowed: CriterionLine) -> float:
    if trial.score is not None and math.isfinite(trial.score):
        return trial.score
    return math.inf if trial.ok is allowed.higher else -math.inf


def _tried(trial: TrialRow) -> str:
    pinned = count(trial.pinned, "region")
    return f"{pinned} pinned, {count(trial.float32_ops, 'float32 op')}: {number_text(trial.score)}"


def _cells(name: str, trial: TrialRow) -> tuple[str, ...]:
    outcome = "passes" if trial.ok else "fails"
    return name, outcome, str(trial.pinned), str(trial.float32_ops), number_text(trial.score)
