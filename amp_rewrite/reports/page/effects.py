"""Figure of effects: the error of the outputs that each op's roundings are predicted to cause."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from amp_rewrite.errors import count
from amp_rewrite.reports.page.axis import MOST_POINTS, Axis, finite, height, number_text, record
from amp_rewrite.reports.page.chart import numbers, plot, remarks, sample
from amp_rewrite.reports.page.marks import dots, limit
from amp_rewrite.reports.page.markup import element, short
from amp_rewrite.reports.page.page import Figure

_SHOWN = 10
"""Ops of the largest effect, in the table."""


@dataclass(frozen=True, slots=True)
class Effect:
    """Effect of one op, by its name in the reference, on the outputs.

    `error`: the relative error of the outputs that its roundings alone cause, the root of the mean over outputs and
    batches; inf if it makes infinity, NaN if unknown. `worst`: an estimate of the largest that they can sum to. `share`
    of the candidate's predicted squared error. `by` says how the error is known: "gradient", "measured" (emulated
    alone) or "unknown".
    """

    op: str
    kind: str
    error: float
    worst: float
    share: float
    by: str


def effects_figure(effects: Sequence[Effect], error: float, measured: float, notes: Sequence[str] = ()) -> Figure:
    """Return the effects of ops on the outputs along the depth as a figure."""
    order = sorted(range(len(effects)), key=lambda i: -height(effects[i].error))
    drawn = sorted(order[:MOST_POINTS])
    largest = max((e.error for e in effects if math.isfinite(e.error)), default=1.0)
    sizes = [x for e in effects for x in (e.error, e.worst) if math.isfinite(x) and x > largest * _FLOOR]
    y = Axis.logarithmic("error of the outputs, relative", [*sizes, *(x for x in (error, measured) if x > 0)])
    x = Axis.depth("op", len(effects))
    marks: list[Element] = []
    for number, words in ((error, "predicted"), (measured, "measured")):
        if math.isfinite(number) and number > 0:
            marks += limit(y, number, f"of all together, {words}", "reference" if words == "measured" else "tolerance")
    marks += dots(x, y, [(i + 0.5, height(effects[i].worst), _words(effects[i])) for i in drawn], "hollow")
    marks += dots(x, y, [(i + 0.5, height(effects[i].error), _words(effects[i])) for i in drawn], "low")
    lead = _lead(effects, order, error, measured)
    legend = [
        sample("low", "error by the roundings of one op", "dot"),
        sample("hollow", "worst case: all of one sign", "dot"),
    ]
    shown = [effects[i] for i in order[:_SHOWN]]
    cells = [
        (e.op, e.kind, e.by, "-" if math.isnan(e.share) else f"{e.share:.1%}", *map(number_text, (e.error, e.worst)))
        for e in shown
    ]
    head = ("op", "type", "known by", "share", "error", "worst case")
    table = numbers(head, cells, right=3, note="" if len(shown) == len(effects) else "The ops of the largest effect.")
    drawing = element("div", plot(x, y, marks, name=lead, legend=legend), *remarks(notes), table)
    data: dict[str, object] = {
        "error": finite(error),
        "measured": finite(measured),
        "ops": len(effects),
        "notes": list(notes),
        "rows": [{"place": i} | record(effects[i]) for i in drawn],
    }
    return Figure("effects", "Predicted effect on the outputs", lead, drawing, data, notebook=True)


_FLOOR = 1e-5
"""Effects below this part of the largest one would squeeze the others."""


def _words(effect: Effect) -> str:
    return f"{effect.op} ({effect.kind}): {number_text(effect.error)}, worst case {number_text(effect.worst)}"


def _lead(effects: Sequence[Effect], order: Sequence[int], error: float, measured: float) -> str:
    if not effects:
        return "No op rounds."
    first = effects[order[0]]
    most = f"the largest part comes from {short(first.op)}"
    return (
        f"Error of the outputs by the roundings of {count(len(effects), 'op')}: {number_text(error)} predicted,"
        f" {number_text(measured)} measured; {most}."
    )
