"""Timing of runs, and speed-ups: paired rounds, medians, a confidence interval."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amp_rewrite.ir.gc_paused import gc_paused

Seconds = NDArray[Any]
"""float64[rounds, runs]: how long each run took."""

_RESAMPLES = 2000  # of the bootstrap
_TAILS = (2.5, 97.5)  # percentiles: an interval of 95 %
_ROUND = 0.05  # seconds of a round for the slowest call, unless the number of runs is given
MOST_RUNS = 50
"""Runs in a round, where that is left to us."""


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
    with gc_paused():
        for number in range(rounds):
            first = number % len(names) if names else 0
            for name in names[first:] + names[:first]:
                _fill(seconds[name][number], calls[name], clock)
            if progress:
                progress(number + 1, rounds)
    return seconds


def _fill(seconds: Seconds, call: Callable[[], object], clock: Callable[[], float]) -> None:
    for i in range(len(seconds)):
        start = clock()
        call()
        seconds[i] = clock() - start


def runs_per_round(latencies: Sequence[float]) -> int:
    """Return the number of runs in a round, by the seconds of each call."""
    return min(max(round(_ROUND / max(max(latencies), 1e-9)), 1), MOST_RUNS)


def warm_up(call: Callable[[], object], times: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Run several times, at least once, to fill caches and choose algorithms; return the seconds of the fastest run."""
    seconds = np.empty(max(times, 1))
    _fill(seconds, call, clock)
    return float(seconds.min())
