"""Figures of scores against what is allowed: of each output in a verdict, and of each trial of a repair."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from xml.etree.ElementTree import Element

from amp_rewrite.errors import count
from amp_rewrite.reports.page.axis import Axis, finite, number_text
from amp_rewrite.reports.page.chart import Line, numbers, plot, remarks, rows, sample
from amp_rewrite.reports.page.marks import dots, limit, spot, upright
from amp_rewrite.reports.page.markup import element, short
from amp_rewrite.reports.page.page import Figure

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
    """Return the scores of outputs as a figure."""
    by_output: dict[str, list[Scored]] = {score.output: [] for score in scores}
    for score in sorted(scores, key=lambda s: _badness(s, allowed), reverse=True):
        by_output[score.output].append(score)
    worst_first = sorted(by_output, key=lambda name: _badness(by_output[name][0], allowed), reverse=True)
    named = set(worst_first[:_OUTPUTS])
    chosen = {name: group[:_BATCHES] for name, group in by_output.items() if name in named}
    shown = [score for group in chosen.values() for score in group]
    axis = _axis([score.score for score in shown], allowed)
    lines = []
    for name, (worst, *others) in chosen.items():
        number = f"{'' if worst.ok else '✗ '}{number_text(worst.score)}"
        number = number if worst.score is not None else "equal" if worst.ok else "fails"
        lines.append(Line(name, list(_marks(axis, [worst, *others], allowed)), number))
    lead = _lead(scores, shown, verdict)
    legend = [
        sample("low", "a batch that passes", "dot"),
        sample("hollow", "a batch that fails", "dot"),
        *([sample("tolerance", f"allowed: {allowed.limit:g}", "line")] if math.isfinite(allowed.limit) else []),
    ]
    head = ("output", "decides", "batch", "score", "error of the largest value")
    cells = (
        (s.output, "ok" if s.ok else s.because, str(s.batch), *map(number_text, (s.score, s.scaled))) for s in shown
    )
    chart = rows(axis, lines, name=lead, legend=legend)
    drawing = element("div", chart, *remarks(notes), numbers(head, cells, right=3))
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


def _axis(sizes: Sequence[float | None], allowed: Allowed, prefix: str = "") -> Axis:
    """Return the axis of scores; exact zeros and dust stand at the left end, not to squeeze the others."""
    if allowed.higher:
        return Axis.linear(f"{prefix}{allowed.score}, higher is better", [*sizes, allowed.limit])
    least = allowed.limit * 1e-6 if allowed.limit else 0.0
    above = (size for size in sizes if size is not None and size > least)
    return Axis.logarithmic(f"{prefix}{allowed.score}", [allowed.limit, 3 * allowed.limit, *above])


def _marks(axis: Axis, group: Sequence[Scored], allowed: Allowed) -> Iterator[Element]:
    yield from upright(axis, allowed.limit, "tolerance")
    for score in reversed(group):  # the worst is in front
        number = math.inf if score.score is None and not score.ok else score.score
        if number is not None and not math.isfinite(number):
            number = -math.inf if allowed.higher else math.inf
        words = f"batch {score.batch}: {number_text(score.score)}{'' if score.ok else ', ' + score.because}"
        yield from spot(axis, number, "low" if score.ok else "hollow", words)


def _lead(scores: Sequence[Scored], shown: Sequence[Scored], verdict: str) -> str:
    if not scores:
        return f"Nothing was compared. {short(verdict)}."
    failed = sum(not score.ok for score in scores)
    words = f"Each dot is one output in one batch; {failed} of {len(scores)} failed. Verdict: {short(verdict)}."
    if len(shown) < len(scores):
        words += f" The {len(shown)} worst are drawn: {_BATCHES} batches of {_OUTPUTS} outputs at most."
    return words


# -- a repair ------------------------------------------------------------------------------------------


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
        "trials": [asdict(trial) | {"score": finite(trial.score)} for trial in trials],
        "chosen": asdict(chosen) | {"score": finite(chosen.score)},
    }
    return Figure("repair", "Repair", lead, drawing, drawn, notebook=True)


def _place(trial: Tried, allowed: Allowed) -> float:
    if trial.score is not None and math.isfinite(trial.score):
        return trial.score
    return math.inf if trial.ok is allowed.higher else -math.inf


def _tried(trial: Tried) -> str:
    pinned = count(trial.pinned, "region")
    return f"{pinned} pinned, {count(trial.float32_ops, 'float32 op')}: {number_text(trial.score)}"


def _cells(name: str, trial: Tried) -> tuple[str, ...]:
    outcome = "passes" if trial.ok else "fails"
    return name, outcome, str(trial.pinned), str(trial.float32_ops), number_text(trial.score)
