"""Benchmarks of models side by side: latency, and peak memory in a separate process for each model.

Memory is measured from a clean start, and a model that runs out of memory ends only its own process.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import platform
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import FeedError, MachineError, ModelError, PolicyError, spelled
from amp_rewrite.evidence.data.feed import Batch, Feed
from amp_rewrite.evidence.opening import low_types, name_of, open_on, provider_or_default, session_on
from amp_rewrite.files.model import Model, ModelSource
from amp_rewrite.reports.render import count, size, table
from amp_rewrite.reports.result import Result
from amp_rewrite.runtime.gpu import DRIVER, Loader, hardware
from amp_rewrite.runtime.installation import has_provider, offered_device, packages, require
from amp_rewrite.runtime.ports import input_ports
from amp_rewrite.runtime.probes import in_subprocess
from amp_rewrite.runtime.providers import cuda_options
from amp_rewrite.runtime.runner import CPU, CUDA, MAX_THREADS, Runner
from amp_rewrite.settings.option import Data, Progress, checked
from amp_rewrite.version import VERSION

Seconds = NDArray[Any]
"""The duration of each run: float64[rounds, runs]."""

_RESAMPLES = 2000  # for the bootstrap
_TAILS = (2.5, 97.5)  # percentiles of a 95% interval
_WARM_UP = 10  # unmeasured runs of each model
_ROUND, _MAX_RUNS = 0.05, 50  # seconds per round of the slowest model; maximum number of runs per round


@dataclass(frozen=True, slots=True)
class Timing:
    """The latency of individual runs: their number, and the median, 5th and 95th percentile in seconds."""

    runs: int
    median: float
    p5: float
    p95: float

    @classmethod
    def of(cls, seconds: Seconds) -> Timing:
        p5, median, p95 = (float(x) for x in np.percentile(seconds, (5, 50, 95)))
        return cls(seconds.size, median, p5, p95)


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """The speed relative to a baseline, and its 95% interval; None for a single round."""

    factor: float
    low: float | None
    high: float | None


def speed_up(baseline: Seconds, candidate: Seconds, *, seed: int = 0) -> SpeedUp:
    """Return the speed-up of the candidate: the geometric mean over rounds of the ratio of medians.

    Round i of one model is paired with round i of the other, because both had the same load. The interval is a
    percentile bootstrap interval over rounds (B. Efron, R. Tibshirani, "An Introduction to the Bootstrap", 1993,
    chapter 13).
    """
    logs = np.log(np.median(baseline, axis=1)) - np.log(np.median(candidate, axis=1))
    factor = math.exp(logs.mean())
    if len(logs) < 2:
        return SpeedUp(factor, None, None)
    resampled = np.random.default_rng(seed).integers(0, len(logs), (_RESAMPLES, len(logs)))
    low, high = np.exp(np.percentile(logs[resampled].mean(axis=1), _TAILS))
    return SpeedUp(factor, float(low), float(high))


# -- the result ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BenchEntry:
    """The results of a model in one mode. `types`: its low types.

    `latency`: measured with inputs and outputs on the device. `speed_ups`: by the name of the baseline. `memory`: peak
    bytes for the batch; None if not measured, with the reason in `fault` if the measurement failed.
    """

    name: str
    types: tuple[str, ...]
    latency: Timing
    speed_ups: Mapping[str, SpeedUp]
    memory: int | None = None
    fault: str = ""


SCHEMA = 1


@dataclass(frozen=True, repr=False)
class Benchmark(Result):
    """The results of all models on one machine. The first entry is the baseline, as is a second one with TF32.

    Attributes:
        provider: the provider that ran the models.
        device: the name of the device.
        versions: versions by package.
        fed: the origin of the data.
        rounds: the number of rounds.
        runs: the number of runs of each model per round.
        warm_up: the number of unmeasured runs of each model.
        entries: one per model and mode.
        notes: caveats.
    """

    provider: str
    device: str
    versions: Mapping[str, str]
    fed: str
    rounds: int
    runs: int
    warm_up: int
    entries: tuple[BenchEntry, ...]
    notes: tuple[str, ...] = ()

    @property
    def brief(self) -> str:
        """The median latency of each model, and the provider."""
        latencies = ", ".join(f"{entry.name} {_ms(entry.latency.median)} ms" for entry in self.entries)
        return f"{latencies} on {self.provider}"

    @property
    def baselines(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for entry in self.entries for name in entry.speed_ups))

    def text(self) -> str:
        """Return the device, the versions, and a table of latencies and memory as text."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        each = f"{count(self.rounds, 'round')} of {count(self.runs, 'run')} per model"
        facts = (
            ("runs on", self.provider),
            ("device", f"{self.device}; {versions}"),
            ("data", self.fed),
            ("measured", f"{each}, taking turns, after {self.warm_up} warm-up runs"),
        )
        lines = [", ".join(dict.fromkeys(entry.name for entry in self.entries)), *table(facts), ""]
        head = ["latency, ms", "median", "p5", "p95", *(f"vs {name}" for name in self.baselines)]
        rows = [[entry.name, *_cells(entry, self.baselines)] for entry in self.entries]
        if any(entry.memory is not None for entry in self.entries):
            head.append("peak memory")
            peaks = ["-" if entry.memory is None else size(entry.memory) for entry in self.entries]
            rows = [[*row, peak] for row, peak in zip(rows, peaks, strict=True)]
        lines += [*table(rows, head=head, right=" >>>" + ">" * 9), "", *(f"note: {note}" for note in self.notes)]
        return "\n".join(lines).rstrip("\n") + "\n"

    def to_json(self) -> str:
        """Return the results as JSON with a final newline; `docs/how-to/gpu.md#bench` describes the fields."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, allow_nan=False) + "\n"


def _cells(entry: BenchEntry, baselines: Sequence[str]) -> Iterator[str]:
    yield from map(_ms, (entry.latency.median, entry.latency.p5, entry.latency.p95))
    for name in baselines:
        speed_up = entry.speed_ups.get(name)
        if speed_up is None or entry.name == name:
            yield "-"
        else:
            interval = "" if speed_up.low is None else f" ({speed_up.low:.2f}–{speed_up.high:.2f})"
            yield f"{speed_up.factor:.2f}×{interval}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}"


@checked
def bench(
    models: Sequence[ModelSource],
    data: Data,
    *,
    provider: str | None = None,
    rounds: int = 20,
    memory: bool = True,
    threads: int = 0,
    progress: Progress | None = None,
) -> Benchmark:
    """Measure latency and peak memory of models on the first batch of `data`.

    Latency is measured for individual runs. After ten warm-up runs of each model, the models take turns in `rounds` of
    about 50 ms. Inputs and outputs stay on the device. On CUDA, a float32 baseline runs twice, without and with TF32;
    other models run with the options that `Session` chooses.

    Args:
        models: anything that `Model.load` accepts; the first model is the baseline.
        data: a Feed, or an argument of `Feed.of`; each model gets it in the types of its inputs.
        provider: the provider to use; None: CUDA if it loads, else the CPU.
        rounds: the number of rounds.
        memory: True to measure peak memory, in a separate process for each model.
        threads: threads per op; 0 for one per core.
        progress: called as `progress(stage, done, total)`.

    Returns:
        Latencies with confidence intervals, and memory.

    Raises:
        ModelError: a model cannot be opened or run; the message names it.
        FeedError: the data does not match the models.
        PolicyError: an argument is invalid.

    Example:
        >>> import amp_rewrite
        >>> few = {"rounds": 2, "memory": False, "provider": "CPUExecutionProvider"}
        >>> len(amp_rewrite.bench(["model.onnx"], "batches.npz", **few).entries)
        1
    """
    if not models:
        raise PolicyError("there is no model to measure; pass at least one")
    if rounds < 1:
        raise PolicyError(f"{spelled('rounds', rounds)} must be at least 1")
    if threads > MAX_THREADS:
        raise PolicyError(f"{spelled('threads', threads)} must be at most {MAX_THREADS}; 0 uses one thread per core")
    require("bench")
    progress = progress or (lambda stage, done, total: None)
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-") as folder:
        sides = candidates(models, data, provider_or_default(provider), threads, Path(folder))
        entries, runs, notes = _time(sides, rounds, progress)
        if memory:
            entries = _with_memory(entries, sides, progress)
    first = sides[0]
    feed = Feed.of(data, first.model)
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in first.batch.items())
    return Benchmark(
        first.provider,
        device_name(first.provider),
        {"amp-rewrite": VERSION, **{package.name: package.version for package in packages()}},
        f"{feed.origin}: {shapes}",
        rounds,
        runs,
        _WARM_UP,
        tuple(entries),
        (*notes, *_notes(entries, first.provider, feed.random)),
    )


# -- models ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A model in one mode, with its file and its batch. `number`: its position in the arguments."""

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
        """Options of the provider in addition to those for the model."""
        return {"use_tf32": "1"} if self.tf32 and self.provider == CUDA else {}

    def opened(self) -> Runner:
        """Open the model on its provider; ModelError with its name on failure."""
        return open_on(self.model, self.name, session_on(self.provider, self.threads, self.options))


