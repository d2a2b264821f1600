"""Charts as data, and drawn as SVG for a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from amp_rewrite.reports.page.axis import Axis
from amp_rewrite.reports.page.chart import Line, numbers, plot, remarks, rows, sample
from amp_rewrite.reports.page.marks import dots, polyline, spot, stretch, whisker
from amp_rewrite.reports.page.markup import element
from amp_rewrite.reports.page.page import Figure

_DASHES = ("low", "high", "cast", "muted")
"""Classes of the curves, in turn."""


@dataclass(frozen=True, slots=True)
class ChartData:
    """A chart: the key of its figure, its heading, a sentence that says what is seen, and the table of its numbers.

    `head` names the columns, names first; `data` is everything that is drawn, as JSON; `notes` are caveats.
    """

    name: str
    title: str
    lead: str
    head: Sequence[str]
    cells: Sequence[Sequence[str]]
    data: Mapping[str, object]
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Bar:
    """A number with its text, the ends of its spread, and a second number that is marked on it."""

    label: str
    number: float
    text: str
    spread: tuple[float, float] | None = None
    mark: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars(ChartData):
    """A bar for each of a few numbers, the baseline first. `mark`: meaning of the second numbers.

    `longest`: the number at which the axis ends at the latest; None for an axis that holds all.
    """

    unit: str
    bars: Sequence[Bar]
    mark: str = ""
    longest: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves(ChartData):
    """Curves between two logarithmic axes: `across` and `upward` name them, `curves` holds points by label."""

    across: str
    upward: str
    curves: Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Move:
    """A number before and after; None on a side that lacks it."""

    label: str
    before: float | None
    after: float | None
    text: str

    @property
    def grows(self) -> bool:
        """True if the number after is larger."""
        return (self.after or 0.0) > (self.before or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves(ChartData):
    """Numbers before and after: `unit` is theirs, `words` say what growing and shrinking mean."""

    unit: str
    moves: Sequence[Move]
    words: tuple[str, str]


Chart = Bars | Curves | Moves


def chart_figure(chart: Chart) -> Figure:
    """Return a chart as a figure."""
    drawn = _bars(chart) if isinstance(chart, Bars) else _curves(chart) if isinstance(chart, Curves) else _moves(chart)
    names = 2 if isinstance(chart, Moves) else 1
    table = numbers(chart.head, chart.cells, right=len(chart.head) - names)
    drawing = element("div", drawn, *remarks(chart.notes), table)
    return Figure(chart.name, chart.title, chart.lead, drawing, chart.data, notebook=True)


def _bars(chart: Bars) -> Element:
    ends = [n for bar in chart.bars for n in (bar.number, bar.mark, *(bar.spread or ())) if n is not None]
    kept = ends if chart.longest is None else [min(end, chart.longest) for end in ends]
    axis = Axis.linear(chart.unit, kept, zero=True)
    lines = []
    for number, bar in enumerate(chart.bars):
        marks = stretch(axis, 0.0, bar.number, "low" if number else "high", bar.text)
        marks += whisker(axis, *bar.spread) if bar.spread is not None else []
        marks += spot(axis, bar.mark, "hollow", f"{chart.mark} {bar.mark:.4g}") if bar.mark is not None else []
        lines.append(Line(bar.label, marks, bar.text))
    legend = [
        sample("high", "baseline"),
        *([sample("low", "other models")] if len(chart.bars) > 1 else []),
        *([sample("hollow", chart.mark, "dot")] if chart.mark else []),
    ]
    return rows(axis, lines, name=chart.lead, legend=legend)


def _curves(chart: Curves) -> Element:
    points = [point for curve in chart.curves.values() for point in curve]
    x = Axis.logarithmic(chart.across, [place for place, _ in points])
    y = Axis.logarithmic(chart.upward, [number for _, number in points])
    marks, legend = [], []
    for i, (label, curve) in enumerate(chart.curves.items()):
        kind = _DASHES[i % len(_DASHES)]
        marks += polyline(x, y, curve, kind)
        words = ((a, b, f"{label}: {b:.4g} {chart.upward} at {chart.across} {a:g}") for a, b in curve)
        marks += dots(x, y, words, kind)
        legend.append(sample(kind, label, "line"))
    return plot(x, y, marks, name=chart.lead, legend=legend)


def _moves(chart: Moves) -> Element:
    axis = Axis.linear(chart.unit, [n for m in chart.moves for n in (m.before, m.after) if n is not None], zero=True)
    lines = [Line(move.label, list(_dumbbell(axis, move)), move.text) for move in chart.moves]
    legend = [
        sample("hollow", "before", "dot"),
        sample("high", f"after, {chart.words[0]}", "dot"),
        sample("low", f"after, {chart.words[1]}", "dot"),
    ]
    return rows(axis, lines, name=chart.lead, legend=legend)


def _dumbbell(axis: Axis, move: Move) -> Iterator[Element]:
    low, high = sorted((move.before or 0.0, move.after or 0.0))
    yield from stretch(axis, low, high, "muted")
    if move.before is not None:
        yield from spot(axis, move.before, "hollow", f"before {move.before:.1f}")
    if move.after is not None:
        yield from spot(axis, move.after, "high" if move.grows else "low", f"after {move.after:.1f}")
