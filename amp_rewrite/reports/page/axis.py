"""Axes of a chart: the place of a number between two ends, and the ticks that are labelled."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

_ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)
"""Steps between ticks, by powers of ten."""
_LEAST, _MOST = -308, 308
"""Powers of ten that a float holds in full precision."""


@dataclass(frozen=True, slots=True)
class Axis:
    """The two ends of an axis, and its scale.

    Attributes:
        label: name of the quantity, with its unit.
        low: number at the start.
        high: number at the end, larger than `low`.
        log: True for a logarithmic scale, whose ends are above zero.
        whole: True if only whole numbers have a meaning, such as numbers of ops.
    """

    label: str
    low: float
    high: float
    log: bool = False
    whole: bool = False

    @classmethod
    def linear(cls, label: str, numbers: Iterable[float | None], *, zero: bool = False, whole: bool = False) -> Self:
        """Return an axis that holds the finite numbers.

        Args:
            label: name of the quantity.
            numbers: numbers to show; those that are not finite are left out.
            zero: begin or end at zero.
            whole: label whole numbers alone.
        """
        finite = [*_finite(numbers), *((0.0,) if zero else ())] or [0.0]
        low, high = min(finite), max(finite)
        if low == high:
            low, high = (low, low + 1.0) if zero or not low else (low - abs(low) / 2, low + abs(low) / 2)
        return cls(label, low, high, whole=whole) if low < high and math.isfinite(high - low) else cls(label, 0.0, 1.0)

    @classmethod
    def logarithmic(cls, label: str, numbers: Iterable[float | None]) -> Self:
        """Return a logarithmic axis of whole powers of ten that holds the finite numbers above zero.

        Args:
            label: name of the quantity.
            numbers: numbers to show; zero, negative ones and those that are not finite are left out.
        """
        powers = [math.log10(number) for number in _finite(numbers) if number > 0]
        first = max(math.floor(min(powers, default=0.0)), _LEAST)
        last = min(math.ceil(max(powers, default=0.0)), _MOST)
        if first >= last:
            first, last = (first - 1, first) if first == _MOST else (first, first + 1)
        return cls(label, 10.0**first, 10.0**last, log=True)

    def at(self, number: float) -> float | None:
        """Return the place of a number from 0 to 1; numbers beyond an end stand at the end, and NaN has no place.

        Args:
            number: zero and less stand at the start of a logarithmic axis.
        """
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
        """Return the place of a number on a vertical axis, from the top, as an attribute; NaN stands at the start.

        Args:
            number: any number.
        """
        return percent(1 - (self.at(number) or 0.0))

    def along(self, number: float) -> str:
        """Return the place of a number on a horizontal axis as an attribute; NaN stands at the start.

        Args:
            number: any number.
        """
        return percent(self.at(number) or 0.0)

    def holds(self, number: float) -> bool:
        """Return True if a number lies between the ends."""
        return self.low <= number <= self.high

    def ticks(self, most: int = 6) -> list[tuple[float, str]]:
        """Return round numbers on the axis with their labels.

        Args:
            most: the largest number of ticks, 2 or more.
        """
        return self._powers(most) if self.log else self._steps(most)

    def _powers(self, most: int) -> list[tuple[float, str]]:
        first, last = (round(math.log10(end)) for end in (self.low, self.high))
        step = max(1, -(-(last - first) // (most - 1)))
        start = -(-first // step) * step  # multiples of the step, so that 1 is a tick where it lies inside
        return [(10.0**power, _power(power)) for power in range(start, last + 1, step)]

    def _steps(self, most: int) -> list[tuple[float, str]]:
        rough = (self.high - self.low) / (most - 1)
        power = math.floor(math.log10(rough)) if rough > 0 else 0
        least = 1.0 if self.whole else 0.0
        step = next((s for s in (m * 10.0**power for m in _ROUND) if s >= rough and s >= least), max(rough, least))
        first = math.ceil(self.low / step)
        ticks = (step * (first + i) for i in range(most))
        inside = [tick for tick in ticks if tick <= self.high] or [self.low, self.high]
        return [(tick, number_text(tick)) for tick in inside]


def number_text(number: float | None, digits: int = 3) -> str:
    """Return a number in a few digits; "–" for None.

    Args:
        number: any number.
        digits: significant digits.
    """
    if number is None:
        return "–"
    if math.isinf(number):
        return "infinity" if number > 0 else "-infinity"
    if math.isnan(number):
        return "NaN"
    if abs(number) < 1e6 and (number == round(number) or abs(number) >= 10.0**digits):
        return f"{float(f'{number:.{digits}g}') if number != round(number) else number:.0f}"
    return f"{number:.{digits}g}"


def percent(share: float) -> str:
    """Return a share as an attribute of SVG: "12.5%".

    Args:
        share: from 0 to 1.
    """
    return f"{100 * share:.5g}%"


def finite(number: float | None) -> float | None:
    """Return a number for JSON: None for one that is not finite.

    Args:
        number: any number.
    """
    return number if number is not None and math.isfinite(number) else None


def _power(power: int) -> str:
    """Return "0.01", "1", "1000"; "1e-8" for other powers of ten."""
    return f"{10.0**power:.{max(-power, 0)}f}" if -3 < power < 5 else f"1e{power}"


def _finite(numbers: Iterable[float | None]) -> list[float]:
    return [float(number) for number in numbers if number is not None and math.isfinite(number)]
