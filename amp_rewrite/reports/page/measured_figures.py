"""Figures of measurements: the scores of outputs against the tolerance, and the ranges of values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from amp_rewrite.dtypes import LOW_TYPES, DType
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
    finite,
    number_text,
    numbers_table,
    remarks,
    short,
)

_OUTPUTS, _BATCHES = 40, 50
"""Outputs that are drawn, and batches of each; the worst ones of more."""


def outputs_figure(
    compared: Sequence[OutputRow], allowed: Criterion, verdict: str, notes: Sequence[str] = ()
) -> Figure:
    """Return the scores of outputs as a figure."""
    by_output: dict[str, list[OutputRow]] = {row.label: [] for row in compared}
    for row in sorted(compared, key=lambda row: _badness(row.difference, allowed), reverse=True):
        by_output[row.label].append(row)
    worst_first = sorted(by_output, key=lambda name: _badness(by_output[name][0].difference, allowed), reverse=True)
    named = set(worst_first[:_OUTPUTS])
    chosen = {name: group[:_BATCHES] for name, group in by_output.items() if name in named}
    shown = [(row, row.difference) for group in chosen.values() for row in group]
    lead = _lead(compared, len(shown), verdict)
    head = ("output", "decides", "batch", "score", "error of the largest value")
    cells = (
        (row.label, "ok" if d.ok else d.because, row.place, *map(number_text, (d.score, d.scaled))) for row, d in shown
    )
    chart = []
    if sum(finite(difference.score) is not None for _, difference in shown) > 1:  # one point is not a chart
        axis = _axis([difference.score for _, difference in shown], allowed)
        ends = (allowed.limit, math.inf) if allowed.higher else (-math.inf, allowed.limit)
        band = Band(*ends, "low", f"allowed: {allowed.limit:g}")
        chart = [bars(axis, [_scores(name, group, allowed) for name, group in chosen.items()], [band], name=lead)]
    drawing = element("div", *chart, *remarks(notes), numbers_table(head, cells, right=3))
    drawn: dict[str, object] = {
        "criterion": str(allowed),
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


def _badness(difference: Difference, allowed: Criterion) -> tuple[bool, float]:
    score, ok = difference.score, difference.ok
    if score is None or math.isnan(score):
        return not ok, -math.inf if ok else math.inf
    return not ok, -score if allowed.higher else score


def _axis(scores: Sequence[float | None], allowed: Criterion) -> Axis:
    """Return the axis of scores; exact zeros and dust stand at the left end, not to squeeze the others."""
    if allowed.higher:
        return Axis.linear(f"{allowed.measured}, higher is better", [*scores, allowed.limit])
    least = allowed.limit * 1e-6 if allowed.limit else 0.0
    above = (score for score in scores if score is not None and score > least)
    return Axis.logarithmic(allowed.measured, [allowed.limit / 10, 3 * allowed.limit, *above])


def _scores(name: str, group: Sequence[OutputRow], allowed: Criterion) -> Bar:
    """Return the bar of an output, from its best score to its worst; one without a number stands at the bad end."""
    bad = -math.inf if allowed.higher else math.inf
    worst, row = group[0].difference, group[0]
    known = [d.score for d in (row.difference for row in group) if d.score is not None and not math.isnan(d.score)]
    ends = sorted(known if worst.ok or worst.score is not None else [*known, bad]) or [bad if not worst.ok else -bad]
    score = number_text(worst.score) if worst.score is not None else "equal" if worst.ok else "fails"
    words = f"worst in batch {row.place}: {score}{'' if worst.ok else ', ' + worst.because}"
    return Bar(name, ends[0], ends[-1], "low" if worst.ok else "high", score if worst.ok else f"✗ {score}", words)


def _lead(compared: Sequence[OutputRow], shown: int, verdict: str) -> str:
    if not compared:
        return f"Nothing was compared. {short(verdict)}."
    failed = sum(not row.difference.ok for row in compared)
    what = "Each bar goes from the best batch of an output to its worst; " if len(compared) > 1 else ""
    words = f"{what}{failed} of {len(compared)} comparisons failed. Verdict: {short(verdict)}."
    if shown < len(compared):
        words += f" The {shown} worst are drawn: {_BATCHES} batches of {_OUTPUTS} outputs at most."
    return words


# -- ranges -----------------------------------------------------------------------------------------------------


_DRAWN, _LISTED = 12, 500
"""Values that the chart draws, and that the table holds."""
_LEAST, _MOST = 1e-12, 1e12
"""Magnitudes that an axis for float16 holds at most; the least one for bfloat16, too."""
_HEAD = ("value", "smallest", "largest", "headroom", "overflow", "subnormal", "flushed to zero", "infinite or NaN")


@dataclass(frozen=True, slots=True)
class _DrawnRange:
    """A value in the chart: its place in depth, its name and its range."""

    place: int
    name: str
    fit: Fit
    to: DType

    @property
    def mask(self) -> bool:
        """True for the largest float32: no layer computes it, a mask is filled with it."""
        return not self.fit.nonfinite and self.fit.absmax >= DType.FLOAT.max

    @property
    def beyond(self) -> bool:
        return (self.fit.nonfinite > 0 or self.fit.overflow > 0) and not self.mask

    @property
    def kind(self) -> str:
        return "muted" if self.mask else "high" if self.beyond else "low"

    @property
    def headroom(self) -> float:
        return self.to.max / self.fit.absmax if self.fit.absmax else math.inf

    @property
    def ends(self) -> str:
        fit = self.fit
        return f"{number_text(fit.absmin)} to {number_text(fit.absmax)}" if fit.absmax else "no finite number"

    @property
    def words(self) -> str:
        if self.mask:
            return "a mask"
        if self.fit.nonfinite:
            return f"{_percent(self.fit.nonfinite, self.fit.count)} infinite or NaN"
        if self.fit.overflow:
            return f"{_percent(self.fit.overflow, self.fit.count)} overflow"
        return f"{number_text(self.headroom)}× to spare"

    @property
    def row(self) -> dict[str, object]:
        fit = self.fit
        return {
            "value": self.name,
            "place": self.place,
            "absmin": finite(fit.absmin),
            "absmax": finite(fit.absmax),
            "headroom": finite(self.headroom),
            **{name: getattr(fit, name) for name in ("count", "overflow", "subnormal", "flushed", "nonfinite")},
        }

    @property
    def cells(self) -> tuple[str, ...]:
        fit = self.fit
        parts = (fit.overflow, fit.subnormal, fit.flushed, fit.nonfinite)
        sizes = map(number_text, (fit.absmin, fit.absmax, self.headroom))
        return (self.name, *sizes, *(_percent(part, fit.count) for part in parts))


def ranges_figure(values: Mapping[str, Fit], to: DType, data: str) -> Figure:
    """Return the ranges of values as a figure; one value alone is not drawn."""
    seen = [
        _DrawnRange(i, name, fit, to) for i, (name, fit) in enumerate(values.items()) if fit.absmax or fit.nonfinite
    ]
    tight = sorted(seen, key=lambda value: (value.mask, not value.fit.nonfinite, value.headroom, value.place))
    drawn, listed = tight[:_DRAWN], tight[:_LISTED]
    bands = [
        Band(to.tiny, to.max, "low", f"normal in {to.spelling}"),
        Band(to.smallest_subnormal, to.tiny, "cast", "subnormal: fewer digits"),
        Band(to.max, math.inf, "high", "overflow"),
    ]
    spans = [
        Bar(value.name, value.fit.absmin, value.fit.absmax, value.kind, value.words, value.ends) for value in drawn
    ]
    chart = bars(_range_axis(drawn, to), spans, bands, name=f"Values with the least headroom in {to.spelling}")
    note = "" if len(listed) == len(seen) else "The tightest values; the file of ranges holds all."
    drawn_ranges: dict[str, object] = {
        "to": to.spelling,
        "bands": {
            dtype.spelling: {"subnormal": dtype.smallest_subnormal, "normal": dtype.tiny, "largest": dtype.max}
            for dtype in LOW_TYPES
        },
        "values": [value.row for value in listed],
        "tightest": [value.name for value in drawn],
        "seen": len(seen),
        "left_out": len(values) - len(seen),
    }
    table = numbers_table(_HEAD, (value.cells for value in listed), right=7, note=note)
    drawing = element("div", *([chart] if len(seen) > 1 else []), table)
    return Figure("ranges", "Ranges", _range_lead(tight, to, data, len(values) - len(seen)), drawing, drawn_ranges)


def _range_lead(tight: Sequence[_DrawnRange], to: DType, data: str, left_out: int) -> str:
    if not tight:
        return f"No value other than zero was seen ({short(data)})."
    beyond = sum(value.beyond for value in tight)
    first = tight[0]
    words = [f"Magnitudes of {count(len(tight), 'value')} on {short(data)}, against the range of {to.spelling}."]
    words += [f"{count(beyond, 'value does', 'values do')} not fit it."] if beyond else []
    words.append(f"The tightest is {short(first.name)}: {first.ends}, {first.words}.")
    words += [f"{count(left_out, 'value')} zero or not seen, and left out."] if left_out else []
    return " ".join(words)


def _range_axis(values: Sequence[_DrawnRange], to: DType) -> Axis:
    """Return the axis of the magnitudes; those far beyond float16 stand at its ends, not to squeeze the others."""
    sizes = [number for value in values for number in (value.fit.absmin, value.fit.absmax) if number]
    most = _MOST if to is DType.FLOAT16 else math.inf
    float16 = DType.FLOAT16.smallest_subnormal, 10 * DType.FLOAT16.max
    return Axis.logarithmic("magnitude", [*(min(max(size, _LEAST), most) for size in sizes), *float16])


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.3g} %" if part and whole else "–"
