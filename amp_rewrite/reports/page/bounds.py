"""Figure of bounds: what each value is proved to stay within, along the depth, against the range of a low type."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from xml.etree.ElementTree import Element

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import count
from amp_rewrite.reports.page.axis import MOST_POINTS, Axis, finite, number_text
from amp_rewrite.reports.page.chart import numbers, plot, sample, table
from amp_rewrite.reports.page.marks import band, caption, dots
from amp_rewrite.reports.page.markup import element, short
from amp_rewrite.reports.page.page import Figure
from amp_rewrite.reports.render import share
from amp_rewrite.reports.rows import BoundRow

_LEAST, _MOST = 1e-3, 1e12
"""Magnitudes that the axis holds at most."""
_LISTED = 200
_KINDS = {"proved to fit": "low", "measured to fit": "cast", "proved to overflow": "high", "unknown": "hollow"}


def bounds_figure(rows: Sequence[BoundRow], to: DType, given: str) -> Figure:
    """Return the bounds of values as a figure."""
    every, heavy = (Counter(row.klass for row in rows if row.heavy or not only) for only in (False, True))
    drawn = rows if len(rows) <= MOST_POINTS else [row for row in rows if row.heavy][:MOST_POINTS]
    sizes = [min(max(row.absmax, _LEAST), _MOST) for row in rows if row.absmax < math.inf]
    y = Axis.logarithmic("largest magnitude that is possible", [*sizes, to.tiny, 10 * to.max])
    x = Axis.depth("value", len(drawn))
    marks = [*band(y, 0.0 if y.low <= 0 else y.low, to.max, "low"), *band(y, to.max, math.inf, "high")]
    for klass, kind in _KINDS.items():
        chosen = ((i + 0.5, _height(row), _words(row)) for i, row in enumerate(drawn) if row.klass == klass)
        marks += dots(x, y, chosen, kind)
    marks += caption(y, to.max, math.inf, f"beyond {to.spelling}")
    lead = _lead(rows, every, heavy, to, given, drawn=len(drawn))
    head = ("class", "values", "share", "products", "share")
    sums = ((every, len(rows)), (heavy, heavy.total()))
    cells = (
        (klass, *(text for n, whole in sums for text in (str(n[klass]), share(n[klass], whole)))) for klass in _KINDS
    )
    legend = [sample(kind, klass, "dot") for klass, kind in _KINDS.items() if every[klass]]
    chart = plot(x, y, marks, name=lead, legend=legend)
    drawing = element("div", table(head, cells, right=4), chart, _table(drawn, len(rows)))
    data: dict[str, object] = {
        "to": to.spelling,
        "counts": {klass: every[klass] for klass in _KINDS},
        "products": {klass: heavy[klass] for klass in _KINDS},
        "values": [
            {"value": row.value, "klass": row.klass, "absmax": finite(row.absmax), "least": row.least} for row in drawn
        ],
    }
    return Figure("bounds", "Bounds", lead, drawing, data, notebook=True)


def _height(row: BoundRow) -> float:
    return row.least if row.klass == "proved to overflow" and row.absmax == math.inf else row.absmax


def _words(row: BoundRow) -> str:
    size = f"at most {number_text(row.absmax)}" if row.absmax < math.inf else "no bound"
    return f"{row.value}: {size}, {row.klass}; {row.because}"


def _lead(
    rows: Sequence[BoundRow], every: Counter[str], heavy: Counter[str], to: DType, given: str, *, drawn: int
) -> str:
    words = [f"Bounds of {count(len(rows), 'value')} for {to.spelling}, from weights alone."]
    if given:
        words.append(f"Given: {short(given)}.")
    if heavy:
        fits = share(heavy["proved to fit"], heavy.total())
        words.append(f"Of {count(heavy.total(), 'product')}, {fits} are proved to fit on every input.")
    if every["proved to overflow"]:
        words.append(f"{count(every['proved to overflow'], 'value')} are proved to overflow for inputs of size 1.")
    if drawn < len(rows):
        words.append("Too many to draw: results of products are shown.")
    return " ".join(words)


def _table(rows: Sequence[BoundRow], whole: int) -> Element:
    head = ("value", "op", "class", "because", "at most")
    loosest = sorted(rows, key=lambda row: -row.absmax)[:_LISTED]
    cells = (
        (row.value, row.kind, row.klass, row.because, number_text(row.absmax) if row.absmax < math.inf else "unknown")
        for row in loosest
    )
    note = "" if len(loosest) == whole else f"The {len(loosest)} with the largest bounds; `--json` prints all."
    return numbers(head, cells, right=1, note=note)
