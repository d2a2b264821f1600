"""Placing by minimum cut, as a rule of the painter, and what it brought."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.coloring import Coloring, Paint
from amp_rewrite.decide.coloring.paint import FINISH
from amp_rewrite.decide.coloring.state import Canvas
from amp_rewrite.decide.placement.cost_model import ATTOSECONDS, Work
from amp_rewrite.decide.placement.cut_problem import Question
from amp_rewrite.decide.placement.labelling import Labelling
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.ir.view import OpId, View
from amp_rewrite.runtime.roofline import START, Roof


@dataclass
class Placing:
    """The rule of one painting: call it with the canvas. Afterwards it tells what it asked and answered.

    `vertices` are those of `labelling`, each by its op and its first type variable; `spread` and `cut` are their
    labels by TensorFlow's rules and in the end.
    """

    work: Work
    islands: bool = True
    labelling: Labelling = field(default_factory=lambda: Labelling(()))
    vertices: Sequence[tuple[OpId, str]] = ()
    spread: Sequence[bool] = ()
    cut: Sequence[bool] = ()

    @classmethod
    def of(cls, view: View, roof: Roof, to: DType, *, islands: bool = True) -> Placing:
        """What places on a GPU of that roof; see `Question` for `islands`."""
        return cls(Work(view, roof, to), islands)

    def __call__(self, canvas: Canvas) -> None:
        """Give every free vertex the label of the cheapest labelling, where that is no worse than the one it has."""
        question = Question(canvas, self.work, self.islands)
        asked = question.vertices
        self.labelling = question.labelling()
        self.vertices = tuple((canvas.vertices.all[v].op, canvas.vertices.all[v].variables[0]) for v in asked)
        best = self.labelling.best()
        self.spread = [v in canvas.low for v in asked]
        if best != self.spread:
            self.spread = self._finished(canvas, asked)
        self.cut = self.labelling.improved(self.spread, best, 1 if self.islands else _WORTH)
        for v, before, low in zip(asked, self.spread, self.cut, strict=True):
            if low is not before and question.free(v):
                _paint(canvas, v, low=low)

    def _finished(self, canvas: Canvas, asked: Sequence[int]) -> list[bool]:
        """The labels that the painter's last rules leave."""
        copy = replace(canvas, low=dict(canvas.low), denied=dict(canvas.denied))
        for rule in FINISH:
            rule(copy)
        return [v in copy.low for v in asked]

    @property
    def moved(self) -> bool:
        """Whether it changed anything."""
        return self.spread != self.cut

    def seconds(self, coloring: Coloring) -> float:
        """What a coloring of the same view costs: Casts, float32 where low would be faster, lost fusions."""
        low = [coloring.lowered(op, variable) for op, variable in self.vertices]
        return self.labelling.cost(low) / ATTOSECONDS

    @property
    def finding(self) -> Finding:
        """Both costs, for people."""
        ways = ((_CUT, self.cut), (_SPREAD, self.spread))
        told = (f"{way} {self.labelling.casts(low)} Casts and {self._microseconds(low):.3g} µs" for way, low in ways)
        note = (
            f"predicted beyond the cheapest run on {self.work.roof.gpu}, of ops whose type is free: {', '.join(told)}"
        )
        return Finding("placement", "model", note)

    def _microseconds(self, low: Sequence[bool]) -> float:
        return self.labelling.cost(low) / ATTOSECONDS * 1e6


_SPREAD, _CUT = "propagate", "mincut"
_WORTH = round(START / 2 * ATTOSECONDS)
"""What a change has to bring that nobody asked for: about a Cast, or a fusion. Predictions err by more than less."""


def _paint(canvas: Canvas, v: int, *, low: bool) -> None:
    """Paint a vertex; what is on the allow list, or shares a sequence, keeps its better reason."""
    if low:
        canvas.denied.pop(v, None)
        if v not in canvas.low or canvas.low[v].rule not in (reasons.ALLOW_ROOT, reasons.SEQUENCE_CLUSTER):
            note = canvas.benign.get(canvas.vertices.all[v].op, "")
            canvas.low[v] = Paint(canvas.to, reasons.MIN_CUT, None, note)
    elif canvas.low.pop(v, None) is not None:
        canvas.denied[v] = canvas.high(reasons.MIN_CUT, None, "it gains less than the Casts around it would cost")
