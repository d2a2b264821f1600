"""Benchmark of models side by side: latency, throughput, memory, and ops that became slower."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from amp_rewrite.deploy.bench.batches import BatchAxis, batch_axis
from amp_rewrite.deploy.bench.candidate import Candidate, candidates
from amp_rewrite.deploy.bench.device import device_name
from amp_rewrite.deploy.bench.entry import BatchTiming, BenchEntry, OpChanges
from amp_rewrite.deploy.bench.memory import with_memory
from amp_rewrite.deploy.bench.profile import changes
from amp_rewrite.deploy.bench.result import Benchmark
from amp_rewrite.deploy.bench.timing import MOST_RUNS, Timing, interleaved, runs_per_round, speed_up, warm_up
from amp_rewrite.deploy.doctor.isolated import runtimes
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import FeedError, ModelError, PolicyError, spelled
from amp_rewrite.evidence.conditions import Conditions
from amp_rewrite.evidence.data.sources import Data
from amp_rewrite.files.model import ModelSource
from amp_rewrite.runtime.installation import require
from amp_rewrite.runtime.runner import CPU, CUDA, MOST_THREADS, Runner
from amp_rewrite.settings.keywords import checked
from amp_rewrite.version import VERSION

Tell = Callable[[str, int, int], None]
_Calls = dict[str, Callable[[], object]]

_LEAST_ROUNDS = 3
_MOST = 10**7  # runs of a model: a day of those that take 10 ms
_SWEEP_SHARE = 4  # one in so many rounds for each size of a sweep


@checked
def bench(
    models: Sequence[ModelSource],
    data: Data,
    *,
    names: Sequence[str] = (),
    provider: str | None = None,
    rounds: int = 20,
    runs: int | None = None,
    warm: int = 10,
    sizes: Sequence[int] = (),
    memory: bool = True,
    profile: bool = True,
    threads: int = 0,
    allow_nonfinite: bool = False,
    seed: int = 0,
    progress: Tell | None = None,
) -> Benchmark:
    """Return how long models take on the first batch of `data`, their peak memory, and the ops that got slower.

    Latency is that of single runs: `warm` of each model first, then `rounds` in which all take turns, with `runs` of
    each, once with inputs and outputs that stay on the device, once with copies. On CUDA a float32 baseline runs twice,
    without TF32 and with it; other float32 models run without.

    Args:
        models: as `Model.load` takes them; the first one is the baseline.
        data: a Feed, or an argument of `Feed.of`; each model gets it in the types of its inputs.
        names: those of the models in the result.
        provider: the one that must open; None: CUDA where it opens, else the CPU.
        rounds: number of rounds.
        runs: of each model in a round; None: as many as take 50 ms.
        warm: runs of each model that are not measured.
        sizes: batches to sweep, where the inputs' first dimension is free.
        memory: measure the peak, each in a process of its own.
        profile: measure the time of each op, in one more process each.
        threads: for one op; 0: one per core.
        allow_nonfinite: accept NaN and infinity in the data.
        seed: that of the bootstrap.
        progress: called as `progress(stage, done, total)`.

    Returns:
        Latencies with confidence intervals, memory and changed ops.

    Raises:
        ModelError: a model does not open or run; names the model.
        FeedError: the data do not fit the models.
        PolicyError: an argument has an unknown value.

    Example:
        >>> import amp_rewrite
        >>> few = {"rounds": 2, "runs": 1, "memory": False, "profile": False, "provider": "CPUExecutionProvider"}
        >>> len(amp_rewrite.bench(["model.onnx"], "batches.npz", **few).entries)
        1
    """
    often = _Repetitions(rounds, runs, warm)
    _check(models, names, {**often._asdict(), "sizes": min(sizes, default=None)})
    if max(rounds * (runs or MOST_RUNS), warm) > _MOST:
        amount = f"{rounds} rounds of {runs or MOST_RUNS} runs after {warm}"
        raise PolicyError(f"{amount} are more than {_MOST} runs; give fewer")
    if threads > MOST_THREADS:
        raise PolicyError(
            f"{spelled('threads', threads)} is too many; give at most {MOST_THREADS}, or leave it out for one per core"
        )
    require("bench")
    conditions = Conditions(allow_nonfinite, names, provider=provider, threads=threads)
    tell = progress or (lambda stage, done, total: None)
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-") as folder:
        sides = candidates(models, data, conditions, Path(folder))
        pairs = [(side, side.opened()) for side in sides]
        first = sides[0]
        axis = batch_axis(pairs[0][1].inputs, first.batch)
        if sizes and axis is None:
            raise FeedError(
                f"no input of {first.name} has a free first dimension, so that its batch has one size; export the model"
                " with a free batch dimension, or ask for no other sizes"
            )
        entries, per_round = _timed(pairs, often, seed, tell)
        notes = [note for pair in pairs for note in _nonfinite(*pair)]
        if axis is not None and sizes:
            swept = _swept(pairs, axis, sorted(set(sizes)), often, tell)
            entries = [replace(entry, sweep=tuple(rows)) for entry, rows in zip(entries, swept, strict=True)]
        del pairs  # the measurements below need the device for themselves
        if memory:
            for number, side in enumerate(sides):
                entries[number] = with_memory(side, entries[number], axis)
                tell("memory", number + 1, len(sides))
        changed = _changed(sides, tell) if profile else ()
    feed = conditions.feed(data, first.model)
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in first.batch.items())
    return Benchmark(
        first.provider,
        device_name(first.provider),
        {"amp-rewrite": VERSION, **{package.name: package.version for package in runtimes()}},
        f"{feed.origin}: {shapes}",
        rounds,
        per_round,
        warm,
        tuple(entries),
        changed,
        (*notes, *_notes(entries, first.provider, feed.random, bool(changed))),
    )


class _Repetitions(NamedTuple):
    """The rounds, the runs of each model in a round (None: as many as take 50 ms), and the runs to warm up."""

    rounds: int
    runs: int | None
    warm: int


def _timed(
    pairs: Sequence[tuple[Candidate, Runner]], often: _Repetitions, seed: int, tell: Tell
) -> tuple[list[BenchEntry], int]:
    """Return an entry of each with its latencies and speed-ups, and the number of runs in a round."""
    bound: _Calls = {c.name: r.bind(c.batch).run for c, r in pairs}
    copying: _Calls = {c.name: partial(r.run, c.batch) for c, r in pairs}
    latencies = []
    for name, call in (*bound.items(), *copying.items()):
        try:
            latencies.append(warm_up(call, often.warm))
        except ModelError as error:
            raise ModelError(f"{name}: {error}") from error
    runs = often.runs or runs_per_round(latencies)
    seconds = interleaved(bound, rounds=often.rounds, runs=runs, progress=partial(tell, "latency"))
    copies = interleaved(copying, rounds=often.rounds, runs=runs, progress=partial(tell, "latency with copies"))
    baselines = [c.name for c, _ in pairs if c.number == 0]
    entries = []
    for candidate, _ in pairs:
        mine = seconds[candidate.name]
        timings = Timing.of(mine), Timing.of(copies[candidate.name])
        speed_ups = {name: speed_up(seconds[name], mine, seed=seed) for name in baselines}
        entries.append(BenchEntry(candidate.name, candidate.types, candidate.tf32, *timings, speed_ups))
    return entries, runs


def _swept(
    pairs: Sequence[tuple[Candidate, Runner]], axis: BatchAxis, sizes: Sequence[int], often: _Repetitions, tell: Tell
) -> list[list[BatchTiming]]:
    """Return for each candidate a row for each size, the smallest first."""
    rounds = max(often.rounds // _SWEEP_SHARE, _LEAST_ROUNDS)
    sweeps: list[list[BatchTiming]] = [[] for _ in pairs]
    for done, items in enumerate(sizes, 1):
        for row, sweep in zip(_at_size(pairs, axis, items, rounds, often.warm), sweeps, strict=True):
            sweep.append(row)
        tell("batch sizes", done, len(sizes))
    return sweeps


def _at_size(
    pairs: Sequence[tuple[Candidate, Runner]], axis: BatchAxis, items: int, rounds: int, warm: int
) -> list[BatchTiming]:
    """Return a row of each candidate for one size, with the reason if it does not run at that size."""
    calls: _Calls = {}
    latencies, faults = [], {}
    for candidate, runner in pairs:
        try:
            call = runner.bind(axis.resized(candidate.batch, items)).run
            latencies.append(warm_up(call, warm))
            calls[candidate.name] = call
        except (ModelError, FeedError) as error:  # too large here, or a shape that the model does not take
            faults[candidate.name] = str(error)
    seconds = interleaved(calls, rounds=rounds, runs=runs_per_round(latencies)) if calls else {}
    timings = {name: Timing.of(taken) for name, taken in seconds.items()}
    return [BatchTiming(items, timings.get(c.name), None, faults.get(c.name, "")) for c, _ in pairs]


def _changed(sides: Sequence[Candidate], tell: Tell) -> tuple[OpChanges, ...]:
    """Return the changes of each other model's ops against the first model without TF32."""
    others = [c for c in sides if c.number]
    profiles = []
    for done, candidate in enumerate((sides[0], *others) if others else (), 1):
        outcome = candidate.profiled()
        if outcome.fault:
            raise ModelError(f"{candidate.name} runs, and its profile fails: {outcome.fault}; leave the profile out")
        profiles.append(outcome.ops)
        tell("profile", done, len(others) + 1)
    return tuple(OpChanges(c.name, changes(profiles[0], ops)) for c, ops in zip(others, profiles[1:], strict=False))


