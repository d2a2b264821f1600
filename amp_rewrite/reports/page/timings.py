"""Figures of a benchmark: latency with its spread, memory, throughput by batch size, and the time of ops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from xml.etree.ElementTree import Element

from amp_rewrite.errors import count
from amp_rewrite.reports.page.axis import Axis, number_text
from amp_rewrite.reports.page.bars import spot, stretch, whisker
from amp_rewrite.reports.page.chart import Line, numbers, plot, remarks, rows, sample
from amp_rewrite.reports.page.figure import Figure
from amp_rewrite.reports.page.marks import dots, polyline
from amp_rewrite.reports.page.markup import element, short
from amp_rewrite.reports.render import size

_CHANGED = 12
"""Ops of each direction that a chart of changes names."""
_STRETCH = 3
"""Times the longest median that an axis of latencies reaches; a rare slow run would squeeze the medians."""
_DASHES = ("low", "high", "cast", "muted")
"""Classes of the lines of models, in turn."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One model: seconds of the median run and of the 5th and 95th percentile, and peak bytes if measured."""

    model: str
    median: float
    p5: float
    p95: float
    with_copies: float
    memory: int | None


@dataclass(frozen=True, slots=True)
class Swept:
    """One model at one batch size: items per second."""

    model: str
    batch: int
    throughput: float


@dataclass(frozen=True, slots=True)
class Moved:
    """An op before and after, in seconds of a run; None on a side that lacks it."""

    op: str
    kind: str
    before: float | None
    after: float | None

    @property
    def change(self) -> float:
        return (self.after or 0.0) - (self.before or 0.0)


def latency_figure(timed: Sequence[Timed], where: str, notes: Sequence[str] = ()) -> Figure:
    """Return the latency of models as a figure.

    Args:
        timed: the models, the baseline first.
        where: device and provider.
        notes: caveats.
    """
    milli = [[1e3 * seconds for seconds in (t.p5, t.median, t.p95, t.with_copies)] for t in timed]
    longest = _STRETCH * max((max(median, copies) for _, median, _, copies in milli), default=0.0)
    axis = Axis.linear("ms per run", [min(number, longest) for four in milli for number in four], zero=True)
    lines = []
    for t, (p5, median, p95, copies) in zip(timed, milli, strict=True):
        bar = stretch(axis, 0.0, median, "high" if t is timed[0] else "low", f"median {median:.4g} ms")
        marks = [*bar, *whisker(axis, p5, p95), *spot(axis, copies, "hollow", f"with copies {copies:.4g} ms")]
        lines.append(Line(t.model, marks, f"{median:.4g} ms"))
    lead = f"Median latency on {short(where)}, with the 5th and the 95th percentile; the first model is the baseline."
    if any(p95 > longest for _, _, p95, _ in milli):
        lead += " Percentiles beyond the axis end at an arrow; the numbers are below."
    legend = [
        sample("high", "baseline"),
        *([sample("low", "other models")] if len(timed) > 1 else []),
        sample("hollow", "with copies to and from numpy", "dot"),
    ]
    head = ("model", "median ms", "5th percentile", "95th percentile", "with copies")
    cells = ((t.model, *(f"{number:.4g}" for number in (m, p5, p95, c))) for t, (p5, m, p95, c) in _zip(timed, milli))
    table = numbers(head, cells, right=4)
    drawing = element("div", rows(axis, lines, name=lead, legend=legend), *remarks(notes), table)
    entries = [{name: getattr(t, name) for name in ("model", "median", "p5", "p95", "with_copies")} for t in timed]
    return Figure(
        "latency", "Latency", lead, drawing, {"where": where, "models": entries, "notes": list(notes)}, notebook=True
    )


def memory_figure(timed: Sequence[Timed]) -> Figure | None:
    """Return the peak memory of models as a figure; None if it was not measured.

    Args:
        timed: the models, the baseline first.
    """
    measured = [(t, t.memory) for t in timed if t.memory is not None]
    if not measured:
        return None
    axis = Axis.linear("MB", [memory / 1e6 for _, memory in measured], zero=True)
    lines = [
        Line(t.model, stretch(axis, 0.0, memory / 1e6, "high" if t is timed[0] else "low", size(memory)), size(memory))
        for t, memory in measured
    ]
    lead = "Peak memory of each model, in a process of its own; the first model is the baseline."
    table = numbers(("model", "bytes"), ((t.model, str(memory)) for t, memory in measured), right=1)
    drawn = {"models": [{"model": t.model, "memory": t.memory} for t in timed]}
    return Figure("memory", "Memory", lead, element("div", rows(axis, lines, name=lead), table), drawn, notebook=True)


