"""Figures of measurements: the scores of outputs against the tolerance, and the ranges of values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from amp_rewrite.dtypes import LOW_TYPES, DType
from amp_rewrite.errors import count
from amp_rewrite.files.casting import Fit
from amp_rewrite.reports.evidence import Difference, OutputRow
from amp_rewrite.reports.page.chart import (
    Axis,
    Line,
    backdrop,
    element,
    finite,
    number_text,
    numbers,
    remarks,
    rows,
    sample,
    short,
    spot,
    stretch,
    upright,
)
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
    bands = ((to.tiny, to.max, "low"), (to.smallest_subnormal, to.tiny, "cast"), (to.max, math.inf, "high"))
    axis = _range_axis(drawn, to)
    lines = []
    for value in drawn:
        marks = [mark for low, high, kind in bands for mark in backdrop(axis, low, high, kind)]
        kind = "muted" if value.mask else "high" if value.beyond else "low"
        marks += stretch(axis, value.fit.absmin, value.fit.absmax, kind, value.ends)
        lines.append(Line(value.name, marks, value.words))
    legend = [
        sample("low", f"normal in {to.spelling}", "band"),
        sample("cast", "subnormal: fewer digits", "band"),
        sample("high", "overflow", "band"),
    ]
    chart = rows(axis, lines, name=f"Values with the least headroom in {to.spelling}", legend=legend)
    note = "" if len(listed) == len(seen) else "The tightest values; the file of ranges holds all."
    held: dict[str, object] = {
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
    table = numbers(_HEAD, (value.cells for value in listed), right=7, note=note)
    drawing = element("div", *([chart] if len(seen) > 1 else []), table)
    return Figure("ranges", "Ranges", _range_lead(tight, to, data, len(values) - len(seen)), drawing, held)


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
