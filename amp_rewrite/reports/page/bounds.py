"""Figure of bounds: what each value is proved to stay within, along the depth, against the range of a low type."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Protocol
from xml.etree.ElementTree import Element

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import count
from amp_rewrite.reports.page.axis import Axis, finite, number_text
from amp_rewrite.reports.page.bins import MOST_POINTS
from amp_rewrite.reports.page.chart import numbers, plot, sample, table
from amp_rewrite.reports.page.figure import Figure
from amp_rewrite.reports.page.marks import band, caption, dots
from amp_rewrite.reports.page.markup import element, short
from amp_rewrite.reports.render import share

_LEAST, _MOST = 1e-3, 1e12
"""Magnitudes that the axis holds at most."""
_LISTED = 200
_KINDS = {"proved to fit": "low", "measured to fit": "cast", "proved to overflow": "high", "unknown": "hollow"}


class Bounded(Protocol):
    """A value with a bound, as `BoundRow` has it."""

    @property
    def value(self) -> str:
        """Its name."""

    @property
    def kind(self) -> str:
        """The type of its op."""

    @property
    def heavy(self) -> bool:
        """True for the result of a product."""

    @property
    def klass(self) -> str:
        """Its class."""

    @property
    def because(self) -> str:
        """The step of the proof."""

    @property
    def least(self) -> float:
        """The magnitude that it is proved to reach."""

    @property
    def absmax(self) -> float:
        """The magnitude that it is proved to stay within."""


def bounds_figure(rows: Sequence[Bounded], to: DType, given: str) -> Figure:
    """Return the bounds of values as a figure.

    Args:
        rows: one per value, in topological order.
        to: the low type that they should fit.
        given: the ranges of inputs that the proofs use, in words; empty for none.
    """
    every, heavy = (Counter(row.klass for row in rows if row.heavy or not only) for only in (False, True))
    drawn = rows if len(rows) <= MOST_POINTS else [row for row in rows if row.heavy][:MOST_POINTS]
    sizes = [min(max(row.absmax, _LEAST), _MOST) for row in rows if row.absmax < math.inf]
    y = Axis.logarithmic("largest magnitude that is possible", [*sizes, to.tiny, 10 * to.max])
    x = Axis.linear("value, by depth", [0, max(len(drawn), 1)], zero=True, whole=True)
    marks = [*band(y, 0.0 if y.low <= 0 else y.low, to.max, "low"), *band(y, to.max, math.inf, "high")]
    for klass, kind in _KINDS.items():
        chosen = ((i + 0.5, _height(row), _words(row)) for i, row in enumerate(drawn) if row.klass == klass)
        marks += dots(x, y, chosen, kind)
    marks += caption(y, to.max, math.inf, f"beyond {to.spelling}")
    lead = _lead(rows, every, heavy, to, given, drawn=len(drawn))
    head = ("class", "values", "share", "products", "share")
    cells = (
        (
            klass,
            str(every[klass]),
            share(every[klass], len(rows)),
            str(heavy[klass]),
            share(heavy[klass], heavy.total()),
        )
        for klass in _KINDS
    )
    legend = [sample(kind, klass, "dot") for klass, kind in _KINDS.items() if every[klass]]
    drawing = element(
        "div", table(head, cells, right=4), plot(x, y, marks, name=lead, legend=legend), _table(drawn, len(rows))
    )
    data: dict[str, object] = {
        "to": to.spelling,
        "counts": {klass: every[klass] for klass in _KINDS},
        "products": {klass: heavy[klass] for klass in _KINDS},
        "values": [
            {"value": row.value, "klass": row.klass, "absmax": finite(row.absmax), "least": row.least} for row in drawn
        ],
    }
    return Figure("bounds", "Bounds", lead, drawing, data, notebook=True)


def _height(row: Bounded) -> float:
    return row.least if row.klass == "proved to overflow" and row.absmax == math.inf else row.absmax


def _words(row: Bounded) -> str:
    size = f"at most {number_text(row.absmax)}" if row.absmax < math.inf else "no bound"
    return f"{row.value}: {size}, {row.klass}; {row.because}"


def _lead(
    rows: Sequence[Bounded], every: Counter[str], heavy: Counter[str], to: DType, given: str, *, drawn: int
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


def _table(rows: Sequence[Bounded], whole: int) -> Element:
    head = ("value", "op", "class", "because", "at most")
    loosest = sorted(rows, key=lambda row: -row.absmax)[:_LISTED]
    cells = (
        (row.value, row.kind, row.klass, row.because, number_text(row.absmax) if row.absmax < math.inf else "unknown")
        for row in loosest
    )
    note = "" if len(loosest) == whole else f"The {len(loosest)} with the largest bounds; `--json` prints all."
    return numbers(head, cells, right=1, note=note)
