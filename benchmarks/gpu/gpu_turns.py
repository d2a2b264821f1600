"""Times of several calls that take turns, ratios paired by round, and errors against a reference."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

ROUND_SECONDS = 0.06
MOST = 40
RESAMPLES = 2000
Array = np.ndarray[Any, Any]
Timing = dict[str, Any]


def timed(
    calls: Mapping[str, Callable[[], object]], rounds: int, warm: int, said: Callable[[], list[float] | None]
) -> dict[str, Timing]:
    """Time calls in turns; return median, 5th and 95th percentile in seconds, and the median of each round.

    Each round begins with another call, and each call first runs once uncounted, because the caches are another's. What
    `said` gives after each turn (clock, power, heat) is returned as its median.
    """
    first = {}
    for name, call in calls.items():
        first[name] = min(_once(call) for _ in range(warm))
    names = list(calls)
    runs = {name: min(max(round(ROUND_SECONDS / first[name]), 2), MOST) for name in names}
    every: dict[str, list[float]] = {name: [] for name in names}
    by_round: dict[str, list[float]] = {name: [] for name in names}
    card: dict[str, list[list[float]]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            calls[name]()
            seconds = [_once(calls[name]) for _ in range(runs[name])]
            by_round[name].append(float(np.median(seconds)))
            every[name] += seconds
            told = said()
            card[name] += [told] if told is not None else []
    return {name: _timing(every[name], by_round[name], card[name]) for name in names}


def _once(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _timing(seconds: Sequence[float], by_round: Sequence[float], card: Sequence[Sequence[float]]) -> Timing:
    low, median, high = (float(x) for x in np.percentile(seconds, (5, 50, 95)))
    told = [float(x) for x in np.median(card, axis=0)] if card else None
    return {"median": median, "p5": low, "p95": high, "runs": len(seconds), "rounds": list(by_round), "card": told}


def ratio(base: Timing, other: Timing) -> list[float]:
    """Return how many times as fast the other is: the geometric mean over rounds, and its 95 % interval (bootstrap)."""
    logs = np.log(base["rounds"]) - np.log(other["rounds"])
    drawn = np.random.default_rng(0).integers(0, len(logs), (RESAMPLES, len(logs)))
    low, high = np.exp(np.percentile(logs[drawn].mean(axis=1), (2.5, 97.5)))
    return [math.exp(logs.mean()), float(low), float(high)]


def error(wanted: Sequence[Array], got: Sequence[Array]) -> dict[str, Any]:
    """Return the distance over all outputs: relative to the reference (L2), and the largest relative to the largest.

    `argmax`: the share of rows of the first output whose largest element is the same; None where a shape differs.
    """
    a, b = (np.concatenate([array.ravel().astype(np.float64) for array in side]) for side in (wanted, got))
    if a.shape != b.shape:
        return {"l2": None, "largest": None, "nonfinite": None, "argmax": None}
    finite = np.isfinite(a) & np.isfinite(b)
    nonfinite = int(np.count_nonzero(np.isfinite(a) & ~np.isfinite(b)))
    a, b = a[finite], b[finite]
    norm, largest = float(np.linalg.norm(a)), float(np.abs(a).max(initial=0))
    apart = np.abs(a - b)
    first, same = wanted[0], None
    if first.ndim and first.size and got[0].shape == first.shape:
        same = float(np.mean(first.argmax(-1) == got[0].argmax(-1)))
    return {
        "l2": float(np.linalg.norm(apart)) / norm if norm else None,
        "largest": float(apart.max(initial=0)) / largest if largest else None,
        "nonfinite": nonfinite,
        "argmax": same,
    }
