"""Rows of one model: all ways alternating (`latency`), and CUDA graphs, NHWC, queued runs and energy (`variants`)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx

from amp_rewrite.runtime.providers import CHANNELS_LAST
from benchmarks.gpu.gpu_session import CUDA, Card, Opened, batch_of, open_way
from benchmarks.gpu.gpu_turns import error, ratio, timed
from benchmarks.gpu.gpu_ways import BASELINES, files

CHOSEN = ("tf32", "amp", "torch_half", "ort_opt")
"""Ways to time in variants: the fast baselines and this package's conversion."""
CAPTURED = 3
"""Runs until onnxruntime has recorded a CUDA graph: two plain ones, and the recording."""
Row = dict[str, Any]


def latency(job: Mapping[str, Any]) -> Row:
    """Time all ways of a model in one process; return ratios, errors relative to float32, memory and faults."""
    folder, provider, card = Path(job["models"]), job["provider"], Card()
    batch = batch_of(folder, job["model"])
    faults: dict[str, str] = {way: f"not converted: {why}" for way, why in job["missing"].items()}
    row: Row = {"faults": faults, "memory": {}, "error": {}, "open": {}}
    ready: dict[str, Opened] = {}
    expected = None
    for way, file in files(folder, job["model"]).items():
        if way == "tf32" and provider != CUDA:
            continue
        before, start = card.used(), time.perf_counter()
        try:
            more = {"arena_extend_strategy": "kSameAsRequested"} if provider == CUDA else {}
            opened = open_way(way, file, batch, provider, **more)
            opened.run()
            opened.run()
        except Exception as fault:  # noqa: BLE001  # onnxruntime's errors have no common base class
            faults[way] = _line(fault)
            continue
        row["open"][way] = time.perf_counter() - start
        if before is not None and ready:  # the first one also includes context and libraries
            row["memory"][way] = (card.used() or 0) - before
        found = opened.outputs()
        expected = found if expected is None else expected
        row["error"][way] = error(expected, found)
        ready[way] = opened
    if not ready:
        raise LookupError(f"no way of {job['model']} runs: {next(iter(faults.values()), 'there is no file')}")
    row["time"] = timed({way: one.run for way, one in ready.items()}, job["rounds"], job["warm"], card.now)
    times = row["time"]
    bases = [base for base in BASELINES if base in times]
    row["ratio"] = {way: {base: ratio(times[base], times[way]) for base in bases} for way in times}
    return row


def variants(job: Mapping[str, Any]) -> Row:
    """Time chosen ways plain, with a CUDA graph, in NHWC for convolutions, and queued, with their energy."""
    folder, provider, card = Path(job["models"]), job["provider"], Card()
    batch, row = batch_of(folder, job["model"]), {"faults": {}, "rate": {}}
    ready: dict[str, Opened] = {}
    there = files(folder, job["model"])
    for way, word, settings in _variants(there):
        if provider != CUDA and (way == "tf32" or word == "nhwc"):
            continue
        key = f"{way} {word}"
        try:
            opened = open_way(way, there[way], batch, provider, graph=word == "graph", **settings)
            for _ in range(CAPTURED):
                opened.run()
            ready[key] = opened
        except Exception as fault:  # noqa: BLE001
            row["faults"][key] = _line(fault)
    if not ready:
        raise LookupError(f"no variant of {job['model']} runs: {next(iter(row['faults'].values()), 'no file')}")
    rounds = max(job["rounds"] // 2, 1)
    row["time"] = timed({key: one.run for key, one in ready.items()}, rounds, job["warm"], card.now)
    for key, one in ready.items():
        row["rate"][key] = _queued(one, card, row["time"][key]["median"], job["queued"])
    return row


def _variants(there: Mapping[str, Path]) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield ways with the name of a setting and its provider options."""
    chosen = [way for way in CHOSEN if way in there]
    yield from ((way, "plain", {}) for way in chosen)
    yield from ((way, "graph", {}) for way in chosen)
    if has_convolutions(there["float32"]):
        yield from ((way, "nhwc", dict(CHANNELS_LAST)) for way in chosen)


def has_convolutions(file: Path) -> bool:
    """Return True if a model has convolutions, which depend on the image layout."""
    model = onnx.load(file, load_external_data=False)
    return any(node.op_type == "Conv" for node in model.graph.node)


def _queued(one: Opened, card: Card, seconds: float, least: float) -> dict[str, Any]:
    """Return the seconds and joules of one of many queued runs."""
    times = max(int(least / seconds), 3)
    one.run()
    before, start = card.joules(), time.perf_counter()
    for _ in range(times):
        one.start()
    one.run()
    took = (time.perf_counter() - start) / (times + 1)
    after = card.joules()
    joules = None if before is None or after is None else (after - before) / (times + 1)
    return {"seconds": took, "joules": joules, "card": card.now()}


def _line(fault: Exception) -> str:
    return " ".join(f"{type(fault).__name__}: {fault}".split())[:300]
