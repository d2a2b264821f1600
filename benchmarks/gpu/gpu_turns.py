"""Times of alternating calls, ratios paired by round, and errors relative to a reference."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

ROUND_SECONDS = 0.06
MAX_RUNS = 40
RESAMPLES = 2000
Array = np.ndarray[Any, Any]
Timing = dict[str, Any]


def timed(
    calls: Mapping[str, Callable[[], object]], rounds: int, warm: int, card: Callable[[], list[float] | None]
) -> dict[str, Timing]:
    """Time alternating calls; return the median, 5th and 95th percentile in seconds, and the median of each round.

    Each round starts with a different call, and each call first runs once untimed to fill the caches. `card`, called
    after each turn, returns clock, power and temperature, and the result has their medians.
    """
    first = {}
    for name, call in calls.items():
        first[name] = min(_once(call) for _ in range(warm))
    names = list(calls)
    runs = {name: min(max(round(ROUND_SECONDS / first[name]), 2), MAX_RUNS) for name in names}
    every: dict[str, list[float]] = {name: [] for name in names}
    by_round: dict[str, list[float]] = {name: [] for name in names}
    states: dict[str, list[list[float]]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            calls[name]()
            seconds = [_once(calls[name]) for _ in range(runs[name])]
            by_round[name].append(float(np.median(seconds)))
            every[name] += seconds
            state = card()
            states[name] += [state] if state is not None else []
    return {name: _timing(every[name], by_round[name], states[name]) for name in names}


def _once(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _timing(seconds: Sequence[float], by_round: Sequence[float], card: Sequence[Sequence[float]]) -> Timing:
    low, median, high = (float(x) for x in np.percentile(seconds, (5, 50, 95)))
    state = [float(x) for x in np.median(card, axis=0)] if card else None
    return {"median": median, "p5": low, "p95": high, "runs": len(seconds), "rounds": list(by_round), "card": state}


def ratio(base: Timing, other: Timing) -> list[float]:
    """Return the speed-up of the other: the geometric mean over rounds, and its 95% interval (bootstrap)."""
    logs = np.log(base["rounds"]) - np.log(other["rounds"])
    drawn = np.random.default_rng(0).integers(0, len(logs), (RESAMPLES, len(logs)))
    low, high = np.exp(np.percentile(logs[drawn].mean(axis=1), (2.5, 97.5)))
    return [math.exp(logs.mean()), float(low), float(high)]


def error(expected: Sequence[Array], got: Sequence[Array]) -> dict[str, Any]:
    """Return the errors over all outputs: relative L2, and the largest difference relative to the largest value.

    `argmax`: the share of the first output's rows with the same largest element. All are None if a shape differs.
    """
    a, b = (np.concatenate([array.ravel().astype(np.float64) for array in side]) for side in (expected, got))
    if a.shape != b.shape:
        return {"l2": None, "largest": None, "nonfinite": None, "argmax": None}
    finite = np.isfinite(a) & np.isfinite(b)
    nonfinite = int(np.count_nonzero(np.isfinite(a) & ~np.isfinite(b)))
    a, b = a[finite], b[finite]
    norm, largest = float(np.linalg.norm(a)), float(np.abs(a).max(initial=0))
    apart = np.abs(a - b)
    first, same = expected[0], None
    if first.ndim and first.size and got[0].shape == first.shape:
        same = float(np.mean(first.argmax(-1) == got[0].argmax(-1)))
    return {
        "l2": float(np.linalg.norm(apart)) / norm if norm else None,
        "largest": float(apart.max(initial=0)) / largest if largest else None,
        "nonfinite": nonfinite,
        "argmax": same,
    }