def _nonfinite(candidate: Candidate, runner: Runner) -> Iterator[str]:
    """Yield a note if a model gives NaN or infinity on its batch, because its speed is then meaningless."""
    arrays = [value for value in runner.run(candidate.batch).values() if isinstance(value, np.ndarray)]
    arrays = [array for array in arrays if array.dtype.kind == "f" or array.dtype == DType.BFLOAT16.numpy]
    bad = sum(int(np.count_nonzero(~np.isfinite(array))) for array in arrays)
    if bad:
        numbers = sum(array.size for array in arrays)
        yield f"{candidate.name} gives NaN or infinity for {bad} of {numbers} numbers; `amp-rewrite verify` compares"


def _notes(entries: Sequence[BenchEntry], provider: str, random: bool, profiled: bool) -> Iterator[str]:
    yield from (f"the memory of {entry.name} is not known: {entry.fault}" for entry in entries if entry.fault)
    if provider == CPU and any(entry.types for entry in entries):
        yield "CPU: half precision is slower here; onnxruntime computes most of it in float32, between Casts"
    if provider == CUDA:
        yield "float32 is computed without TF32 unless the name says so; onnxruntime's own default is with it"
    if provider == CUDA and profiled:
        yield "ops are timed with CUDA_LAUNCH_BLOCKING=1, one after the other: they add up to more than a run"
    if random:
        yield "the data are random: a model whose work depends on its data may take another time on yours"


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse batch sizes from a text such as "1,8,64". Raise PolicyError for any other text."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as cause:
        raise PolicyError(f"{text!r} is not a list of batch sizes; write it as 1,8,64") from cause


def _check(models: Sequence[object], names: Sequence[str], counts: Mapping[str, int | None]) -> None:
    if not models:
        raise PolicyError("no model given; give at least one")
    if names and len(names) != len(models):
        raise PolicyError(f"{len(names)} names are given for {len(models)} models; give as many, or none")
    for name, number in counts.items():
        if number is not None and number < 1:
            raise PolicyError(f"{spelled(name, number)} is too small; give at least 1")
