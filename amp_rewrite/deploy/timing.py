"""Benchmark of models side by side: latency, memory, and slower ops."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from amp_rewrite.deploy.benchmark import (
    MOST_RUNS,
    BenchEntry,
    Benchmark,
    OpChanges,
    Timing,
    interleaved,
    runs_per_round,
    speed_up,
    warm_up,
)
from amp_rewrite.deploy.measurement import JobResult, OpTime, apart, changes, device_name
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import FeedError, ModelError, PolicyError, spelled
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
_Calls = dict[str, Callable[[], object]]

_WARM = 10  # runs of each model that do not count
_MOST = 10**7  # runs of a model: a day of those that take 10 ms


@checked
def bench(
    models: Sequence[ModelSource],
    data: Data,
    *,
    provider: str | None = None,
    rounds: int = 20,
    runs: int | None = None,
    memory: bool = True,
    threads: int = 0,
    progress: Tell | None = None,
) -> Benchmark:
    """Measure latency and peak memory of models on the first batch of `data`, and the time of slower ops.

    Latency is that of single runs: ten of each model first, then `rounds` in which all take turns, with `runs` of
    each, once with inputs and outputs that stay on the device, once with copies. On CUDA a float32 baseline runs twice,
    without TF32 and with it; other models run with the options that `Session` chooses.

    Args:
        models: as `Model.load` takes them; the first one is the baseline.
        data: a Feed, or an argument of `Feed.of`; each model gets it in the types of its inputs.
        provider: the one that must open; None: CUDA where it opens, else the CPU.
        rounds: number of rounds.
        runs: of each model in a round; None: as many as take 50 ms.
        memory: measure the peak, and the time of each op, in a process of its own for each model.
        threads: for one op; 0: one per core.
        progress: called as `progress(stage, done, total)`.

    Returns:
        Latencies with confidence intervals, memory and changed ops.

    Raises:
        ModelError: a model does not open or run; names the model.
        FeedError: the data do not fit the models.
        PolicyError: an argument has an unknown value.

    Example:
        >>> import amp_rewrite
        >>> few = {"rounds": 2, "runs": 1, "memory": False, "provider": "CPUExecutionProvider"}
        >>> len(amp_rewrite.bench(["model.onnx"], "batches.npz", **few).entries)
        1
    """
    _check(models, rounds, runs, threads)
    require("bench")
    tell = progress or (lambda stage, done, total: None)
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-") as folder:
        sides = candidates(models, data, usual_provider(provider), threads, Path(folder))
        pairs = [(side, side.opened()) for side in sides]
        first = sides[0]
        entries, per_round = _timed(pairs, rounds, runs, tell)
        notes = [note for pair in pairs for note in _remarks(*pair)]
        del pairs  # the measurements below need the device for themselves
        profiles: dict[str, tuple[OpTime, ...]] = {}
        for number, side in enumerate(sides if memory else ()):
            outcome = side.measured(profile=len(models) > 1 and not side.tf32)
            entries[number] = replace(entries[number], memory=outcome.memory, fault=outcome.fault)
            profiles |= {side.name: outcome.ops} if outcome.ops else {}
            tell("memory and ops", number + 1, len(sides))
        before = profiles.pop(first.name, ())
        changed = tuple(OpChanges(name, changes(before, ops)) for name, ops in profiles.items() if before)
    feed = Feed.of(data, first.model)
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in first.batch.items())
    return Benchmark(
        first.provider,
        device_name(first.provider),
        {"amp-rewrite": VERSION, **{package.name: package.version for package in packages()}},
        f"{feed.origin}: {shapes}",
        rounds,
        per_round,
        _WARM,
        tuple(entries),
        changed,
        (*notes, *_notes(entries, first.provider, feed.random, bool(changed))),
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

    def measured(self, *, profile: bool) -> JobResult:
        """Measure its memory, and the time of each op, in a process of its own."""
        return apart(self.file, self.batch, self.provider, threads=self.threads, options=self.options, profile=profile)


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
    """Return distinct names of the models: file names, else paths; numbered if still equal."""
    names = [name_of(source, f"model {number}") for number, source in enumerate(models)]
    if len(set(names)) < len(names):
        pairs = zip(models, names, strict=True)
        names = [str(source) if isinstance(source, (str, os.PathLike)) else name for source, name in pairs]
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


def _timed(
    pairs: Sequence[tuple[Candidate, Runner]], rounds: int, runs: int | None, tell: Tell
) -> tuple[list[BenchEntry], int]:
    bound: _Calls = {c.name: r.bind(c.batch).run for c, r in pairs}
    copying: _Calls = {c.name: partial(r.run, c.batch) for c, r in pairs}
    latencies = []
    for name, call in (*bound.items(), *copying.items()):
        try:
            latencies.append(warm_up(call, _WARM))
        except ModelError as error:
            raise ModelError(f"{name}: {error}") from error
    runs = runs or runs_per_round(latencies)
    seconds = interleaved(bound, rounds=rounds, runs=runs, progress=partial(tell, "latency"))
    copies = interleaved(copying, rounds=rounds, runs=runs, progress=partial(tell, "latency with copies"))
    baselines = [c.name for c, _ in pairs if c.number == 0]
    entries = []
    for candidate, _ in pairs:
        mine = seconds[candidate.name]
        timings = Timing.of(mine), Timing.of(copies[candidate.name])
        speed_ups = {name: speed_up(seconds[name], mine) for name in baselines}
        entries.append(BenchEntry(candidate.name, candidate.types, candidate.tf32, *timings, speed_ups))
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


def _notes(entries: Sequence[BenchEntry], provider: str, random: bool, profiled: bool) -> Iterator[str]:
    yield from (f"memory and ops of {entry.name} were not measured: {entry.fault}" for entry in entries if entry.fault)
    if provider == CPU and any(entry.types for entry in entries):
        yield "CPU: half precision is slower here; onnxruntime computes most of it in float32, between Casts"
    if provider == CUDA:
        yield "float32 is computed without TF32 unless the name says so; onnxruntime's own default is with it"
    if provider == CUDA and profiled:
        yield "ops are timed with CUDA_LAUNCH_BLOCKING=1, one after the other: they add up to more than a run"
    if random:
        yield "the data are random: a model whose work depends on its data may take another time on yours"


def _check(models: Sequence[object], rounds: int, runs: int | None, threads: int) -> None:
    if not models:
        raise PolicyError("no model given; give at least one")
    for name, number in (("rounds", rounds), ("runs", runs)):
        if number is not None and number < 1:
            raise PolicyError(f"{spelled(name, number)} is too small; give at least 1")
    if rounds * (runs or MOST_RUNS) > _MOST:
        raise PolicyError(f"{rounds} rounds of {runs or MOST_RUNS} runs are more than {_MOST} runs; give fewer")
    if threads > MOST_THREADS:
        raise PolicyError(
            f"{spelled('threads', threads)} is too many; give at most {MOST_THREADS}, or leave it out for one per core"
        )