def candidates(models: Sequence[object], data: object, provider: str, threads: int, folder: Path) -> list[Candidate]:
    """Return the models, and on CUDA also a float32 baseline with TF32.

    `folder`: where to write models without a file. FeedError and ModelError name the model.
    """
    names = [name_of(source, f"model {number}") for number, source in enumerate(models)]
    # Number equal names.
    names = [f"{name} ({names[:i].count(name) + 1})" if name in names[:i] else name for i, name in enumerate(names)]
    sides: list[Candidate] = []
    feed: Feed | None = None
    for number, (source, name) in enumerate(zip(models, names, strict=True)):
        model = Model.load(source)
        feed = feed or Feed.of(data, model)
        ports = {port.name for port in input_ports(model)}
        inputs = {key: array for key, array in next(iter(feed)).items() if key in ports}
        try:
            batch = next(iter(Feed.of(inputs, model, allow_nonfinite=True)))
        except FeedError as error:
            raise FeedError(f"{name}: {error}") from error
        file = folder / f"{number}.onnx"
        if isinstance(source, (str, os.PathLike)):
            file = Path(source)
        else:
            model.save(file)
        types = low_types(model)
        sides.append(Candidate(number, name, model, file, batch, provider, types, threads))
        if number == 0 and provider == CUDA and not types:
            sides.append(replace(sides[0], name=f"{name} with TF32", tf32=True))
    return sides


