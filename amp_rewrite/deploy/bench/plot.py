"""Plot of a benchmark: latencies with their spread, and throughput by batch size. Needs matplotlib."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from amp_rewrite.deploy.bench.result import Benchmark
from amp_rewrite.errors import ReportError, spelled

SUFFIXES = (".svg", ".png", ".pdf")


def check_plot(file: Path, *, overwrite: bool = True) -> None:
    """Raise ReportError if a plot cannot be written to this file, and say why."""
    if file.exists() and not overwrite:
        raise ReportError(f"{file} exists; name another file, or replace it with {spelled('overwrite', True)}")
    if file.suffix.lower() not in SUFFIXES:
        raise ReportError(f"cannot draw to {file}: the suffix selects the format; use {', '.join(SUFFIXES)}")
    if file.is_dir():
        raise ReportError(f"cannot draw to {file}: it is a folder; name a file")
    if not file.parent.is_dir():
        raise ReportError(f"cannot write {file}: the folder {file.parent} does not exist; make it first")
    if find_spec("matplotlib") is None:
        raise ReportError("drawing needs matplotlib, which is not installed; pip install matplotlib")


def plot(benchmark: Benchmark, file: Path) -> None:
    """Draw latency, and throughput if batches were swept, to a file in the format of its suffix."""
    check_plot(file)
    from matplotlib.figure import Figure

    swept = [entry for entry in benchmark.entries if any(row.timing for row in entry.sweep)]
    figure = Figure(figsize=(11 if swept else 6, 4), layout="constrained")
    axes = figure.subplots(1, 2 if swept else 1, squeeze=False)[0]
    _latencies(axes[0], benchmark)
    if swept:
        for entry in swept:
            rows = [row for row in entry.sweep if row.timing]
            axes[1].plot([row.items for row in rows], [row.throughput for row in rows], marker="o", label=entry.name)
        axes[1].set(xscale="log", yscale="log", xlabel="batch", ylabel="items / s", title="throughput")
        axes[1].legend()
    figure.suptitle(f"{benchmark.device}, {benchmark.provider}", fontsize="small")
    figure.savefig(file)


def _latencies(axis: Any, benchmark: Benchmark) -> None:
    """Draw a bar per median, with a whisker from the 5th to the 95th percentile."""
    timings = [entry.latency for entry in benchmark.entries]
    medians = [1e3 * timing.median for timing in timings]
    below = [1e3 * (timing.median - timing.p5) for timing in timings]
    above = [1e3 * (timing.p95 - timing.median) for timing in timings]
    axis.barh([entry.name for entry in benchmark.entries], medians, xerr=[below, above], capsize=3)
    axis.invert_yaxis()
    axis.set(xlabel="ms", title="latency, median and 5th to 95th percentile")
