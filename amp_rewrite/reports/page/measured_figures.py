"""SVG charts of measurements: scores of outputs against the tolerance, and ranges of values.

A chart has one bar per item along a shared axis, drawn over background bands. Positions are percentages of the page
width, so text keeps its size on narrow and wide pages. Numbers outside the range of the axis are drawn at its ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Self
from xml.etree.ElementTree import Element

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import count
from amp_rewrite.files.casting import Fit
from amp_rewrite.reports.evidence import Criterion, Difference, OutputRow
from amp_rewrite.reports.page.page import Figure, element, numbers_table, remarks, short
from amp_rewrite.reports.render import cut, plain

_TICKS = 5
_MIN_POWER, _MAX_POWER = -308, 308
"""Powers of ten in the normal range of a float."""
_MAX_NAME, _MAX_TIP = 64, 400
"""Maximum lengths of a row's label and of a tooltip."""


# -- axes ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Axis:
    """A logarithmic axis between two powers of ten."""

    label: str
    first: int
    last: int

    @classmethod
    def of(cls, label: str, numbers: Iterable[float | None]) -> Self:
        """Return an axis with a range for the positive finite numbers."""
        powers = [math.log10(number) for number in numbers if number and 0 < number < math.inf]
        first = max(math.floor(min(powers, default=0.0)), _MIN_POWER)
        last = min(math.ceil(max(powers, default=0.0)), _MAX_POWER)
        if first >= last:
            first, last = (first - 1, first) if first == _MAX_POWER else (first, first + 1)
        return cls(label, first, last)

    def at(self, number: float) -> float:
        """Return the position of a number from 0 to 1: the nearest end for a number outside the axis, 1 for NaN."""
        if not 10.0**self.first < number < 10.0**self.last:
            return 0.0 if number <= 10.0**self.first else 1.0
        return (math.log10(number) - self.first) / (self.last - self.first)

    def ticks(self, limit: int = _TICKS) -> list[tuple[float, str]]:
        """Return up to `limit` numbers on the axis with their labels; `limit` is at least 2."""
        step = max(1, -(-(self.last - self.first) // (limit - 1)))
        start = -(-self.first // step) * step  # multiples of the step, so that 1 is a tick if in range
        powers = range(start, self.last + 1, step)
        return [(10.0**n, f"{10.0**n:.{max(-n, 0)}f}" if -3 < n < 5 else f"1e{n}") for n in powers]


def number_text(number: float | None) -> str:
    """Format a number with three significant digits, or an integer in full; "–" for None."""
    if number is None:
        return "–"
    if math.isinf(number):
        return "infinity" if number > 0 else "-infinity"
    if math.isnan(number):
        return "NaN"
    if abs(number) < 1e6 and (number == round(number) or abs(number) >= 1e3):
        return f"{float(f'{number:.3g}') if number != round(number) else number:.0f}"
    return f"{number:.3g}"


def percent(share: float) -> str:
    """Format a share from 0 to 1 as an SVG attribute: "12.5%"."""
    return f"{100 * share:.5g}%"


# -- charts --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bar:
    """A labeled bar from one number to another, with a value text beside it and a tooltip."""

    label: str
    low: float
    high: float
    kind: str
    value_text: str = ""
    tooltip: str = ""


@dataclass(frozen=True, slots=True)
class Band:
    """A band of the axis, drawn under all bars, with its text in the legend."""

    low: float
    high: float
    kind: str
    legend: str


def bars(axis: Axis, shown: Sequence[Bar], bands: Sequence[Band], *, name: str) -> Element:
    places = [percent(axis.at(n)) for n, _ in axis.ticks()]
    ticks = [element("line", x1=place, x2=place, y1="0%", y2="100%", class_="grid") for place in places]
    background = [_span(axis, b.low, b.high, f"band {b.kind}", "", y="0%", height="100%") for b in bands]
    drawn = []
    for bar in shown:
        label = element("span", cut(plain(bar.label), _MAX_NAME), title=cut(plain(bar.label), _MAX_TIP), class_="label")
        mark = _span(axis, bar.low, bar.high, f"span {bar.kind}", bar.tooltip, y="20%", height="60%")
        marks = element("svg", *ticks, *background, mark, width="100%", height=20, aria_hidden="true")
        drawn.append(element("div", label, marks, element("span", bar.value_text, class_="number"), class_="row"))
    foot = element("div", element("span", class_="label"), _scale(axis), element("span", class_="number"), class_="row")
    box = element("div", *drawn, foot, class_="rows", role="group", aria_label=cut(plain(name), _MAX_TIP))
    return element("figure", element("ul", *map(_legend_item, bands), class_="legend"), box, class_="chart")


def _span(axis: Axis, low: float, high: float, kind: str, tooltip: str, **sides: str) -> Element:
    start, min_width = axis.at(low), 0.003 if kind.startswith("span") else 0.0
    start, width = min(start, 1 - min_width), max(axis.at(high) - start, min_width)
    title = element("title", cut(plain(tooltip), _MAX_TIP)) if tooltip else ""
    return element("rect", title, class_=kind, x=percent(start), width=percent(width), **sides)


def _legend_item(band: Band) -> Element:
    rect = element("rect", x=0, y=2, width=18, height=10, class_=f"band {band.kind}")
    swatch = element("svg", rect, width=18, height=14, aria_hidden="true")
    return element("li", swatch, cut(plain(band.legend), _MAX_NAME))


def _scale(axis: Axis) -> Element:
    labels = []
    for number, text in axis.ticks():
        place = axis.at(number)
        anchor = "start" if place < 0.05 else "end" if place > 0.95 else "middle"
        labels.append(element("text", text, x=percent(place), y=14, text_anchor=anchor, class_="tick"))
    name = element("text", axis.label, x="100%", y=30, text_anchor="end", class_="words")
    return element("svg", *labels, name, width="100%", height=36, aria_hidden="true", class_="scale")


# -- outputs ---------------------------------------------------------------------------------------------------


_MAX_OUTPUTS, _MAX_BATCHES = 40, 50
"""Maximum number of outputs to list, and of batches for each; the worst come first."""


def outputs_figure(
    compared: Sequence[OutputRow], allowed: Criterion, verdict: str, notes: Sequence[str] = ()
) -> Figure:
    """Return the scores of outputs as a figure: a table, and a chart if there are several errors.

    There is no chart for measures in which a higher score is better.
    """
    limit, higher = allowed.limit, allowed.higher
    by_output: dict[str, list[OutputRow]] = {}  # the worst first
    for row in sorted(compared, key=lambda row: _badness(row.difference, higher), reverse=True):
        by_output.setdefault(row.label, []).append(row)
    chosen = {name: group[:_MAX_BATCHES] for name, group in islice(by_output.items(), _MAX_OUTPUTS)}
    shown = [row for group in chosen.values() for row in group]
    scores = [s for row in shown if (s := row.difference.score) is not None and math.isfinite(s)]
    lead = _lead(compared, len(shown), verdict)
    head = ("output", "verdict", "batch", "score", "error / largest value")
    cells = (
        (row.label, "ok" if d.ok else d.because, row.place, *map(number_text, (d.score, d.scaled)))
        for row in shown
        for d in [row.difference]
    )
    chart = []
    if len(scores) > 1 and not higher:  # a single point needs no chart
        above = [number for number in scores if number > 1e-6 * limit]  # smaller ones are drawn at the left end
        axis = Axis.of(allowed.measured, [limit / 10, 3 * limit, *above])
        band = Band(0.0, limit, "low", f"allowed: {limit:g}")
        chart = [bars(axis, [_score_bar(name, group) for name, group in chosen.items()], [band], name=lead)]
    drawing = element("div", *chart, *remarks(notes), numbers_table(head, cells, right=3))
    return Figure("outputs", "Outputs against the tolerance", lead, drawing)


def _badness(difference: Difference, higher: bool) -> tuple[bool, float]:
    score, ok = difference.score, difference.ok
    if score is None or math.isnan(score):
        return not ok, -math.inf if ok else math.inf
    return not ok, -score if higher else score


def _score_bar(name: str, group: Sequence[OutputRow]) -> Bar:
    """Return the bar of an output, from its best to its worst error; a failure without a score ends at the right."""
    row, worst = group[0], group[0].difference
    ends = [s for row in group if (s := row.difference.score) is not None and not math.isnan(s)] or [0.0]
    ends += [math.inf] if worst.score is None and not worst.ok else []
    score = number_text(worst.score) if worst.score is not None else "equal" if worst.ok else "fails"
    tooltip = f"worst in batch {row.place}: {score}{'' if worst.ok else ', ' + worst.because}"
    return Bar(name, min(ends), max(ends), "low" if worst.ok else "high", score if worst.ok else f"✗ {score}", tooltip)


def _lead(compared: Sequence[OutputRow], shown: int, verdict: str) -> str:
    if not compared:
        return f"Nothing was compared. {short(verdict)}."
    failed = sum(not row.difference.ok for row in compared)
    bars = "Each bar spans the best to the worst batch of an output; " if len(compared) > 1 else ""
    lead = f"{bars}{failed} of {len(compared)} comparisons failed. Verdict: {short(verdict)}."
    if shown < len(compared):
        lead += f" The {shown} worst are listed: at most {_MAX_BATCHES} batches for each of {_MAX_OUTPUTS} outputs."
    return lead


# -- ranges -----------------------------------------------------------------------------------------------------


_MAX_DRAWN, _MAX_LISTED = 12, 500
"""Maximum number of values in the chart and in the table."""
_MIN_END, _MAX_END = 1e-12, 1e12
"""Limits of the ends of an axis for float16; for bfloat16, only the lower limit applies."""
_HEAD = ("value", "smallest", "largest", "headroom", "overflow", "subnormal", "flushed to zero", "infinite or NaN")


def ranges_figure(values: Mapping[str, Fit], to: DType, data: str) -> Figure:
    """Return the ranges of values as a figure: a table, and a chart if there are several values."""
    seen = {name: fit for name, fit in values.items() if fit.absmax or fit.nonfinite}
    by_margin = dict(sorted(seen.items(), key=lambda item: (_is_mask(item[1]), not item[1].nonfinite, -item[1].absmax)))
    bands = [
        Band(to.tiny, to.max, "low", f"normal in {to.spelling}"),
        Band(to.smallest_subnormal, to.tiny, "cast", "subnormal: fewer digits"),
        Band(to.max, math.inf, "high", "overflow"),
    ]
    spans = [
        Bar(name, fit.absmin, fit.absmax, _kind(fit), _margin(fit, to), _ends(fit))
        for name, fit in islice(by_margin.items(), _MAX_DRAWN)
    ]
    sizes = [number for bar in spans for number in (bar.low, bar.high) if number]
    limit = _MAX_END if to is DType.FLOAT16 else math.inf  # values far beyond float16 must not squeeze the others
    float16 = DType.FLOAT16.smallest_subnormal, 10 * DType.FLOAT16.max
    axis = Axis.of("magnitude", [*(min(max(size, _MIN_END), limit) for size in sizes), *float16])
    chart = bars(axis, spans, bands, name=f"Values with the least headroom in {to.spelling}")
    note = "Only the tightest values are shown; the ranges file has all of them." if len(seen) > _MAX_LISTED else ""
    cells = (_cells(name, fit, to) for name, fit in islice(by_margin.items(), _MAX_LISTED))
    drawing = element("div", *([chart] if len(seen) > 1 else []), numbers_table(_HEAD, cells, right=7, note=note))
    return Figure("ranges", "Ranges", _range_lead(by_margin, to, data, len(values) - len(seen)), drawing)


def _is_mask(fit: Fit) -> bool:
    """True for the largest float32, the fill value of masks; layers do not compute it."""
    return not fit.nonfinite and fit.absmax >= DType.FLOAT.max


def _kind(fit: Fit) -> str:
    return "muted" if _is_mask(fit) else "high" if fit.nonfinite or fit.overflow else "low"


def _ends(fit: Fit) -> str:
    return f"{number_text(fit.absmin)} to {number_text(fit.absmax)}" if fit.absmax else "no finite number"


def _headroom(fit: Fit, to: DType) -> float:
    return to.max / fit.absmax if fit.absmax else math.inf


def _margin(fit: Fit, to: DType) -> str:
    if _is_mask(fit):
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


def _range_lead(by_margin: Mapping[str, Fit], to: DType, data: str, omitted: int) -> str:
    if not by_margin:
        return f"No value other than zero was seen ({short(data)})."
    beyond = sum(_kind(fit) == "high" for fit in by_margin.values())
    name, first = next(iter(by_margin.items()))
    facts = [f"Magnitudes of {count(len(by_margin), 'value')} on {short(data)}, against the range of {to.spelling}."]
    facts += [f"{count(beyond, 'value does', 'values do')} not fit."] if beyond else []
    facts.append(f"The tightest is {short(name)}: {_ends(first)}, {_margin(first, to)}.")
    facts += [f"{count(omitted, 'value is zero or was', 'values are zero or were')} not seen."] if omitted else []
    return " ".join(facts)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.3g}%" if part and whole else "–"
