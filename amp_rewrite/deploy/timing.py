"""Benchmark of models side by side: latency and memory."""

from __future__ import annotations

import os
import tempfile
import timeit
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from amp_rewrite.deploy.benchmark import (
    BenchEntry,
    Benchmark,
    Timing,
    interleaved,
    runs_per_round,
    speed_up,
)
from amp_rewrite.deploy.measurement import device_name, peak_memory
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import FeedError, MachineError, ModelError, PolicyError, spelled
from amp_rewrite.evidence.data.feed import Batch, Feed
from amp_rewrite.evidence.opening import low_types, name_of, open_on, session_on, usual_provider
from amp_rewrite.files.model import Model, ModelSource
from amp_rewrite.runtime.installation import packages, require
from amp_rewrite.runtime.ports import input_ports
from amp_rewrite.runtime.providers import cuda_options
from amp_rewrite.runtime.runner import CPU, CUDA, MOST_THREADS, Runner
from amp_rewrite.settings.option import Data, checked
from amp_rewrite.version import VERSION

Tell = Callable[[str, int, int], None]

_WARM = 10  # runs of each model that do not count


@checked
def bench(
    models: Sequence[ModelSource],
    data: Data,
    *,
    provider: str | None = None,
    rounds: int = 20,
    memory: bool = True,
    threads: int = 0,
    progress: Tell | None = None,
) -> Benchmark:
    """Measure latency and peak memory of models on the first batch of `data`.

    Latency is that of single runs: ten of each model first, then `rounds` of about 50 ms in which all take turns.
    Inputs and outputs stay on the device. On CUDA a float32 baseline runs twice, without TF32 and with it; other models
    run with the options that `Session` chooses.

    Args:
        models: as `Model.load` takes them; the first one is the baseline.
        data: a Feed, or an argument of `Feed.of`; each model gets it in the types of its inputs.
        provider: the one that must open; None: CUDA where it opens, else the CPU.
        rounds: number of rounds.
        memory: measure the peak, in a process of its own for each model.
        threads: for one op; 0: one per core.
        progress: called as `progress(stage, done, total)`.

    Returns:
        Latencies with confidence intervals, and memory.

    Raises:
        ModelError: a model does not open or run; names the model.
        FeedError: the data do not fit the models.
        PolicyError: an argument has an unknown value.

    Example:
        >>> import amp_rewrite
        >>> few = {"rounds": 2, "memory": False, "provider": "CPUExecutionProvider"}
        >>> len(amp_rewrite.bench(["model.onnx"], "batches.npz", **few).entries)
        1
    """
    _check(models, rounds, threads)
    require("bench")
    tell = progress or (lambda stage, done, total: None)
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-") as folder:
        sides = candidates(models, data, usual_provider(provider), threads, Path(folder))
        pairs = []
        for number, side in enumerate(sides):
            tell("open sessions", number, len(sides))
            pairs.append((side, side.opened()))
        first = sides[0]
        entries, runs = _timed(pairs, rounds, tell)
        notes = [note for pair in pairs for note in _remarks(*pair)]
        del pairs  # the measurements below need the device for themselves
        for number, side in enumerate(sides if memory else ()):
            tell("memory", number, len(sides))
            entries[number] = replace(entries[number], **side.weighed())
    feed = Feed.of(data, first.model)
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in first.batch.items())
    return Benchmark(
        first.provider,
        device_name(first.provider),
        {"amp-rewrite": VERSION, **{package.name: package.version for package in packages()}},
        f"{feed.origin}: {shapes}",
        rounds,
        runs,
        _WARM,
        tuple(entries),
        (*notes, *_notes(entries, first.provider, feed.random)),
    )


# -- models ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A model in one mode, its file, and its batch. `number`: its position among the given models."""

    number: int
    name: str
    model: Model
    file: Path
    batch: Batch
    provider: str
    types: tuple[str, ...]
    threads: int
    tf32: bool = False

    @property
    def options(self) -> dict[str, str]:
        """Options of its provider beside those of the model."""
        return {"use_tf32": "1"} if self.tf32 and self.provider == CUDA else {}

    def opened(self) -> Runner:
        """Open the model on its provider. Raise ModelError, naming it, if it does not open there."""
        return open_on(self.model, self.name, session_on(self.provider, self.threads, self.options))

    def weighed(self) -> dict[str, Any]:
        """Return its memory, measured in a process of its own, or the fault."""
        try:
            return {"memory": peak_memory(self.file, self.batch, self.provider, self.threads, self.options)}
        except MachineError as fault:
            return {"fault": str(fault)}


