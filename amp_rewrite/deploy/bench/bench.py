"""Benchmark of models side by side: latency, throughput, memory, and ops that became slower."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path

import numpy as np

from amp_rewrite.deploy.bench.batches import BatchAxis, batch_axis
from amp_rewrite.deploy.bench.candidate import Candidate, Conditions, candidates
from amp_rewrite.deploy.bench.device import device_name
from amp_rewrite.deploy.bench.memory import Tell, Weigher
from amp_rewrite.deploy.bench.profile import changes
from amp_rewrite.deploy.bench.result import Benchmark, Changed, Entry, Sized
from amp_rewrite.deploy.bench.timing import MOST_RUNS, Seconds, Timing, interleaved, runs_per_round, speed_up, warm_up
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import FeedError, ModelError, PolicyError
from amp_rewrite.evidence.data.feed import Feed
from amp_rewrite.runtime.runner import CPU, CUDA, MOST_THREADS, Runner, cuda_opens
from amp_rewrite.version import VERSION

_Calls = dict[str, Callable[[], object]]

_LEAST_ROUNDS = 3
_MOST = 10**7  # runs of a model: a day of those that take 10 ms
_SWEEP_SHARE = 4  # one in so many rounds for each size of a sweep


def bench(
    models: Sequence[object],
    data: object,
    *,
    names: Sequence[str] = (),
    provider: str | None = None,
    rounds: int = 20,
    runs: int | None = None,
    warm: int = 10,
    sizes: Sequence[int] = (),
    memory: bool = True,
    limit: int | None = None,
    profile: bool = True,
    threads: int = 0,
    allow_nonfinite: bool = False,
    seed: int = 0,
    progress: Tell | None = None,
) -> Benchmark:
    """How long models take on the first batch of `data`, what memory they need, and which ops got slower.

    `models`: what `Model.load` takes; the first one is the baseline. On CUDA a float32 baseline runs twice, without
    TF32 and with it; whatever else is float32 runs without. `data`: what `Feed.of` takes, with NaN and infinity only if
    `allow_nonfinite`; each model gets it in the types of its inputs. `names`: what the result calls the models.
    `provider`: the one that must open; None: CUDA where it opens, else the CPU. `threads` for one op; 0: one per core.

    Latency is that of single runs: `warm` of each model first, then `rounds` in which all take turns, with `runs` of
    each (None: as many as take 50 ms), once with inputs and outputs that stay on the device, once with copies.
    `sizes`: batches to sweep, where the inputs' first dimension is free. `memory`: the peak, each measured in a
    process of its own. `limit`: the bytes into which the largest batch is to fit, found to a sixteenth. `profile`:
    the time of each op, in one more process each. `seed`: that of the bootstrap. `progress(stage, done, total)`.

    ModelError, naming the model, for one that does not open or run; FeedError and PolicyError for what does not fit.
    """
    _check(models, names, sizes, {"rounds": rounds, "runs": runs, "warm": warm, "limit": limit})
    _check_amount(rounds, runs or MOST_RUNS, warm, threads)
    chosen = (CUDA if cuda_opens() else CPU) if provider is None else provider
    tell = progress or _untold
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-") as folder:
        taking_part = candidates(models, names, data, Conditions(chosen, threads, allow_nonfinite, Path(folder)))
        first = taking_part[0]
        opened = [each.opened() for each in taking_part]
        axis = batch_axis(opened[0].inputs, first.batch)
        if sizes or limit:
            _check_axis(axis, first.name)
        pairs = list(zip(taking_part, opened, strict=True))
        entries, per_round = _timed(pairs, (rounds, runs, warm), seed, tell)
        ill = [note for pair in pairs for note in _nonfinite(*pair)]
        if axis is not None and sizes:
            fewer = max(rounds // _SWEEP_SHARE, _LEAST_ROUNDS)
            swept = _swept(pairs, axis, sorted(set(sizes)), (fewer, warm), tell)
            entries = [replace(entry, sweep=tuple(rows)) for entry, rows in zip(entries, swept, strict=True)]
        del opened, pairs  # what is measured below wants the device for itself
        weigher = Weigher(taking_part, axis, tell)
        entries = weigher.weighed(entries) if memory else entries
        entries = weigher.largest(entries, limit) if limit else entries
        changed = _changed(taking_part, tell) if profile else ()
    notes = (*ill, *_notes(entries, chosen, data, changed))
    ran = chosen, device_name(chosen), _versions(), _fed(data, first)
    return Benchmark(*ran, rounds, per_round, warm, tuple(entries), changed, notes)


# -- time --------------------------------------------------------------------------------------------


def _timed(
    pairs: Sequence[tuple[Candidate, Runner]], often: tuple[int, int | None, int], seed: int, tell: Tell
) -> tuple[list[Entry], int]:
    """Return an entry of each with its latencies and speed-ups, and the number of runs in a round."""
    rounds, runs, warm = often
    bound: _Calls = {c.name: r.bind(c.batch).run for c, r in pairs}
    copying: _Calls = {c.name: partial(r.run, c.batch) for c, r in pairs}
    latencies = [_warmed(name, call, warm) for name, call in (*bound.items(), *copying.items())]
    per_round = runs or runs_per_round(latencies)
    seconds = interleaved(bound, rounds=rounds, runs=per_round, progress=partial(tell, "latency"))
    copies = interleaved(copying, rounds=rounds, runs=per_round, progress=partial(tell, "latency with copies"))
    baselines = [c.name for c, _ in pairs if c.number == 0]
    return [_entry(c, seconds, copies[c.name], baselines, seed) for c, _ in pairs], per_round


def _warmed(name: str, call: Callable[[], object], times: int) -> float:
    try:
        return warm_up(call, times)
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from error


def _entry(
    candidate: Candidate, seconds: Mapping[str, Seconds], copies: Seconds, baselines: Sequence[str], seed: int
) -> Entry:
    mine = seconds[candidate.name]
    speed_ups = {name: speed_up(seconds[name], mine, seed=seed) for name in baselines}
    return Entry(candidate.name, candidate.types, candidate.tf32, Timing.of(mine), Timing.of(copies), speed_ups)


def _swept(
    pairs: Sequence[tuple[Candidate, Runner]],
    axis: BatchAxis,
    sizes: Sequence[int],
    often: tuple[int, int],
    tell: Tell,
) -> list[list[Sized]]:
    """Return for each candidate a row for each size, the smallest first. `often`: rounds, and runs to warm up."""
    sweeps: list[list[Sized]] = [[] for _ in pairs]
    for done, items in enumerate(sizes):
        rows = _at_size(pairs, axis, items, often)
        for row, sweep in zip(rows, sweeps, strict=True):
            sweep.append(row)
        tell("batch sizes", done + 1, len(sizes))
    return sweeps


def _at_size(
    pairs: Sequence[tuple[Candidate, Runner]], axis: BatchAxis, items: int, often: tuple[int, int]
) -> list[Sized]:
    """Return a row of each candidate for one size; the row of one that does not run at that size says why."""
    rounds, warm = often
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
    return [Sized(items, timings.get(c.name), None, faults.get(c.name, "")) for c, _ in pairs]


# -- ops, and what to know ---------------------------------------------------------------------------


def _changed(taking_part: Sequence[Candidate], tell: Tell) -> tuple[Changed, ...]:
    """Return the changes of each other model's ops against the first model without TF32."""
    others = [c for c in taking_part if c.number]
    profiles = []
    for done, candidate in enumerate((taking_part[0], *others) if others else ()):
        outcome = candidate.profiled()
        if outcome.fault:
            raise ModelError(f"{candidate.name} runs, and its profile fails: {outcome.fault}; leave the profile out")
        profiles.append(outcome.ops)
        tell("profile", done + 1, len(others) + 1)
    return tuple(Changed(c.name, changes(profiles[0], ops)) for c, ops in zip(others, profiles[1:], strict=False))


