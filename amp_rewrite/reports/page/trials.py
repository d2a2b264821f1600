"""Figure of a repair: the error of each trial against the number of float32 ops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from amp_rewrite.errors import count
from amp_rewrite.reports.page.axis import Axis, finite, number_text
from amp_rewrite.reports.page.chart import numbers, plot, sample
from amp_rewrite.reports.page.figure import Figure
from amp_rewrite.reports.page.marks import dots, limit
from amp_rewrite.reports.page.markup import element
from amp_rewrite.reports.page.outputs import Allowed


@dataclass(frozen=True, slots=True)
class Tried:
    """One trial: pinned regions, float32 ops, the worst score (None without one), and if it passes."""

    pinned: int
    float32_ops: int
    score: float | None
    ok: bool


def trials_figure(trials: Sequence[Tried], chosen: Tried, allowed: Allowed, *, solved: bool) -> Figure:
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
    sizes = [point.score for point in points]
    y = _axis(sizes, allowed)
    marks = limit(y, allowed.limit, f"allowed {allowed.limit:g}")
    for passes, kind in ((False, "hollow"), (True, "low")):
        marks += dots(x, y, ((t.float32_ops, _height(t, allowed), _words(t)) for t in trials if t.ok is passes), kind)
    marks += dots(x, y, [(chosen.float32_ops, _height(chosen, allowed), f"chosen: {_words(chosen)}")], "ring")
    lead = _lead(trials, chosen, allowed, solved=solved)
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
        "trials": [_row(trial) for trial in trials],
        "chosen": _row(chosen),
    }
    return Figure("repair", "Repair", lead, drawing, drawn, notebook=True)


def _axis(sizes: Sequence[float | None], allowed: Allowed) -> Axis:
    if allowed.higher:
        return Axis.linear(f"worst {allowed.score}, higher is better", [*sizes, allowed.limit])
    least = allowed.limit * 1e-6 if allowed.limit else 0.0
    return Axis.logarithmic(
        f"worst {allowed.score}", [allowed.limit, 3 * allowed.limit, *(s for s in sizes if s and s > least)]
    )


def _height(trial: Tried, allowed: Allowed) -> float:
    if trial.score is not None and math.isfinite(trial.score):
        return trial.score
    return math.inf if trial.ok is allowed.higher else -math.inf


def _words(trial: Tried) -> str:
    pinned = count(trial.pinned, "region")
    return f"{pinned} pinned, {count(trial.float32_ops, 'float32 op')}: {number_text(trial.score)}"


def _cells(name: str, trial: Tried) -> tuple[str, ...]:
    outcome = "passes" if trial.ok else "fails"
    return name, outcome, str(trial.pinned), str(trial.float32_ops), number_text(trial.score)


def _row(trial: Tried) -> dict[str, object]:
    return {
        "pinned": trial.pinned,
        "float32_ops": trial.float32_ops,
        "score": finite(trial.score),
        "ok": trial.ok,
    }


def _lead(trials: Sequence[Tried], chosen: Tried, allowed: Allowed, *, solved: bool) -> str:
    outcome = "passes" if solved else "does not pass, or the search did not end"
    made = f"the conversion with {count(chosen.float32_ops, 'op')} in float32 {outcome} ({number_text(chosen.score)})"
    return f"{count(len(trials), 'trial')} of which ops stay float32; {made}. Passes if {allowed.words}."
