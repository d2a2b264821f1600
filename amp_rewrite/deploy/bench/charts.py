"""Charts of a benchmark: latency with its spread, memory, throughput by batch size, and the time of ops."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

from amp_rewrite.deploy.bench.entry import BenchEntry, OpChanges
from amp_rewrite.deploy.bench.profile import OpTime
from amp_rewrite.errors import count
from amp_rewrite.reports.page.chart_data import Bar, Bars, Curves, Move, Moves
from amp_rewrite.reports.page.markup import short
from amp_rewrite.reports.render import size

_CHANGED = 12
"""Ops of each direction that a chart of changes names."""
_STRETCH = 3
"""Times the longest median that an axis of latencies reaches; a rare slow run would squeeze the medians."""


def latency_chart(entries: Sequence[BenchEntry], where: str, notes: Sequence[str] = ()) -> Bars:
    """Return the latency of models, the baseline first. `where`: device and provider."""
    timed = [(e.latency.median, e.latency.p5, e.latency.p95, e.copies.median) for e in entries]
    milli = [(e.name, [1e3 * seconds for seconds in times]) for e, times in zip(entries, timed, strict=True)]
    longest = _STRETCH * max((max(median, copies) for _, (median, _, _, copies) in milli), default=0.0)
    lead = f"Median latency on {short(where)}, with the 5th and the 95th percentile; the first model is the baseline."
    if any(p95 > longest for _, (_, _, p95, _) in milli):
        lead += " Percentiles beyond the axis end at an arrow; the numbers are below."
    names = ("median", "p5", "p95", "with_copies")
    models = [{"model": e.name, **dict(zip(names, row, strict=True))} for e, row in zip(entries, timed, strict=True)]
    return Bars(
        "latency",
        "Latency",
        lead,
        ("model", "median ms", "5th percentile", "95th percentile", "with copies"),
        [[name, *(f"{n:.4g}" for n in times)] for name, times in milli],
        {"where": where, "models": models, "notes": list(notes)},
        tuple(notes),
        unit="ms per run",
        bars=[Bar(name, m, f"{m:.4g} ms", (p5, p95), copies) for name, (m, p5, p95, copies) in milli],
        mark="with copies to and from numpy",
        longest=longest,
    )


def memory_chart(entries: Sequence[BenchEntry]) -> Bars | None:
    """Return the peak memory of models, the baseline first; None if it was not measured."""
    measured = [(e.name, e.memory) for e in entries if e.memory is not None]
    if not measured:
        return None
    return Bars(
        "memory",
        "Memory",
        "Peak memory of each model, in a process of its own; the first model is the baseline.",
        ("model", "bytes"),
        [(model, str(memory)) for model, memory in measured],
        {"models": [{"model": e.name, "memory": e.memory} for e in entries]},
        unit="MB",
        bars=[Bar(model, memory / 1e6, size(memory)) for model, memory in measured],
    )


def throughput_chart(entries: Sequence[BenchEntry]) -> Curves | None:
    """Return the throughput by batch size; None if no sizes were measured."""
    swept = [(e.name, s.items, s.throughput) for e in entries for s in e.sweep if s.throughput is not None]
    if not swept:
        return None
    models = dict.fromkeys(model for model, _, _ in swept)
    return Curves(
        "throughput",
        "Throughput",
        "Items per second by batch size, from the median run.",
        ("model", "batch", "items/s"),
        [(model, str(batch), f"{rate:.4g}") for model, batch, rate in swept],
        {"rows": [{"model": model, "batch": batch, "throughput": rate} for model, batch, rate in swept]},
        across="batch",
        upward="items per second",
        curves={model: [(batch, rate) for name, batch, rate in swept if name == model] for model in models},
    )


def ops_chart(changed: OpChanges, number: int) -> Moves:
    """Return the time of a model's ops before and after. `number`: its position among those compared, from 1."""
    ops, model = changed.ops, short(changed.name)
    order = sorted(ops, key=lambda op: -op.seconds)
    slower = [op for op in order if op.seconds > 0][:_CHANGED]
    faster = [op for op in reversed(order) if op.seconds < 0][:_CHANGED]
    total = fsum(op.seconds for op in ops)
    lead = (
        f"Time of ops in {model} against the baseline: {count(sum(op.seconds > 0 for op in ops), 'op')} slower,"
        f" {sum(op.seconds < 0 for op in ops)} faster, {1e6 * total:+.1f} µs in all. Those that changed most are drawn,"
        f" {_CHANGED} of each direction at most."
    )
    shown = [(op.side, op.before, op.after, f"{1e6 * op.seconds:+.1f}") for op in (*slower, *reversed(faster))]
    data = [{"op": op.name, "kind": op.op, "before": _seconds(b), "after": _seconds(a)} for op, b, a, _ in shown]
    return Moves(
        "ops" if number == 1 else f"ops-{number}",
        f"Time of ops: {model}",
        lead,
        ("op", "type", "before µs", "after µs", "difference"),
        [
            (op.name, op.op, *("–" if s is None else f"{1e6 * s.seconds:.1f}" for s in (b, a)), d)
            for op, b, a, d in shown
        ],
        {"model": changed.name, "ops": data, "compared": len(ops), "change": total},
        unit="µs per run",
        moves=[Move(f"{op.name or '(no name)'} ({op.op})", _micro(b), _micro(a), f"{d} µs") for op, b, a, d in shown],
        words=("slower", "faster"),
    )


def _seconds(op: OpTime | None) -> float | None:
    return None if op is None else op.seconds


def _micro(op: OpTime | None) -> float | None:
    return None if op is None else 1e6 * op.seconds
