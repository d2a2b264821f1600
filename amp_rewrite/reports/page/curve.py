"""Figure of time against error: the choices of low ops between the conversion and float32."""

from __future__ import annotations

from collections.abc import Sequence

from amp_rewrite.errors import count
from amp_rewrite.reports.measurements import CurvePoint
from amp_rewrite.reports.page.axis import Axis, number_text, record
from amp_rewrite.reports.page.chart import numbers, plot, sample
from amp_rewrite.reports.page.marks import dots
from amp_rewrite.reports.page.markup import element, short
from amp_rewrite.reports.page.page import Figure


def curve_figure(points: Sequence[CurvePoint], gpu: str, low: str, data: str) -> Figure:
    """Return time against error as a figure."""
    errors = [e for point in points for e in (point.error, point.measured_error) if e > 0]
    x = Axis.linear(f"predicted µs on {gpu}", [point.micros for point in points])
    y = Axis.logarithmic("error of the outputs, relative", errors or [1e-6, 1.0])
    rounded = [point for point in points if point.error > 0 or point.measured_error > 0]
    marks = dots(x, y, [(s.micros, s.error, f"predicted: {_words(s)}") for s in rounded], "hollow")
    marks += dots(x, y, [(s.micros, s.measured_error, f"measured: {_words(s)}") for s in rounded], "low")
    plain = [s for s in rounded if s.kind == "converted"]
    marks += dots(x, y, [(s.micros, s.measured_error, f"as convert gives it: {_words(s)}") for s in plain], "ring")
    exact = next((point for point in points if point.kind == "float32"), None)
    against = f", against {number_text(exact.micros)} µs of float32" if exact is not None else ""
    lead = f"{count(len(rounded), 'choice')} of ops in {short(low)}{against}; errors on {short(data)}."
    legend = [
        sample("low", "measured error, emulated", "dot"),
        sample("hollow", "predicted error", "dot"),
        sample("ring", "the conversion by default", "dot"),
    ]
    ends = [map(number_text, (s.error, s.measured_error, s.largest, s.measured_largest)) for s in points]
    facts = [(str(i), s.kind, number_text(s.micros), str(s.float32_ops)) for i, s in enumerate(points)]
    cells = [(*fact, *errors) for fact, errors in zip(facts, ends, strict=True)]
    head = ("point", "kind", "µs", "float32 ops", "error", "measured", "largest", "measured")
    drawing = element("div", plot(x, y, marks, name=lead, legend=legend), numbers(head, cells, right=6))
    drawn = {"gpu": gpu, "points": [record(point) for point in points]}
    return Figure("pareto", "Time against error", lead, drawing, drawn, notebook=True)


def _words(point: CurvePoint) -> str:
    return f"{number_text(point.micros)} µs, {count(point.float32_ops, 'float32 op')}, error {number_text(point.error)}"
