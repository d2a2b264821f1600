"""Charts as data, before anything draws them: a page draws them as SVG, `bench --plot` by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Described:
    """A chart.

    Attributes:
        name: key of its figure.
        title: heading.
        lead: one sentence that says what is seen.
        head: columns of its table of numbers: names first, then numbers.
        cells: rows of that table.
        data: everything that is drawn, as JSON.
        notes: caveats.
    """

    name: str
    title: str
    lead: str
    head: Sequence[str]
    cells: Sequence[Sequence[str]]
    data: Mapping[str, object]
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Bar:
    """A number with its text, the ends of its spread, and a second number that is marked on it."""

    label: str
    number: float
    text: str
    spread: tuple[float, float] | None = None
    mark: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars(Described):
    """A bar for each of a few numbers, the baseline first.

    Attributes:
        unit: that of the numbers.
        bars: the numbers.
        mark: meaning of the second numbers.
        longest: number at which the axis ends at the latest; None for an axis that holds all.
    """

    unit: str
    bars: Sequence[Bar]
    mark: str = ""
    longest: float | None = None

    def kept(self, number: float) -> float:
        """Return a number that the axis holds."""
        return number if self.longest is None else min(number, self.longest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves(Described):
    """Curves between two logarithmic axes: `across` and `upward` name them, `curves` holds points by label."""

    across: str
    upward: str
    curves: Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Move:
    """A number before and after; None on a side that lacks it."""

    label: str
    before: float | None
    after: float | None
    text: str

    @property
    def grows(self) -> bool:
        """True if the number after is larger."""
        return (self.after or 0.0) > (self.before or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves(Described):
    """Numbers before and after: `unit` is theirs, `words` say what growing and shrinking mean."""

    unit: str
    moves: Sequence[Move]
    words: tuple[str, str]


Chart = Bars | Curves | Moves
