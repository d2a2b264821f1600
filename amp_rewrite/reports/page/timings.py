"""Charts of a benchmark: latency with its spread, memory, throughput by batch size, and the time of ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from amp_rewrite.errors import count
from amp_rewrite.reports.page.axis import number_text
from amp_rewrite.reports.page.described import Bar, Bars, Chart, Curves, Move, Moves
from amp_rewrite.reports.page.described_figure import described_figure
from amp_rewrite.reports.page.figure import Figure
from amp_rewrite.reports.page.markup import short
from amp_rewrite.reports.render import size

_CHANGED = 12
"""Ops of each direction that a chart of changes names."""
_STRETCH = 3
"""Times the longest median that an axis of latencies reaches; a rare slow run would squeeze the medians."""


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
    """Return `latency_chart` as a figure; it takes the same."""
    return described_figure(latency_chart(timed, where, notes))


def memory_figure(timed: Sequence[Timed]) -> Figure | None:
    """Return `memory_chart` as a figure; None if memory was not measured."""
    return _figure(memory_chart(timed))


def throughput_figure(swept: Sequence[Swept]) -> Figure | None:
    """Return `throughput_chart` as a figure; None if no batch sizes were measured."""
    return _figure(throughput_chart(swept))


def ops_figure(model: str, moved: Sequence[Moved], number: int) -> Figure:
    """Return `ops_chart` as a figure; it takes the same."""
    return described_figure(ops_chart(model, moved, number))


def _figure(chart: Chart | None) -> Figure | None:
    return None if chart is None else described_figure(chart)


def latency_chart(timed: Sequence[Timed], where: str, notes: Sequence[str] = ()) -> Bars:
    """Return the latency of models.

    Args:
        timed: the models, the baseline first.
        where: device and provider.
        notes: caveats.
    """
    milli = [[1e3 * seconds for seconds in (t.p5, t.median, t.p95, t.with_copies)] for t in timed]
    longest = _STRETCH * max((max(median, copies) for _, median, _, copies in milli), default=0.0)
    bars = [
        Bar(t.model, median, f"{median:.4g} ms", (p5, p95), copies)
        for t, (p5, median, p95, copies) in zip(timed, milli, strict=True)
    ]
    lead = f"Median latency on {short(where)}, with the 5th and the 95th percentile; the first model is the baseline."
    if any(p95 > longest for _, _, p95, _ in milli):
        lead += " Percentiles beyond the axis end at an arrow; the numbers are below."
    cells = [[t.model, *(f"{n:.4g}" for n in (m, p5, p95, c))] for t, (p5, m, p95, c) in zip(timed, milli, strict=True)]
    entries = [{name: getattr(t, name) for name in ("model", "median", "p5", "p95", "with_copies")} for t in timed]
    return Bars(
        "latency",
        "Latency",
        lead,
        ("model", "median ms", "5th percentile", "95th percentile", "with copies"),
        cells,
        {"where": where, "models": entries, "notes": list(notes)},
        tuple(notes),
        unit="ms per run",
        bars=bars,
        mark="with copies to and from numpy",
        longest=longest,
    )


def memory_chart(timed: Sequence[Timed]) -> Bars | None:
    """Return the peak memory of models; None if it was not measured.

    Args:
        timed: the models, the baseline first.
    """
    measured = [(t.model, t.memory) for t in timed if t.memory is not None]
    if not measured:
        return None
    return Bars(
        "memory",
        "Memory",
        "Peak memory of each model, in a process of its own; the first model is the baseline.",
        ("model", "bytes"),
        [(model, str(memory)) for model, memory in measured],
        {"models": [{"model": t.model, "memory": t.memory} for t in timed]},
        unit="MB",
        bars=[Bar(model, memory / 1e6, size(memory)) for model, memory in measured],
    )


def throughput_chart(swept: Sequence[Swept]) -> Curves | None:
    """Return the throughput by batch size; None if no sizes were measured.

    Args:
        swept: models at batch sizes.
    """
    if not swept:
        return None
    models = dict.fromkeys(s.model for s in swept)
    return Curves(
        "throughput",
        "Throughput",
        "Items per second by batch size, from the median run.",
        ("model", "batch", "items/s"),
        [(s.model, str(s.batch), f"{s.throughput:.4g}") for s in swept],
        {"rows": [asdict(s) for s in swept]},
        across="batch",
        upward="items per second",
        curves={model: [(s.batch, s.throughput) for s in swept if s.model == model] for model in models},
    )


def ops_chart(model: str, moved: Sequence[Moved], number: int) -> Moves:
    """Return the time of a model's ops before and after.

    Args:
        model: its name.
        moved: its ops, and those of the baseline.
        number: position of the model among those compared with the baseline, from 1.
    """
    order = sorted(moved, key=lambda m: -m.change)
    slower = [m for m in order if m.change > 0][:_CHANGED]
    faster = [m for m in reversed(order) if m.change < 0][:_CHANGED]
    shown = [*slower, *reversed(faster)]
    total = 1e6 * sum(m.change for m in moved)
    lead = (
        f"Time of ops in {short(model)} against the baseline: {count(sum(m.change > 0 for m in moved), 'op')} slower,"
        f" {sum(m.change < 0 for m in moved)} faster, {total:+.1f} µs in all. Those that changed most are drawn,"
        f" {_CHANGED} of each direction at most."
    )
    change = sum(m.change for m in moved)
    return Moves(
        "ops" if number == 1 else f"ops-{number}",
        f"Time of ops: {short(model)}",
        lead,
        ("op", "type", "before µs", "after µs", "difference"),
        [(m.op, m.kind, _us(m.before), _us(m.after), f"{1e6 * m.change:+.1f}") for m in shown],
        {"model": model, "ops": [asdict(m) for m in shown], "compared": len(moved), "change": change},
        unit="µs per run",
        moves=[
            Move(f"{m.op or '(no name)'} ({m.kind})", _micro(m.before), _micro(m.after), f"{1e6 * m.change:+.1f} µs")
            for m in shown
        ],
        words=("slower", "faster"),
    )


def _micro(seconds: float | None) -> float | None:
    return None if seconds is None else 1e6 * seconds


def _us(seconds: float | None) -> str:
    return number_text(None) if seconds is None else f"{1e6 * seconds:.1f}"
