"""The trade of time against digits: the cheapest labels if lost digits have a price.

A Lagrangian: time + price · squared error. Both are sums over vertices and over edges between the types, so a minimum
cut finds the labels that minimize it, jointly with the Casts. Each price gives a point of the lower convex hull of time
against error (Everett, Generalized Lagrange multiplier method, Operations Research 11, 1963).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from amp_rewrite.decide.coloring.coloring import Coloring
from amp_rewrite.decide.coloring.paint_state import PaintState
from amp_rewrite.decide.placement.cost_model import ATTOSECONDS, CostModel
from amp_rewrite.decide.placement.cut_problem import CutProblem
from amp_rewrite.decide.placement.labelling import HIGH, LOW, Labelling, Rounding
from amp_rewrite.ir.view import OpId
from amp_rewrite.runtime.roofline import START

Vertex = tuple[OpId, str]
"""A type variable of an op."""

_FORBIDDEN = 1 << 68
"""Cost of a rounding that makes infinity: above any sum of times, below an arc that no cut parts."""

_WORTH = round(2 * START * ATTOSECONDS)
"""Worth of a low op besides its time."""


class RoundingLoss(NamedTuple):
    """Digits that are lost where a value goes low: squared error, and the vertices that make and read it.

    `reader` None: the result of a low maker. `maker` None: a value that no vertex makes.
    """

    error: float
    maker: Vertex | None
    reader: Vertex | None


@dataclass
class Tradeoff:
    """The rule of one painting that records the whole problem and moves no vertex; afterwards it answers prices.

    Without `islands` each op that the painter lowered is worth two Casts at least, so that it is not given up for
    time. `positions`: the vertex of the problem of each type variable, or the label that the painter gave it.
    """

    costs: CostModel
    islands: bool = True
    labelling: Labelling = field(default_factory=lambda: Labelling(()))
    positions: dict[Vertex, int] = field(default_factory=dict)

    def __call__(self, state: PaintState) -> None:
        """Record the problem of a state on which the painter's rules have spread the colors."""
        problem = CutProblem(state, self.costs, islands=True, whole=True)
        self.labelling = problem.labelling()
        at = {v: position for position, v in enumerate(problem.vertices)}
        self.worth = tuple(0 if self.islands or v not in state.low else _WORTH for v in problem.vertices)
        for v, vertex in enumerate(state.vertices.all):
            label = LOW if v in state.low else HIGH
            self.positions.update(((vertex.op, name), at.get(v, label)) for name in vertex.variables)

    def high(self, losses: Iterable[RoundingLoss], price: float) -> frozenset[Vertex]:
        """Return the type variables of the problem that are float32 at the least of time + price · squared error.

        `price`: seconds for a squared error of 1. A loss that is infinite is never taken if it can be avoided.
        """
        noise = [0] * len(self.labelling.loss)
        roundings: dict[tuple[int, int], int] = {}
        for loss in losses:
            cost = _FORBIDDEN if loss.error == math.inf else min(round(price * loss.error * ATTOSECONDS), _FORBIDDEN)
            maker = HIGH if loss.maker is None else self.positions.get(loss.maker, HIGH)
            if loss.reader is None and maker >= 0:
                noise[maker] += cost
            elif loss.reader is not None:
                ends = (maker, self.positions.get(loss.reader, HIGH))
                roundings[ends] = roundings.get(ends, 0) + cost
        priced = tuple(Rounding(home, reader, cost) for (home, reader), cost in roundings.items() if home != reader)
        worth = tuple(time + more for time, more in zip(self.labelling.loss, self.worth, strict=True))
        low = replace(self.labelling, loss=worth, noise=tuple(noise), roundings=priced).best()
        return frozenset(vertex for vertex, at in self.positions.items() if at >= 0 and not low[at])

    def seconds(self, coloring: Coloring) -> float:
        """Return the time of a coloring beyond that of all free vertices low without a Cast."""
        low = [False] * len(self.labelling.loss)
        for (op, variable), at in self.positions.items():
            if at >= 0:
                low[at] = low[at] or coloring.lowered(op, variable)
        return self.labelling.cost(low) / ATTOSECONDS

    @property
    def float32(self) -> float:
        """Return the time of the model in float32, beyond the same."""
        return sum(self.labelling.loss) / ATTOSECONDS

    @property
    def stake(self) -> float:
        """Return what float32 loses throughout: time, and the worth of low ops."""
        return self.float32 + sum(self.worth) / ATTOSECONDS

    @property
    def least(self) -> float:
        """Return the time of the model if all ops are low, without Casts."""
        return self.costs.least / ATTOSECONDS
