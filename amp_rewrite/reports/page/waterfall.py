"""Figure of errors: how the error of each op's output grows along the depth, and what each op adds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import count
from amp_rewrite.reports.measurements import OpErrors
from amp_rewrite.reports.page.axis import MOST_POINTS, Axis, binned, height, number_text, record
from amp_rewrite.reports.page.chart import numbers, plot, remarks, sample
from amp_rewrite.reports.page.marks import dots, envelope, limit, pins, steps
from amp_rewrite.reports.page.markup import element, short
from amp_rewrite.reports.page.page import Figure

_ADDING = 5
"""Ops that add most, named below the chart."""
_DUST = 1e-6
"""OpErrors below this part of the spacing at 1 would squeeze the others."""


@dataclass(frozen=True, slots=True)
class MarkedOps:
    """Places of ops that a waterfall names: the first beyond the tolerance, and the first jump; None without one."""

    tolerance: float | None
    beyond: int | None
    jump: int | None


def waterfall(rows: Sequence[OpErrors], marked: MarkedOps, low: str, data: str, notes: Sequence[str] = ()) -> Figure:
    """Return the errors of ops along the depth as a figure."""
    eps = DType.parse(low).eps
    sizes = [n for row in rows for n in (row.accumulated, row.own) if n is not None and n > eps * _DUST]
    above = [] if marked.tolerance is None else [marked.tolerance, 3 * marked.tolerance]  # its line is not the edge
    y = Axis.logarithmic("error of an op's output, relative", [*sizes, eps, *above])
    x = Axis.depth("op", len(rows))
    whole = len(rows) <= MOST_POINTS
    totals = [row.accumulated for row in rows]
    bins = [] if whole else binned(totals, totals)
    lost = [not math.isfinite(total) for total in totals]
    added = sorted((i for i, row in enumerate(rows) if row.own), key=lambda i: (-height(rows[i].own or 0.0), i))
    adding = added[:_ADDING]
    marks = limit(y, eps, f"spacing of {low} at 1", "reference")
    if marked.tolerance is not None:
        marks += limit(y, marked.tolerance, f"tolerance {marked.tolerance:g}")
    if whole:
        marks += steps(x, y, enumerate(map(height, totals)), "high")
        first_lost = (i for i, now in enumerate(lost) if now and not (i and lost[i - 1]))
        marks += dots(x, y, ((i + 0.5, math.inf, f"{rows[i].op}: infinite or NaN") for i in first_lost), "high")
    else:
        marks += envelope(x, y, bins, "high")
    chosen = [i for i, row in enumerate(rows) if row.own] if whole else adding
    own = ((i + 0.5, rows[i].own, f"{rows[i].op} ({rows[i].kind}) adds {number_text(rows[i].own)}") for i in chosen)
    marks += dots(x, y, own, "low")
    places = {"T": marked.beyond, "J": marked.jump if marked.jump != marked.beyond else None}
    named = {mark: i for mark, i in places.items() if i is not None}  # by their mark
    named |= {str(number): i for number, i in enumerate((i for i in adding if i not in named.values()), 1)}
    ends = ((mark, i, rows[i].own if mark.isdecimal() else totals[i]) for mark, i in named.items())
    marks += pins(x, y, [(i + 0.5, height(end or 0.0), mark) for mark, i, end in ends])
    lead = _lead(rows, marked, low, data, len(bins))
    legend = [
        sample("high", "accumulated: of the output, in the model as it runs", "line" if whole else "filled"),
        sample("low", "local: added by the op alone", "dot"),
        *([sample("high", "infinite or NaN", "edge")] if any(lost) else []),
    ]
    cells = (
        (r.op, r.kind, r.dtype, number_text(r.own), number_text(r.accumulated))
        for r in (rows if whole else [rows[i] for i in adding])
    )
    note = "" if whole else "The ops that add most; the JSON of locate holds all."
    table = numbers(("op", "type", "runs as", "adds", "off by"), cells, right=2, note=note)
    picture = plot(x, y, marks, name=lead, legend=legend)
    drawing = element("div", picture, _explained(rows, marked, named), *remarks(notes), table)
    drawn: dict[str, object] = {
        "low": low,
        "tolerance": marked.tolerance,
        "eps": eps,
        "first_beyond": None if marked.beyond is None else rows[marked.beyond].op,
        "first_jump": None if marked.jump is None else rows[marked.jump].op,
        "adding": [rows[i].op for i in adding],
        "ops": len(rows),
        "notes": list(notes),
        "rows": [
            {"place": i} | record(rows[i]) for i in (range(len(rows)) if whole else sorted({*adding, *named.values()}))
        ],
        "bins": [part.data for part in bins],
    }
    return Figure("errors", "Errors along the depth", lead, drawing, drawn, notebook=True)


def _explained(rows: Sequence[OpErrors], marked: MarkedOps, named: Mapping[str, int]) -> Element:
    items = []
    for mark, i in named.items():
        row = rows[i]
        what = f"{short(row.op)} ({short(row.kind)}, {short(row.dtype)})"
        if mark.isdecimal():
            words = f"{what} adds {number_text(row.own)}"
        else:
            words = f"{what}, off by {number_text(row.accumulated)}, adds {number_text(row.own)}"
        also = "first beyond the tolerance" if mark == "T" else "first jump of the error" if mark == "J" else ""
        if mark == "T" and marked.jump == marked.beyond:
            also += " and first jump of the error"
        lost = ", overflows on the reference's values" if row.overflows else ""
        items.append(element("li", element("b", mark), f" {also + ': ' if also else ''}{words}{lost}"))
    return element("ul", *items, class_="pins")


def _lead(rows: Sequence[OpErrors], marked: MarkedOps, low: str, data: str, bins: int) -> str:
    if not rows:
        return f"No op could be compared ({short(data)})."
    words = [
        f"Errors of {count(len(rows), 'op')} against the reference on {short(data)}, by depth; the low type is {low}."
    ]
    if marked.tolerance is not None and marked.beyond is None:
        words.append(f"No op is off by more than {marked.tolerance:g}.")
    if marked.tolerance is not None and marked.beyond is not None:
        words.append(f"The first op off by more than {marked.tolerance:g} is {short(rows[marked.beyond].op)}.")
    if marked.jump is not None:
        words.append(f"The error first jumps at {short(rows[marked.jump].op)}.")
    if bins:
        words.append(
            f"Too many to draw one by one: {bins} bins of neighbours show their smallest and largest error, and"
        )
        words.append(f"of the local errors the {_ADDING} largest.")
    return " ".join(words)
