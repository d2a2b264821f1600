"""Charts that are data, drawn as figures of a page."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree.ElementTree import Element

from amp_rewrite.reports.page.axis import Axis
from amp_rewrite.reports.page.bars import spot, stretch, whisker
from amp_rewrite.reports.page.chart import Line, numbers, plot, remarks, rows, sample
from amp_rewrite.reports.page.described import Bars, Chart, Curves, Move, Moves
from amp_rewrite.reports.page.figure import Figure
from amp_rewrite.reports.page.marks import dots, polyline
from amp_rewrite.reports.page.markup import element

_DASHES = ("low", "high", "cast", "muted")
"""Classes of the curves, in turn."""


def described_figure(chart: Chart) -> Figure:
    """Return a chart as a figure.

    Args:
        chart: the chart.
    """
    drawn = _bars(chart) if isinstance(chart, Bars) else _curves(chart) if isinstance(chart, Curves) else _moves(chart)
    names = 2 if isinstance(chart, Moves) else 1
    table = numbers(chart.head, chart.cells, right=len(chart.head) - names)
    drawing = element("div", drawn, *remarks(chart.notes), table)
    return Figure(chart.name, chart.title, chart.lead, drawing, chart.data, notebook=True)


def _bars(chart: Bars) -> Element:
    ends = [n for bar in chart.bars for n in (bar.number, bar.mark, *(bar.spread or ())) if n is not None]
    axis = Axis.linear(chart.unit, map(chart.kept, ends), zero=True)
    lines = []
    for number, bar in enumerate(chart.bars):
        marks = stretch(axis, 0.0, bar.number, "low" if number else "high", bar.text)
        marks += whisker(axis, *bar.spread) if bar.spread is not None else []
        if bar.mark is not None:
            marks += spot(axis, bar.mark, "hollow", f"{chart.mark} {bar.mark:.4g}")
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
    ends = sorted((move.before or 0.0, move.after or 0.0))
    yield from stretch(axis, ends[0], ends[1], "muted")
    if move.before is not None:
        yield from spot(axis, move.before, "hollow", f"before {move.before:.1f}")
    if move.after is not None:
        yield from spot(axis, move.after, "high" if move.grows else "low", f"after {move.after:.1f}")
