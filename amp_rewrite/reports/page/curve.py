"""Figure of time against error: the choices of low ops between the conversion and float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from amp_rewrite.errors import count
from amp_rewrite.reports.page.axis import Axis, finite, number_text
from amp_rewrite.reports.page.chart import numbers, plot, sample
from amp_rewrite.reports.page.marks import dots
from amp_rewrite.reports.page.markup import element, short
from amp_rewrite.reports.page.page import Figure


@dataclass(frozen=True, slots=True)
class Spot:
    """One choice: its kind, predicted µs, predicted and measured error, those of the worst element, float32 ops."""

    kind: str
    micros: float
    error: float
    measured: float
    largest: float
    measured_largest: float
    float32_ops: int


def curve_figure(spots: Sequence[Spot], gpu: str, low: str, data: str) -> Figure:
    """Return time against error as a figure."""
    errors = [e for spot in spots for e in (spot.error, spot.measured) if e > 0]
    x = Axis.linear(f"predicted µs on {gpu}", [spot.micros for spot in spots])
    y = Axis.logarithmic("error of the outputs, relative", errors or [1e-6, 1.0])
    rounded = [spot for spot in spots if spot.error > 0 or spot.measured > 0]
    marks = dots(x, y, [(s.micros, s.error, f"predicted: {_words(s)}") for s in rounded], "hollow")
    marks += dots(x, y, [(s.micros, s.measured, f"measured: {_words(s)}") for s in rounded], "low")
    plain = [s for s in rounded if s.kind == "converted"]
    marks += dots(x, y, [(s.micros, s.measured, f"as convert gives it: {_words(s)}") for s in plain], "ring")
    exact = next((spot for spot in spots if spot.kind == "float32"), None)
    against = f", against {number_text(exact.micros)} µs of float32" if exact is not None else ""
    lead = f"{count(len(rounded), 'choice')} of ops in {short(low)}{against}; errors on {short(data)}."
    legend = [
        sample("low", "measured error, emulated", "dot"),
        sample("hollow", "predicted error", "dot"),
        sample("ring", "the conversion by default", "dot"),
    ]
    ends = [map(number_text, (s.error, s.measured, s.largest, s.measured_largest)) for s in spots]
    facts = [(str(i), s.kind, number_text(s.micros), str(s.float32_ops)) for i, s in enumerate(spots)]
    cells = [(*fact, *errors) for fact, errors in zip(facts, ends, strict=True)]
    head = ("point", "kind", "µs", "float32 ops", "error", "measured", "largest", "measured")
    drawing = element("div", plot(x, y, marks, name=lead, legend=legend), numbers(head, cells, right=6))
    rows = [{name: finite(n) if isinstance(n, float) else n for name, n in asdict(spot).items()} for spot in spots]
    return Figure("pareto", "Time against error", lead, drawing, {"gpu": gpu, "points": rows}, notebook=True)


def _words(spot: Spot) -> str:
    return f"{number_text(spot.micros)} µs, {count(spot.float32_ops, 'float32 op')}, error {number_text(spot.error)}"
