"""Plot of a benchmark: the charts of its page, drawn by matplotlib, which it needs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from amp_rewrite.deploy.bench.result import Benchmark
from amp_rewrite.errors import ReportError, spelled
from amp_rewrite.files.scratch import check_place
from amp_rewrite.reports.page.chart_data import Bars, Chart, Moves
from amp_rewrite.reports.render import cut, plain

SUFFIXES = (".svg", ".png", ".pdf")
_WIDTH = 9
"""Width in inches."""
_LOW, _HIGH = "#0a6e9e", "#b4530a"
_LABEL = 48
"""Characters of a name."""


def check_plot(file: Path, *, overwrite: bool = True) -> None:
    """Raise ReportError if a plot cannot be written to this file, and say why."""
    if file.exists() and not overwrite:
        raise ReportError(f"{file} exists; name another file, or replace it with {spelled('overwrite', True)}")
    if file.suffix.lower() not in SUFFIXES:
        raise ReportError(f"cannot draw to {file}: the suffix selects the format; use {', '.join(SUFFIXES)}")
    check_place(file, ReportError)
    if find_spec("matplotlib") is None:
        raise ReportError("drawing needs matplotlib, which is not installed; pip install matplotlib")


def plot(benchmark: Benchmark, file: Path) -> None:
    """Draw the charts of a page to a file, in the format of its suffix: latency, memory, throughput, time of ops."""
    check_plot(file)
    from matplotlib.figure import Figure

    charts = benchmark.charts()
    heights = [_height(chart) for chart in charts]
    figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
    axes = figure.subplots(len(charts), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for chart, (axis,) in zip(charts, axes, strict=True):
        _draw(chart, axis)
        axis.set_title(_plain(chart.title), fontsize="medium", loc="left")
    figure.suptitle(_plain(f"{benchmark.device}, {benchmark.provider}"), fontsize="small")
    figure.savefig(file)


def _plain(text: str) -> str:
    """Return a text that matplotlib does not read as a formula, without control characters."""
    return plain(text).replace("$", r"\$")


def _height(chart: Chart) -> float:
    """Return the height of a chart in inches."""
    lines = len(chart.bars) if isinstance(chart, Bars) else len(chart.moves) if isinstance(chart, Moves) else 8
    return 1.4 + 0.35 * lines


def _draw(chart: Chart, axis: Any) -> None:
    if isinstance(chart, Bars):
        _bars(chart, axis)
    elif isinstance(chart, Moves):
        _moves(chart, axis)
    else:
        for label, points in chart.curves.items():
            axis.plot([x for x, _ in points], [y for _, y in points], marker="o", label=_plain(label))
        axis.set(xscale="log", yscale="log", xlabel=chart.across, ylabel=chart.upward)
        axis.legend()


def _bars(chart: Bars, axis: Any) -> None:
    """Draw a bar per number, with a whisker for its spread."""
    places = range(len(chart.bars))
    axis.barh(places, [bar.number for bar in chart.bars], color=_LOW)
    for place, bar in zip(places, chart.bars, strict=True):
        if bar.spread is not None:
            ends = [[max(bar.number - bar.spread[0], 0.0)], [max(bar.spread[1] - bar.number, 0.0)]]
            axis.errorbar([bar.number], [place], xerr=ends, capsize=3, color="black")
        if bar.mark is not None:
            axis.plot([bar.mark], [place], "o", markerfacecolor="none", color=_HIGH, label=chart.mark * (not place))
    axis.set_yticks(places, [f"{_plain(cut(bar.label, _LABEL))}\n{bar.text}" for bar in chart.bars])
    axis.invert_yaxis()
    axis.set(xlabel=chart.unit)
    if chart.longest:
        axis.set_xlim(right=min(axis.get_xlim()[1], chart.longest * 1.05))
    if chart.mark:
        axis.legend(fontsize="small")


def _moves(chart: Moves, axis: Any) -> None:
    """Draw a line from the number before to the number after."""
    for place, move in enumerate(chart.moves):
        color = _HIGH if move.grows else _LOW
        axis.plot([move.before or 0.0, move.after or 0.0], [place, place], color="0.7", linewidth=3, zorder=1)
        for number, face in ((move.before, "white"), (move.after, color)):
            if number is not None:
                axis.plot([number], [place], "o", markerfacecolor=face, color=color)
    labels = [f"{_plain(cut(move.label, _LABEL))}  {move.text}" for move in chart.moves]
    axis.set_yticks(range(len(chart.moves)), labels, fontsize="small")
    axis.invert_yaxis()
    axis.set(xlabel=f"{chart.unit}; hollow: before, filled: after")
