"""Changes between two models, and both of these, op by op: which belong together, and what changed about each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from amp_rewrite.reports.rows import ReportData

if TYPE_CHECKING:
    from amp_rewrite.ir.view import View

Pairs = Sequence[tuple[int, int]]
"""Positions in A and in B of what is the same."""


@dataclass(frozen=True, slots=True)
class Change:
    """One op that differs, or one input or output of the model, whose `op` is "graph input" or "graph output".

    `name` is the one in B, or the one in A of an op that was removed; `was` is the name in A if that differs. `before`
    and `after` are element types, empty where the op is absent, or the values of an attribute: "float32 via float16" is
    a value rounded to float16 on its way. `variable` says of what: a type variable, "input 0", "output 1" or an
    attribute; empty for the op as a whole. `why` is the rule behind the type in B.
    """

    kind: str
    name: str
    op: str
    scope: str = ""
    before: str = ""
    after: str = ""
    variable: str = ""
    was: str = ""
    why: str = ""

    @property
    def types(self) -> str:
        """ "float32 → float16", or the one type that there is."""
        return " → ".join(filter(None, (self.before, self.after)))

    @property
    def title(self) -> str:
        """Name, with the former one."""
        return f"{self.name} (was {self.was})" if self.was else self.name


@dataclass(frozen=True, slots=True)
class CastChange:
    """A cast that only one of the two has: `sign` is "+" for B, "-" for A."""

    sign: str
    value: str
    before: str
    after: str
    scope: str = ""
    why: str = ""


class PlacedChange(NamedTuple):
    """A change, and the vertices that it is about: rows, then inputs, then outputs; None on a side that lacks it."""

    change: Change
    a: int | None
    b: int | None


class PlacedCast(NamedTuple):
    """A Cast that only one model has, and its position among the Casts of that model's report."""

    change: CastChange
    place: int


@dataclass(frozen=True, slots=True)
class Matches:
    """Rows, inputs and outputs that are the same in A and in B."""

    rows: Pairs
    inputs: Pairs = ()
    outputs: Pairs = ()


@dataclass(frozen=True, slots=True, repr=False)
class BothModels:
    """Both models of a difference: reports, views if available, pairs of equal ops, and all differences."""

    reports: tuple[ReportData, ReportData]
    views: tuple[View | None, View | None]
    matches: Matches
    changes: Sequence[PlacedChange] = ()
    casts: Sequence[PlacedCast] = ()

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Yield the vertices that are the same: rows, then inputs, then outputs of the models."""
        yield from self.matches.rows
        bases = tuple(len(report.rows) for report in self.reports)
        for pairs, ports in ((self.matches.inputs, "inputs"), (self.matches.outputs, "outputs")):
            yield from ((bases[0] + i, bases[1] + j) for i, j in pairs)
            bases = tuple(base + len(getattr(report, ports)) for base, report in zip(bases, self.reports, strict=True))

    def changed(self, side: int) -> Mapping[int, Sequence[Change]]:
        """Return the changes by vertex of one side: 0 for A, 1 for B."""
        changes: dict[int, list[Change]] = {}
        for placed in self.changes:
            vertex = (placed.a, placed.b)[side]
            if vertex is not None:
                changes.setdefault(vertex, []).append(placed.change)
        return changes

    def signs(self, side: int) -> Mapping[int, str]:
        """Return the signs of the Casts that only one side has, by position: 0 for A, 1 for B."""
        sign = "-+"[side]
        return {cast.place: sign for cast in self.casts if cast.change.sign == sign}

    def places(self, kinds: Sequence[str]) -> list[tuple[int, int] | None]:
        """Return side and vertex of each change, by kind, then those of Casts; None for a Cast of a weight."""
        by_kind = [placed for kind in kinds for placed in self.changes if placed.change.kind == kind]
        ends = [(1, placed.b) if placed.b is not None else (0, placed.a) for placed in by_kind]
        for cast in self.casts:
            side = "-+".index(cast.change.sign)
            after = self.reports[side].casts[cast.place].after
            ends.append((side, after if after >= 0 else None))
        return [None if vertex is None else (side, vertex) for side, vertex in ends]
