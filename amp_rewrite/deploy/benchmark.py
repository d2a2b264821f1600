"""Result of a benchmark: timings and speed-ups, text and JSON."""

from __future__ import annotations

import json
import math
import time
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amp_rewrite.reports.render import count, size, table
from amp_rewrite.reports.result import Result

Seconds = NDArray[Any]
"""float64[rounds, runs]: how long each run took."""

_RESAMPLES = 2000  # of the bootstrap
_TAILS = (2.5, 97.5)  # percentiles: an interval of 95 %
_ROUND, _MOST_RUNS = 0.05, 50  # seconds of a round for the slowest call, and runs in it


@dataclass(frozen=True, slots=True)
class Timing:
    """Single runs: their number, and their median, 5th and 95th percentile in seconds."""

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
    """Speed relative to a baseline, and the bounds of its 95 % interval; None for a single round."""

    factor: float
    low: float | None
    high: float | None


def speed_up(baseline: Seconds, candidate: Seconds, *, seed: int = 0) -> SpeedUp:
    """Return the speed-up of the candidate: the geometric mean, over rounds, of the ratio of medians.

    Round i of one is paired with round i of the other, because both saw the same load. The interval is the
    percentile bootstrap over rounds (B. Efron, R. Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13).
    """
    logs = np.log(np.median(baseline, axis=1)) - np.log(np.median(candidate, axis=1))
    factor = math.exp(logs.mean())
    if len(logs) < 2:
        return SpeedUp(factor, None, None)
    drawn = np.random.default_rng(seed).integers(0, len(logs), (_RESAMPLES, len(logs)))
    low, high = np.exp(np.percentile(logs[drawn].mean(axis=1), _TAILS))
    return SpeedUp(factor, float(low), float(high))


def interleaved(
    calls: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    runs: int,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Seconds]:
    """Time each run of each call: `runs` of each in a round, and each round begins with another call.

    Slow changes (clocks, heat, other load) thus affect all calls equally. Exceptions of a call propagate.
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
    """Return the number of runs in a round, by the seconds of each call."""
    return min(max(round(_ROUND / max(*latencies, 1e-9)), 1), _MOST_RUNS)


# -- the result ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BenchEntry:
    """One model in one mode. `types`: its low types.

    `latency`: inputs and outputs stay on the device. `speed_ups`: against each baseline, by its name. `memory`: peak
    bytes for the given batch; None if not measured, with the reason in `fault` if measuring failed.
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
    """Models side by side on one machine. The first entry is the baseline; with TF32 the second is a baseline too.

    Attributes:
        provider: the opened provider.
        device: the name of the device.
        versions: those of the packages.
        fed: origin of the data.
        rounds: number of rounds.
        runs: of each model in a round.
        warm_up: runs of each model that were not measured.
        entries: one per model.
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
        """Models, each with its median latency, and the provider."""
        latencies = ", ".join(f"{entry.name} {_ms(entry.latency.median)} ms" for entry in self.entries)
        return f"{latencies} on {self.provider}"

    @property
    def baselines(self) -> tuple[str, ...]:
        """Return the names of the baselines."""
        return tuple(dict.fromkeys(name for entry in self.entries for name in entry.speed_ups))

    def text(self) -> str:
        """Return a text: device and versions, and a table of latencies and memory."""
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join([*self._head(), "", *self._latencies(), "", *notes]).rstrip("\n") + "\n"

    def _head(self) -> list[str]:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        each = f"{count(self.rounds, 'round')} of {count(self.runs, 'run')} of each"
        rows = (
            ("runs on", self.provider),
            ("device", f"{self.device}; {versions}"),
            ("data", self.fed),
            ("measured", f"{each}, taking turns, after {self.warm_up} to warm up"),
        )
        return [", ".join(dict.fromkeys(entry.name for entry in self.entries)), *table(rows)]

    def _latencies(self) -> list[str]:
        head = ["latency, ms", "median", "p5", "p95", *(f"vs {name}" for name in self.baselines)]
        rows = [[entry.name, *_numbers(entry, self.baselines)] for entry in self.entries]
        if any(entry.memory is not None for entry in self.entries):
            head.append("peak memory")
            rows = [[*row, _bytes(entry.memory)] for row, entry in zip(rows, self.entries, strict=True)]
        return table(rows, head=head, right=" >>>" + ">" * 9)

    def to_json(self) -> str:
        """Return JSON; `docs/how-to/gpu.md#bench` describes the fields. It ends with a newline."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, allow_nan=False) + "\n"


def _numbers(entry: BenchEntry, baselines: Sequence[str]) -> Iterator[str]:
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


def _bytes(number: int | None) -> str:
    return "-" if number is None else size(number)