def throughput_figure(swept: Sequence[Swept]) -> Figure | None:
    """Return the throughput by batch size as a figure; None if no sizes were measured.

    Args:
        swept: models at batch sizes.
    """
    if not swept:
        return None
    x = Axis.logarithmic("batch", [s.batch for s in swept])
    y = Axis.logarithmic("items per second", [s.throughput for s in swept])
    models = list(dict.fromkeys(s.model for s in swept))
    marks, legend = [], []
    for i, model in enumerate(models):
        kind = _DASHES[i % len(_DASHES)]
        points = [(s.batch, s.throughput) for s in swept if s.model == model]
        marks += polyline(x, y, points, kind)
        marks += dots(x, y, ((b, n, f"{model}: {n:.4g} items/s at batch {b}") for b, n in points), kind)
        legend.append(sample(kind, model, "line"))
    lead = "Items per second by batch size, from the median run."
    head = ("model", "batch", "items/s")
    table = numbers(head, ((s.model, str(s.batch), f"{s.throughput:.4g}") for s in swept), right=2)
    drawing = element("div", plot(x, y, marks, name=lead, legend=legend), table)
    return Figure("throughput", "Throughput", lead, drawing, {"rows": [asdict(s) for s in swept]}, notebook=True)


def ops_figure(model: str, moved: Sequence[Moved], number: int) -> Figure:
    """Return the time of a model's ops before and after as a figure.

    Args:
        model: its name.
        moved: its ops, and those of the baseline.
        number: position of the model among those compared with the baseline, from 1.
    """
    order = sorted(moved, key=lambda m: -m.change)
    slower = [m for m in order if m.change > 0][:_CHANGED]
    faster = [m for m in reversed(order) if m.change < 0][:_CHANGED]
    shown = [*slower, *reversed(faster)]
    axis = Axis.linear("µs per run", [1e6 * s for m in shown for s in (m.before, m.after) if s is not None], zero=True)
    lines = [
        Line(f"{m.op or '(no name)'} ({m.kind})", list(_dumbbell(axis, m)), f"{1e6 * m.change:+.1f} µs") for m in shown
    ]
    total = 1e6 * sum(m.change for m in moved)
    lead = (
        f"Time of ops in {short(model)} against the baseline: {count(sum(m.change > 0 for m in moved), 'op')} slower,"
        f" {sum(m.change < 0 for m in moved)} faster, {total:+.1f} µs in all. Those that changed most are drawn,"
        f" {_CHANGED} of each direction at most."
    )
    legend = [
        sample("hollow", "before", "dot"),
        sample("high", "after, slower", "dot"),
        sample("low", "after, faster", "dot"),
    ]
    head = ("op", "type", "before µs", "after µs", "difference")
    cells = ((m.op, m.kind, _us(m.before), _us(m.after), f"{1e6 * m.change:+.1f}") for m in shown)
    drawing = element("div", rows(axis, lines, name=lead, legend=legend), numbers(head, cells, right=3))
    drawn = {
        "model": model,
        "ops": [asdict(m) for m in shown],
        "compared": len(moved),
        "change": sum(m.change for m in moved),
    }
    name = "ops" if number == 1 else f"ops-{number}"
    return Figure(name, f"Time of ops: {short(model)}", lead, drawing, drawn, notebook=True)


def _dumbbell(axis: Axis, moved: Moved) -> Iterator[Element]:
    kind = "high" if moved.change > 0 else "low"
    ends = sorted(1e6 * (seconds or 0.0) for seconds in (moved.before, moved.after))
    yield from stretch(axis, ends[0], ends[1], "muted")
    if moved.before is not None:
        yield from spot(axis, 1e6 * moved.before, "hollow", f"before {_us(moved.before)} µs")
    if moved.after is not None:
        yield from spot(axis, 1e6 * moved.after, kind, f"after {_us(moved.after)} µs")


def _us(seconds: float | None) -> str:
    return number_text(None) if seconds is None else f"{1e6 * seconds:.1f}"


def _zip(timed: Sequence[Timed], milli: Sequence[Sequence[float]]) -> Iterator[tuple[Timed, Sequence[float]]]:
    return zip(timed, milli, strict=True)
