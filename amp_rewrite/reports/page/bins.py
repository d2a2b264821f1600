"""Bins: neighbouring numbers of a long series, drawn as one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MOST_POINTS = 500
"""Points that a chart draws one by one; of more it draws the extremes of bins."""


@dataclass(frozen=True, slots=True)
class Bin:
    """Neighbouring numbers drawn as one: the places of the first and the last, and their extremes."""

    first: int
    last: int
    low: float
    high: float


def binned(lows: Sequence[float | None], highs: Sequence[float | None], most: int = MOST_POINTS) -> list[Bin]:
    """Return at most so many bins of neighbouring numbers with their extremes; bins without numbers are left out.

    Args:
        lows: the least number at each place; None for a missing one. NaN counts as infinite.
        highs: the largest number at each place.
        most: the largest number of bins.
    """
    size = max(1, -(-len(lows) // most))
    bins = []
    for first in range(0, len(lows), size):
        least = [_whole(n) for n in lows[first : first + size] if n is not None]
        largest = [_whole(n) for n in highs[first : first + size] if n is not None]
        if least and largest:
            bins.append(Bin(first, min(first + size, len(lows)) - 1, min(least), max(largest)))
    return bins


def _whole(number: float) -> float:
    return math.inf if math.isnan(number) else number
