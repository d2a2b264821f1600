"""Placing by minimum cut, as a rule of the painter; and what a colouring costs, whoever made it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from amp_rewrite.dtypes import DType
from amp_rewrite.painting.canvas import Canvas
from amp_rewrite.painting.color import Coloring, Paint
from amp_rewrite.placement.labelling import Labelling
from amp_rewrite.placement.question import Question
from amp_rewrite.placement.work import ATTOSECONDS, Work
from amp_rewrite.roofline import Roof
from amp_rewrite.view import OpId, View

RULE = "min_cut"


@dataclass
class Placing:
    """The rule of one painting: call it with the canvas. Afterwards `seconds` tells what colourings cost."""

    work: Work
    labelling: Labelling | None = None
    vertices: Sequence[tuple[OpId, str]] = field(default_factory=tuple)

    @classmethod
    def of(cls, view: View, roof: Roof, to: DType) -> Placing:
        """O(nodes + uses), and a shape inference."""
        return cls(Work.of(view, roof, to))

    def __call__(self, canvas: Canvas) -> None:
        """Give every free vertex the label that it has in the cheapest labelling."""
        question = Question(canvas, self.work)
        self.labelling = question.labelling()
        self.vertices = tuple((vertex.op, vertex.variables[0]) for vertex in canvas.vertices.all)
        for v, low in enumerate(self.labelling.best()):
            if v in question.free:
                _paint(canvas, v, low=low)

    def seconds(self, coloring: Coloring) -> float:
        """What a colouring of the same view costs: Casts, float32 where low would be faster, lost fusions."""
        assert self.labelling is not None
        low = [coloring.lowered(op, variable) for op, variable in self.vertices]
        return self.labelling.cost(low) / ATTOSECONDS


def _paint(canvas: Canvas, v: int, *, low: bool) -> None:
    """Paint a vertex; what is on the allow list, or shares a sequence, keeps its better reason."""
    if low:
        if v not in canvas.low or canvas.low[v].rule not in ("allow_root", "sequence_cluster"):
            note = canvas.benign.get(canvas.vertices.all[v].op, "")
            canvas.low[v] = Paint(canvas.to, RULE, None, note)
    elif canvas.low.pop(v, None) is not None:
        canvas.denied[v] = canvas.high(RULE, None, "it gains less than the Casts around it would cost")