# -- latency -----------------------------------------------------------------------------------------


def _time(sides: Sequence[Candidate], rounds: int, progress: Progress) -> tuple[list[BenchEntry], int, list[str]]:
    """Return the entries without memory, the runs of a round, and notes; close all sessions."""
    runners = []
    for number, side in enumerate(sides):
        progress("open sessions", number, len(sides))
        runners.append(side.opened())
    calls = {side.name: runner.bind(side.batch).run for side, runner in zip(sides, runners, strict=True)}
    latencies = []
    progress("warm up", 0, 1)
    for name, call in calls.items():
        try:
            latencies.append(min(timeit.repeat(call, number=1, repeat=_WARM_UP)))
        except ModelError as error:
            raise ModelError(f"{name}: {error}") from error
    runs = runs_per_round(latencies)
    seconds = interleaved(calls, rounds=rounds, runs=runs, progress=partial(progress, "latency"))
    baselines = [side.name for side in sides if side.number == 0]
    entries = []
    for side in sides:
        timed = seconds[side.name]
        speed_ups = {name: speed_up(seconds[name], timed) for name in baselines}
        entries.append(BenchEntry(side.name, side.types, Timing.of(timed), speed_ups))
    notes = [note for side, runner in zip(sides, runners, strict=True) for note in _notes_of_model(side, runner)]
    return entries, runs, notes


def _notes_of_model(candidate: Candidate, runner: Runner) -> Iterator[str]:
    arrays = [value for value in runner.run(candidate.batch).values() if isinstance(value, np.ndarray)]
    arrays = [array for array in arrays if array.dtype.kind == "f" or array.dtype == DType.BFLOAT16.numpy]
    nonfinite = sum(int(np.count_nonzero(~np.isfinite(array))) for array in arrays)
    if nonfinite:
        total = sum(array.size for array in arrays)
        yield f"{candidate.name}: {nonfinite} of {total} output values are NaN or infinite; run `amp-rewrite verify`"
    if runner.provider == CUDA and (cost := cuda_options(candidate.model).cost):
        yield f"{candidate.name}: {cost}"


def _notes(entries: Sequence[BenchEntry], provider: str, random: bool) -> Iterator[str]:
    yield from (f"the memory of {entry.name} was not measured: {entry.fault}" for entry in entries if entry.fault)
    if provider == CPU and any(entry.types for entry in entries):
        yield "on a CPU, half precision is slower: onnxruntime computes most ops in float32, between Casts"
    if provider == CUDA:
        yield "float32 models run without TF32 unless their name says otherwise; onnxruntime enables it by default"
    if random:
        yield "the data is random: a model whose work depends on its data may be faster or slower on your data"


