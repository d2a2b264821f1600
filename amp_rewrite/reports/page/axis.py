"""Axes of a chart: the place of a number between two ends, labelled ticks, and bins of a long series."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

_ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)
"""Steps between ticks, by powers of ten."""
_LEAST, _MOST = -308, 308
"""Powers of ten that a float holds in full precision."""
MOST_POINTS = 500
"""Points that a chart draws one by one; of more it draws the extremes of bins."""


@dataclass(frozen=True, slots=True)
class Axis:
    """The two ends of an axis, and its scale; those of a logarithmic one are above zero.

    `whole`: only whole numbers have a meaning, as for numbers of ops.
    """

    label: str
    low: float
    high: float
    log: bool = False
    whole: bool = False

    @classmethod
    def linear(cls, label: str, numbers: Iterable[float | None], *, zero: bool = False, whole: bool = False) -> Self:
        """Return an axis that holds the finite numbers. `zero`: begin or end there."""
        finite = [*_finite(numbers), *((0.0,) if zero else ())] or [0.0]
        low, high = min(finite), max(finite)
        if low == high:
            low, high = (low, low + 1.0) if zero or not low else (low - abs(low) / 2, low + abs(low) / 2)
        return cls(label, low, high, whole=whole) if low < high and math.isfinite(high - low) else cls(label, 0.0, 1.0)

    @classmethod
    def depth(cls, what: str, number: int) -> Self:
        """Return the axis of so many things in topological order."""
        return cls.linear(f"{what}, by depth", [0, max(number, 1)], zero=True, whole=True)

    @classmethod
    def logarithmic(cls, label: str, numbers: Iterable[float | None]) -> Self:
        """Return a logarithmic axis of whole powers of ten that holds the finite numbers above zero."""
        powers = [math.log10(number) for number in _finite(numbers) if number > 0]
        first = max(math.floor(min(powers, default=0.0)), _LEAST)
        last = min(math.ceil(max(powers, default=0.0)), _MOST)
        if first >= last:
            first, last = (first - 1, first) if first == _MOST else (first, first + 1)
        return cls(label, 10.0**first, 10.0**last, log=True)

    def at(self, number: float) -> float | None:
        """Return the place of a number from 0 to 1; numbers beyond an end stand at the end, and NaN has no place."""
        if math.isnan(number):
            return None
        if number <= self.low:
            return 0.0
        if number >= self.high:
            return 1.0
        if self.log:
            low = math.log10(self.low)
            return (math.log10(number) - low) / (math.log10(self.high) - low)
        return (number - self.low) / (self.high - self.low)

    def up(self, number: float) -> str:
        """Return the place of a number on a vertical axis, from the top, as an attribute; NaN stands at the start."""
        return percent(1 - (self.at(number) or 0.0))

    def along(self, number: float) -> str:
        """Return the place of a number on a horizontal axis as an attribute; NaN stands at the start."""
        return percent(self.at(number) or 0.0)

    def holds(self, number: float) -> bool:
        """Return True if a number lies between the ends."""
        return self.low <= number <= self.high

    def ticks(self, most: int = 6) -> list[tuple[float, str]]:
        """Return at most so many round numbers on the axis, 2 or more, with their labels."""
        if not self.log:
            return self._steps(most)
        first, last = (round(math.log10(end)) for end in (self.low, self.high))
        step = max(1, -(-(last - first) // (most - 1)))
        start = -(-first // step) * step  # multiples of the step, so that 1 is a tick where it lies inside
        powers = range(start, last + 1, step)
        return [(10.0**n, f"{10.0**n:.{max(-n, 0)}f}" if -3 < n < 5 else f"1e{n}") for n in powers]

    def _steps(self, most: int) -> list[tuple[float, str]]:
        rough = (self.high - self.low) / (most - 1)
        power = math.floor(math.log10(rough)) if rough > 0 else 0
        least = 1.0 if self.whole else 0.0
        step = next((s for s in (m * 10.0**power for m in _ROUND) if s >= rough and s >= least), max(rough, least))
        first = math.ceil(self.low / step)
        ticks = (step * (first + i) for i in range(most))
        inside = [tick for tick in ticks if tick <= self.high] or [self.low, self.high]
        return [(tick, number_text(tick)) for tick in inside]


def number_text(number: float | None) -> str:
    """Return a number in three digits; "–" for None."""
    if number is None:
        return "–"
    if math.isinf(number):
        return "infinity" if number > 0 else "-infinity"
    if math.isnan(number):
        return "NaN"
    if abs(number) < 1e6 and (number == round(number) or abs(number) >= 1e3):
        return f"{float(f'{number:.3g}') if number != round(number) else number:.0f}"
    return f"{number:.3g}"


def percent(share: float) -> str:
    """Return a share from 0 to 1 as an attribute of SVG: "12.5%"."""
    return f"{100 * share:.5g}%"


def finite(number: float | None) -> float | None:
    """Return a number for JSON: None for one that is not finite."""
    return number if number is not None and math.isfinite(number) else None


def record(row: Any) -> dict[str, object]:
    """Return a dataclass for JSON: numbers that are not finite are None."""
    return {name: finite(value) if isinstance(value, float) else value for name, value in asdict(row).items()}


@dataclass(frozen=True, slots=True)
class Bin:
    """Neighbouring numbers drawn as one: the places of the first and the last, and their extremes."""

    first: int
    last: int
    low: float
    high: float

    @property
    def data(self) -> dict[str, float | None]:
        """The bin for JSON."""
        return {"first": self.first, "last": self.last, "low": finite(self.low), "high": finite(self.high)}


def binned(lows: Sequence[float | None], highs: Sequence[float | None], most: int = MOST_POINTS) -> list[Bin]:
    """Return at most so many bins of neighbours: of the least and the largest number at each place.

    None is a missing number, and bins without numbers are left out; NaN counts as infinite.
    """
    size = max(1, -(-len(lows) // most))
    bins = []
    for first in range(0, len(lows), size):
        least, largest = (
            [math.inf if math.isnan(n) else n for n in numbers[first : first + size] if n is not None]
            for numbers in (lows, highs)
        )
        if least and largest:
            bins.append(Bin(first, min(first + size, len(lows)) - 1, min(least), max(largest)))
    return bins


def _finite(numbers: Iterable[float | None]) -> list[float]:
    return [float(number) for number in numbers if number is not None and math.isfinite(number)]
