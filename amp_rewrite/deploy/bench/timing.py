"""How long runs take, and how much faster one is than another: paired rounds, medians, an interval."""

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
_ROUND = 0.05  # seconds that the runs of the slowest take in a round, where that is left to us
MOST_RUNS = 50
"""Runs in a round, where that is left to us."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Single runs in seconds: how many there were, their median, and the 5th and 95th percentile."""

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
    """How many times as fast as a baseline, and the bounds of its 95 % interval; None where one round says nothing."""

    factor: float
    low: float | None
    high: float | None


def speed_up(baseline: Seconds, candidate: Seconds, *, seed: int = 0) -> SpeedUp:
    """How many times as fast the candidate is: the geometric mean, over rounds, of the ratio of their medians.

    Round i of one is paired with round i of the other, because both met the same machine. The interval is the
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
    """How long each run of each call takes: in each round `runs` of each, and each round begins with another one.

    What changes slowly (clocks, heat, neighbours) so meets all of them alike. Whatever a call raises goes through.
    """
    names = list(calls)
    found = {name: np.empty((rounds, runs)) for name in names}
    with gc_paused():
        for number in range(rounds):
            first = number % len(names) if names else 0
            for name in names[first:] + names[:first]:
                _fill(found[name][number], calls[name], clock)
            if progress:
                progress(number + 1, rounds)
    return found


def _fill(seconds: Seconds, call: Callable[[], object], clock: Callable[[], float]) -> None:
    for i in range(len(seconds)):
        start = clock()
        call()
        seconds[i] = clock() - start


def runs_per_round(latencies: Sequence[float]) -> int:
    """How many runs make a round of some length, for calls that take this many seconds."""
    return min(max(round(_ROUND / max(max(latencies), 1e-9)), 1), MOST_RUNS)


def warm_up(call: Callable[[], object], times: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Run that often, at least once: caches, algorithms to choose, memory to take. Seconds of the fastest run."""
    seconds = np.empty(max(times, 1))
    _fill(seconds, call, clock)
    return float(seconds.min())