def interleaved(
    calls: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    runs: int,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Seconds]:
    """Time each run of each call, with `runs` of each per round.

    Each round begins with a different call, so that slow changes (clock rates, heat, other load) affect all calls
    equally. Exceptions from a call propagate.
    """
    names = list(calls)
    seconds = {name: np.empty((rounds, runs)) for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            seconds[name][number] = timeit.repeat(calls[name], timer=clock, number=1, repeat=runs)
        if progress:
            progress(number + 1, rounds)
    return seconds


def runs_per_round(latencies: Sequence[float]) -> int:
    """Return the number of runs per round, from the seconds per call."""
    return min(max(round(_ROUND / max(*latencies, 1e-9)), 1), _MAX_RUNS)


# -- memory ------------------------------------------------------------------------------------------


def _with_memory(entries: Sequence[BenchEntry], sides: Sequence[Candidate], progress: Progress) -> list[BenchEntry]:
    results = []
    for number, (entry, side) in enumerate(zip(entries, sides, strict=True)):
        progress("memory", number, len(sides))
        try:
            peak = peak_memory(side.file, side.batch, side.provider, side.threads, side.options)
            results.append(replace(entry, memory=peak))
        except MachineError as error:
            results.append(replace(entry, fault=str(error)))
    return results


_STATUS = Path("/proc/self/status")
_CPUS = Path("/proc/cpuinfo")


def device_name(provider: str) -> str:
    """Return the name of the GPU and its driver, or of the processor with the number of cores for this process."""
    if offered := offered_device(provider):
        return f"{offered} ({provider})"
    machine = hardware() if provider == CUDA else None
    if machine is not None and machine.gpus:
        driver = "" if machine.cuda is None else f", driver for CUDA {machine.cuda[0]}.{machine.cuda[1]}"
        return f"{machine.gpus[0]}{driver}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    processor = _line_of(_CPUS, "model name").strip(" \t:") or platform.processor() or platform.machine()
    return f"{processor}, {cores} cores"


def _line_of(file: Path, start: str) -> str:
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    return next((line.removeprefix(start) for line in lines if line.startswith(start)), "")


def gpu_memory(load: Loader = ctypes.CDLL) -> int:
    """Return the bytes in use on the first GPU by all processes; MachineError if a driver call fails."""
    driver = load(DRIVER)
    gpu, context = ctypes.c_int(), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    calls: tuple[tuple[Any, ...], ...] = (
        ("cuInit", 0),
        ("cuDeviceGet", ctypes.byref(gpu), 0),
        ("cuDevicePrimaryCtxRetain", ctypes.byref(context), gpu),
        ("cuCtxSetCurrent", context),
        ("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total)),
    )
    for name, *arguments in calls:
        if code := getattr(driver, name)(*arguments):
            raise MachineError(f"the NVIDIA driver call {name} failed with error {code}; to skip it, pass --no-memory")
    return total.value - free.value


def resident(*, peak: bool = False) -> int:
    """Return the resident bytes of this process, or their peak; 0 if unknown.

    `ru_maxrss` is not a substitute for the peak, because a process inherits it from its parent.
    """
    line = _line_of(_STATUS, "VmHWM:" if peak else "VmRSS:")
    return int(line.split()[0]) << 10 if line else 0


_TIMEOUT = 3600.0  # seconds to open a model and run it twice


def peak_memory(model: Path, batch: Batch, provider: str, threads: int = 0, options: Mapping[str, str] = {}) -> int:
    """Measure the peak memory of a model in a separate process, without the memory in use before it is opened.

    MachineError if the process fails, or the system does not report memory.
    """
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-", ignore_cleanup_errors=True) as folder:
        arrays: dict[str, Any] = {f"0/{name}": array for name, array in batch.items()}  # `file` is a parameter of savez
        np.savez(f"{folder}/batch.npz", **arrays)
        job = json.dumps([os.fspath(model.resolve()), f"{folder}/batch.npz", provider, threads, dict(options)])
        function = measure_peak.__name__
        program = f"import json; from {__name__} import {function}; print({function}(*json.loads(sys.argv[1])))"
        peak = int(in_subprocess(program, job, subject="its process", seconds=_TIMEOUT))
    if not peak:
        raise MachineError("this system does not report memory use")
    return peak


def measure_peak(file: str, data: str, provider: str, threads: int, options: Mapping[str, str]) -> int:
    """Open a model, run it twice, and return the additional bytes in use; 0 if unknown."""
    model = Model.load(file)
    batch = next(iter(Feed.of(data, model, allow_nonfinite=True)))
    has_provider(provider)  # loads the runtime's library, which must not count
    before = gpu_memory() if provider == CUDA else resident()
    # Let the arena grow by the requested size, not to powers of two.
    options = {**options, "arena_extend_strategy": "kSameAsRequested"} if provider == CUDA else options
    binding = Runner.open(model, session_on(provider, threads, options)).bind(batch)
    for _ in range(2):  # the second run shows whether memory is reused
        binding.run()
    # The binding must live until here, because a deleted session frees its arena on the GPU.
    after = gpu_memory() if provider == CUDA else resident(peak=True)
    return max(after - before, 0)