def candidates(models: Sequence[object], data: object, provider: str, threads: int, folder: Path) -> list[Candidate]:
    """Return the models, and a float32 baseline on CUDA again with TF32.

    `folder`: for models that are not files. FeedError and ModelError name the model.
    """
    sides: list[Candidate] = []
    feed: Feed | None = None
    for number, (source, name) in enumerate(zip(models, distinct_names(models), strict=True)):
        model = Model.load(source)
        feed = feed or Feed.of(data, model)
        batch = _fitting(next(iter(feed)), model, name)
        file = _file(source, model, folder / f"{number}.onnx")
        types = low_types(model)
        sides.append(Candidate(number, name, model, file, batch, provider, types, threads))
        if number == 0 and provider == CUDA and not types:
            sides.append(replace(sides[0], name=f"{name} with TF32", tf32=True))
    return sides


def distinct_names(models: Sequence[object]) -> list[str]:
    """Return the file names of the models, numbered from the second of a name on."""
    names = [name_of(source, f"model {number}") for number, source in enumerate(models)]
    return [f"{name} ({names[:i].count(name) + 1})" if name in names[:i] else name for i, name in enumerate(names)]


def _fitting(batch: Batch, model: Model, name: str) -> Batch:
    """Return the inputs of a model from a batch, in its types. Raise FeedError, naming the model, for a misfit."""
    ports = {port.name for port in input_ports(model)}
    mine = {key: array for key, array in batch.items() if key in ports}
    try:
        return next(iter(Feed.of(mine, model, allow_nonfinite=True)))
    except FeedError as error:
        raise FeedError(f"{name}: {error}") from error


def _file(source: object, model: Model, spare: Path) -> Path:
    if isinstance(source, (str, os.PathLike)):
        return Path(source)
    model.save(spare)
    return spare


# -- measurements ------------------------------------------------------------------------------------


def _timed(pairs: Sequence[tuple[Candidate, Runner]], rounds: int, tell: Tell) -> tuple[list[BenchEntry], int]:
    calls: dict[str, Callable[[], object]] = {c.name: r.bind(c.batch).run for c, r in pairs}
    latencies = []
    tell("warm up", 0, 1)
    for name, call in calls.items():
        try:
            latencies.append(min(timeit.repeat(call, number=1, repeat=_WARM)))
        except ModelError as error:
            raise ModelError(f"{name}: {error}") from error
    runs = runs_per_round(latencies)
    seconds = interleaved(calls, rounds=rounds, runs=runs, progress=partial(tell, "latency"))
    baselines = [c.name for c, _ in pairs if c.number == 0]
    entries = []
    for candidate, _ in pairs:
        mine = seconds[candidate.name]
        speed_ups = {name: speed_up(seconds[name], mine) for name in baselines}
        entries.append(BenchEntry(candidate.name, candidate.types, Timing.of(mine), speed_ups))
    return entries, runs


def _remarks(candidate: Candidate, runner: Runner) -> Iterator[str]:
    arrays = [value for value in runner.run(candidate.batch).values() if isinstance(value, np.ndarray)]
    arrays = [array for array in arrays if array.dtype.kind == "f" or array.dtype == DType.BFLOAT16.numpy]
    bad = sum(int(np.count_nonzero(~np.isfinite(array))) for array in arrays)
    if bad:
        numbers = sum(array.size for array in arrays)
        yield f"{candidate.name} gives NaN or infinity for {bad} of {numbers} numbers; `amp-rewrite verify` compares"
    if runner.provider == CUDA and (cost := cuda_options(candidate.model).cost):
        yield f"{candidate.name}: {cost}"


def _notes(entries: Sequence[BenchEntry], provider: str, random: bool) -> Iterator[str]:
    yield from (f"memory of {entry.name} was not measured: {entry.fault}" for entry in entries if entry.fault)
    if provider == CPU and any(entry.types for entry in entries):
        yield "CPU: half precision is slower here; onnxruntime computes most of it in float32, between Casts"
    if provider == CUDA:
        yield "float32 is computed without TF32 unless the name says so; onnxruntime's own default is with it"
    if random:
        yield "the data are random: a model whose work depends on its data may take another time on yours"


def _check(models: Sequence[object], rounds: int, threads: int) -> None:
    if not models:
        raise PolicyError("no model given; give at least one")
    if rounds < 1:
        raise PolicyError(f"{spelled('rounds', rounds)} is too small; give at least 1")
    if threads > MOST_THREADS:
        raise PolicyError(
            f"{spelled('threads', threads)} is too many; give at most {MOST_THREADS}, or leave it out for one per core"
        )
