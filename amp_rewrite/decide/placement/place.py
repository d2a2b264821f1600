"""Placement by minimum cut: a rule of the painter, and a record of its effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.coloring import Coloring, Paint
from amp_rewrite.decide.coloring.paint import finish
from amp_rewrite.decide.coloring.paint_state import PaintState
from amp_rewrite.decide.placement.cost_model import ATTOSECONDS, CostModel
from amp_rewrite.decide.placement.cut_problem import CutProblem
from amp_rewrite.decide.placement.flops import UNKNOWN_DIMENSION
from amp_rewrite.decide.placement.labelling import Labelling
from amp_rewrite.errors import Finding, count
from amp_rewrite.ir.view import OpId
from amp_rewrite.runtime.roofline import START


@dataclass
class PlacementRule:
    """The rule of one painting, to be called with the state; it records the problem and the answer.

    `costs` are those of a GPU; see `CutProblem` for `islands`.
    `vertices` are those of `labelling`, each by its op and its first type variable; `spread` and `cut` are their
    labels by TensorFlow's rules and in the end.
    """

    costs: CostModel
    islands: bool = True
    labelling: Labelling = field(default_factory=lambda: Labelling(()))
    vertices: Sequence[tuple[OpId, str]] = ()
    spread: Sequence[bool] = ()
    cut: Sequence[bool] = ()

    def __call__(self, state: PaintState) -> None:
        """Give every free vertex the label of the cheapest labelling, unless that is worse than its own."""
        state.costs = self.costs
        problem = CutProblem(state, self.costs, self.islands)
        vertices = problem.vertices
        self.labelling = problem.labelling()
        self.vertices = tuple((state.vertices.all[v].op, state.vertices.all[v].variables[0]) for v in vertices)
        best = self.labelling.best()
        self.spread = [v in state.low for v in vertices]
        spread = state.low, state.denied
        if best != self.spread:  # compare with the labels that the painter's last rules leave
            state.low, state.denied = dict(state.low), dict(state.denied)
            finish(state)
            self.spread = [v in state.low for v in vertices]
        self.cut = self.labelling.improved(self.spread, best, 1 if self.islands else _WORTH)
        if self.moved:
            finished = state.low, state.denied
            (state.low, state.denied), state.finished = spread, False
            for v, before, low in zip(vertices, self.spread, self.cut, strict=True):
                if low is not before and problem.free(v):
                    _paint(state, v, low=low)
                elif low is before is not (v in state.low):
                    _follow(state, finished, v)

    @property
    def moved(self) -> bool:
        """True if the cut changed a label."""
        return self.spread != self.cut

    def seconds(self, coloring: Coloring) -> float:
        """Return the cost of a coloring of the same view: Casts, slower float32, lost fusions."""
        low = [coloring.lowered(op, variable) for op, variable in self.vertices]
        return self.labelling.cost(low) / ATTOSECONDS

    @property
    def finding(self) -> Finding:
        """The difference in Casts and time, for people."""
        saved = self.labelling.casts(self.spread) - self.labelling.casts(self.cut)
        gain = (self.labelling.cost(self.spread) - self.labelling.cost(self.cut)) / ATTOSECONDS * 1e6
        casts = f"{'saved' if saved >= 0 else 'added'} {count(abs(saved), 'Cast')}"
        message = f"moving the border between the types {casts}, {gain:.3g} µs less"
        assumed = f", free dimensions as {UNKNOWN_DIMENSION}" if self.costs.free else ""
        return Finding("placement", "model", f"{message} (predicted on {self.costs.roof.gpu}{assumed})")


def _follow(state: PaintState, finished: Sequence[Mapping[int, Paint]], v: int) -> None:
    """Give a vertex the type, and the reason, that the last rules leave it with."""
    for paints, source in zip((state.low, state.denied), finished, strict=True):
        paints.pop(v, None)
        if v in source:
            paints[v] = source[v]


_WORTH = round(START / 2 * ATTOSECONDS)
"""The least gain of a change that the user did not ask for: about a Cast, or a fusion. Predictions err by less."""


def _paint(state: PaintState, v: int, *, low: bool) -> None:
    """Paint a vertex; one on the allow list, or in a sequence, keeps its better reason."""
    if low:
        state.denied.pop(v, None)
        if v not in state.low or state.low[v].rule not in (reasons.ALLOW_ROOT, reasons.SEQUENCE_CLUSTER):
            note = state.hazards.benign.get(state.vertices.all[v].op, "")
            state.low[v] = Paint(state.to, reasons.MIN_CUT, None, note)
    elif state.low.pop(v, None) is not None:
        state.denied[v] = state.high(reasons.MIN_CUT, None, "it gains less than the Casts around it would cost")