def _nonfinite(candidate: Candidate, runner: Runner) -> Iterator[str]:
    """Yield a note if a model gives NaN or infinity on its batch, because its speed is then meaningless."""
    found = [value for value in runner.run(candidate.batch).values() if isinstance(value, np.ndarray)]
    floating = [value for value in found if value.dtype.kind == "f" or value.dtype == DType.BFLOAT16.numpy]
    bad = sum(int(np.count_nonzero(~np.isfinite(value))) for value in floating)
    if bad:
        numbers = sum(value.size for value in floating)
        yield f"{candidate.name} gives NaN or infinity for {bad} of {numbers} numbers; `amp-rewrite verify` compares"


def _notes(entries: Sequence[Entry], provider: str, data: object, changed: Sequence[Changed]) -> tuple[str, ...]:
    found = [f"the memory of {entry.name} is not known: {entry.fault}" for entry in entries if entry.fault]
    if provider == CPU and any(entry.types for entry in entries):
        found.append("CPU: half precision is slower here; onnxruntime computes most of it in float32, between Casts")
    if provider == CUDA:
        found.append("float32 is computed without TF32 unless the name says so; onnxruntime's own default is with it")
    if provider == CUDA and changed:
        found.append("ops are timed with CUDA_LAUNCH_BLOCKING=1, one after the other: they add up to more than a run")
    if isinstance(data, Feed) and data.random:
        found.append("the data are random: a model whose work depends on its data may take another time on yours")
    return tuple(found)


def _fed(data: object, first: Candidate) -> str:
    origin = data.origin if isinstance(data, Feed) else Feed.of(data, first.model, allow_nonfinite=True).origin
    return f"{origin}: {', '.join(f'{name} {list(array.shape)}' for name, array in first.batch.items())}"


def _versions() -> dict[str, str]:
    found = {"amp-rewrite": VERSION}
    for name in ("onnxruntime-gpu", "onnxruntime"):  # one module, in two packages
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _untold(stage: str, done: int, total: int) -> None:
    """Ignore progress."""


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse batch sizes from a text such as "1,8,64". Raise PolicyError for any other text."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as cause:
        raise PolicyError(f"{text!r} is not a list of batch sizes; write it as 1,8,64") from cause


# -- checks ------------------------------------------------------------------------------------------


def _check(
    models: Sequence[object], names: Sequence[str], sizes: Sequence[int], counts: Mapping[str, int | None]
) -> None:
    if not models:
        raise PolicyError("no model given; give at least one")
    if names and len(names) != len(models):
        raise PolicyError(f"{len(names)} names are given for {len(models)} models; give as many, or none")
    for name, number in (*counts.items(), *(("a batch size", size) for size in sizes)):
        if number is not None and number < 1:
            raise PolicyError(f"{name} is {number}, which is too small; give at least 1")


def _check_amount(rounds: int, runs: int, warm: int, threads: int) -> None:
    if max(rounds * runs, warm) > _MOST:
        raise PolicyError(f"{rounds} rounds of {runs} runs after {warm} are more than {_MOST} runs; give fewer")
    if threads > MOST_THREADS:
        raise PolicyError(f"threads is {threads}; give at most {MOST_THREADS}, or leave it out for one per core")


def _check_axis(axis: BatchAxis | None, name: str) -> None:
    if axis is None:
        raise FeedError(
            f"no input of {name} has a free first dimension, so that its batch has one size; export the model with a"
            " free batch dimension, or ask for no other sizes"
        )
