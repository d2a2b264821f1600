"""Figures of measurements: the scores of outputs against the tolerance, and the ranges of values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import count
from amp_rewrite.files.casting import Fit
from amp_rewrite.reports.evidence import Criterion, Difference, OutputRow
from amp_rewrite.reports.page.page import (
    Axis,
    Band,
    Bar,
    Figure,
    bars,
    element,
    number_text,
    numbers_table,
    remarks,
    short,
)

_OUTPUTS, _BATCHES = 40, 50
"""Outputs that are listed, and batches of each; the worst ones of more."""


def outputs_figure(
    compared: Sequence[OutputRow], allowed: Criterion, verdict: str, notes: Sequence[str] = ()
) -> Figure:
    """Return the scores of outputs as a figure: a table, and a chart of several errors.

    Scores of which higher ones are better are not drawn.
    """
    limit, higher = allowed.limit, allowed.higher
    by_output: dict[str, list[OutputRow]] = {}  # the worst first
    for row in sorted(compared, key=lambda row: _badness(row.difference, higher), reverse=True):
        by_output.setdefault(row.label, []).append(row)
    chosen = {name: group[:_BATCHES] for name, group in islice(by_output.items(), _OUTPUTS)}
    shown = [row for group in chosen.values() for row in group]
    known = [s for row in shown if (s := row.difference.score) is not None and math.isfinite(s)]
    lead = _lead(compared, len(shown), verdict)
    head = ("output", "decides", "batch", "score", "error of the largest value")
    cells = (
        (row.label, "ok" if d.ok else d.because, row.place, *map(number_text, (d.score, d.scaled)))
        for row in shown
        for d in [row.difference]
    )
    chart = []
    if len(known) > 1 and not higher:  # one point is not a chart
        above = [number for number in known if number > 1e-6 * limit]  # zeros and dust stand at the left end
        axis = Axis.of(allowed.measured, [limit / 10, 3 * limit, *above])
        band = Band(0.0, limit, "low", f"allowed: {limit:g}")
        chart = [bars(axis, [_scores(name, group) for name, group in chosen.items()], [band], name=lead)]
    drawing = element("div", *chart, *remarks(notes), numbers_table(head, cells, right=3))
    return Figure("outputs", "Outputs against the tolerance", lead, drawing)


def _badness(difference: Difference, higher: bool) -> tuple[bool, float]:
    score, ok = difference.score, difference.ok
    if score is None or math.isnan(score):
        return not ok, -math.inf if ok else math.inf
    return not ok, -score if higher else score


def _scores(name: str, group: Sequence[OutputRow]) -> Bar:
    """Return the bar of an output, from its best error to its worst; one without a number stands at the right end."""
    row, worst = group[0], group[0].difference
    ends = [s for row in group if (s := row.difference.score) is not None and not math.isnan(s)] or [0.0]
    ends += [math.inf] if worst.score is None and not worst.ok else []
    score = number_text(worst.score) if worst.score is not None else "equal" if worst.ok else "fails"
    words = f"worst in batch {row.place}: {score}{'' if worst.ok else ', ' + worst.because}"
    return Bar(name, min(ends), max(ends), "low" if worst.ok else "high", score if worst.ok else f"✗ {score}", words)


def _lead(compared: Sequence[OutputRow], shown: int, verdict: str) -> str:
    if not compared:
        return f"Nothing was compared. {short(verdict)}."
    failed = sum(not row.difference.ok for row in compared)
    what = "Each bar goes from the best batch of an output to its worst; " if len(compared) > 1 else ""
    words = f"{what}{failed} of {len(compared)} comparisons failed. Verdict: {short(verdict)}."
    if shown < len(compared):
        words += f" The {shown} worst are listed: {_BATCHES} batches of {_OUTPUTS} outputs at most."
    return words


# -- ranges -----------------------------------------------------------------------------------------------------


_DRAWN, _LISTED = 12, 500
"""Values that the chart draws, and that the table holds."""
_LEAST, _MOST = 1e-12, 1e12
"""Magnitudes that an axis for float16 holds at most; the least one for bfloat16, too."""
_HEAD = ("value", "smallest", "largest", "headroom", "overflow", "subnormal", "flushed to zero", "infinite or NaN")


def ranges_figure(values: Mapping[str, Fit], to: DType, data: str) -> Figure:
    """Return the ranges of values as a figure; one value alone is not drawn."""
    seen = {name: fit for name, fit in values.items() if fit.absmax or fit.nonfinite}
    tight = dict(sorted(seen.items(), key=lambda item: (_mask(item[1]), not item[1].nonfinite, -item[1].absmax)))
    bands = [
        Band(to.tiny, to.max, "low", f"normal in {to.spelling}"),
        Band(to.smallest_subnormal, to.tiny, "cast", "subnormal: fewer digits"),
        Band(to.max, math.inf, "high", "overflow"),
    ]
    spans = [
        Bar(name, fit.absmin, fit.absmax, _kind(fit), _spare(fit, to), _ends(fit))
        for name, fit in islice(tight.items(), _DRAWN)
    ]
    chart = bars(_range_axis(spans, to), spans, bands, name=f"Values with the least headroom in {to.spelling}")
    note = "The tightest values; the file of ranges holds all." if len(seen) > _LISTED else ""
    cells = (_cells(name, fit, to) for name, fit in islice(tight.items(), _LISTED))
    drawing = element("div", *([chart] if len(seen) > 1 else []), numbers_table(_HEAD, cells, right=7, note=note))
    return Figure("ranges", "Ranges", _range_lead(tight, to, data, len(values) - len(seen)), drawing)


def _mask(fit: Fit) -> bool:
    """True for the largest float32: no layer computes it, a mask is filled with it."""
    return not fit.nonfinite and fit.absmax >= DType.FLOAT.max


def _kind(fit: Fit) -> str:
    return "muted" if _mask(fit) else "high" if fit.nonfinite or fit.overflow else "low"


def _ends(fit: Fit) -> str:
    return f"{number_text(fit.absmin)} to {number_text(fit.absmax)}" if fit.absmax else "no finite number"


def _headroom(fit: Fit, to: DType) -> float:
    return to.max / fit.absmax if fit.absmax else math.inf


def _spare(fit: Fit, to: DType) -> str:
    if _mask(fit):
        return "a mask"
    if fit.nonfinite:
        return f"{_percent(fit.nonfinite, fit.count)} infinite or NaN"
    if fit.overflow:
        return f"{_percent(fit.overflow, fit.count)} overflow"
    return f"{number_text(_headroom(fit, to))}× to spare"


def _cells(name: str, fit: Fit, to: DType) -> tuple[str, ...]:
    parts = (fit.overflow, fit.subnormal, fit.flushed, fit.nonfinite)
    sizes = map(number_text, (fit.absmin, fit.absmax, _headroom(fit, to)))
    return (name, *sizes, *(_percent(part, fit.count) for part in parts))


def _range_lead(tight: Mapping[str, Fit], to: DType, data: str, left_out: int) -> str:
    if not tight:
        return f"No value other than zero was seen ({short(data)})."
    beyond = sum(_kind(fit) == "high" for fit in tight.values())
    name, first = next(iter(tight.items()))
    words = [f"Magnitudes of {count(len(tight), 'value')} on {short(data)}, against the range of {to.spelling}."]
    words += [f"{count(beyond, 'value does', 'values do')} not fit it."] if beyond else []
    words.append(f"The tightest is {short(name)}: {_ends(first)}, {_spare(first, to)}.")
    words += [f"{count(left_out, 'value')} zero or not seen, and left out."] if left_out else []
    return " ".join(words)


def _range_axis(spans: Sequence[Bar], to: DType) -> Axis:
    """Return the axis of the magnitudes; those far beyond float16 stand at its ends, not to squeeze the others."""
    sizes = [number for bar in spans for number in (bar.low, bar.high) if number]
    most = _MOST if to is DType.FLOAT16 else math.inf
    float16 = DType.FLOAT16.smallest_subnormal, 10 * DType.FLOAT16.max
    return Axis.of("magnitude", [*(min(max(size, _LEAST), most) for size in sizes), *float16])


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.3g} %" if part and whole else "–"
