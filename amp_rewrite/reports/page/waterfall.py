"""Figure of errors: how the error of each op's output grows along the depth, and what each op adds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import count
from amp_rewrite.reports.page.axis import Axis, finite, number_text
from amp_rewrite.reports.page.bins import MOST_POINTS, binned
from amp_rewrite.reports.page.chart import numbers, plot, remarks, sample
from amp_rewrite.reports.page.figure import Figure
from amp_rewrite.reports.page.marks import dots, envelope, limit, pins, steps
from amp_rewrite.reports.page.markup import element, short

_ADDING = 5
"""Ops that add most, named below the chart."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of one op: `own` is what it adds, None if unmeasured; `accumulated` is that of its output."""

    op: str
    kind: str
    dtype: str
    own: float | None
    accumulated: float
    overflows: bool


@dataclass(frozen=True, slots=True)
class Marked:
    """Places of ops that a waterfall names: the first beyond the tolerance, and the first jump; None without one."""

    tolerance: float | None
    beyond: int | None
    jump: int | None


def waterfall(rows: Sequence[Errors], marked: Marked, low: str, data: str, notes: Sequence[str] = ()) -> Figure:
    """Return the errors of ops along the depth as a figure.

    Args:
        rows: the ops, in topological order.
        marked: tolerance and named ops.
        low: the low type.
        data: where the data come from.
        notes: caveats.
    """
    eps = DType.parse(low).eps
    sizes = [number for row in rows for number in (row.accumulated, row.own)]
    y = Axis.logarithmic("error of an op's output, relative", [*_down_to(sizes, eps), eps, *_above(marked.tolerance)])
    x = Axis.linear("op, by depth", [0, max(len(rows), 1)], zero=True, whole=True)
    whole = len(rows) <= MOST_POINTS
    totals = [row.accumulated for row in rows]
    bins = [] if whole else binned(totals, totals)
    adding = _adding(rows)
    marks = limit(y, eps, f"spacing of {low} at 1", "reference")
    if marked.tolerance is not None:
        marks += limit(y, marked.tolerance, f"tolerance {marked.tolerance:g}")
    if whole:
        marks += steps(x, y, ((i, _drawn(row.accumulated)) for i, row in enumerate(rows)), "high")
        lost = [(i + 0.5, math.inf, f"{rows[i].op}: infinite or NaN") for i in _first_lost(rows)]
        marks += dots(x, y, lost, "high")
    else:
        marks += envelope(x, y, bins, "high")
    chosen = [i for i, row in enumerate(rows) if row.own] if whole else adding
    own = ((i + 0.5, rows[i].own, f"{rows[i].op} ({rows[i].kind}) adds {number_text(rows[i].own)}") for i in chosen)
    marks += dots(x, y, own, "low")
    named = _named(marked, adding)
    marks += pins(x, y, [(i + 0.5, _height(rows[i], mark), mark) for mark, i in named.items()])
    lead = _lead(rows, marked, low, data, len(bins))
    legend = [
        sample("high", "accumulated: of the output, in the model as it runs", "line" if whole else "filled"),
        sample("low", "local: added by the op alone", "dot"),
        *([sample("high", "infinite or NaN", "edge")] if any(map(_lost, totals)) else []),
    ]
    picture = plot(x, y, marks, name=lead, legend=legend)
    drawing = element(
        "div", picture, _explained(rows, marked, named), *remarks(notes), _table(rows, adding, whole=whole)
    )
    drawn: dict[str, object] = {
        "low": low,
        "tolerance": marked.tolerance,
        "eps": eps,
        "first_beyond": _name(rows, marked.beyond),
        "first_jump": _name(rows, marked.jump),
        "adding": [rows[i].op for i in adding],
        "ops": len(rows),
        "notes": list(notes),
        "rows": [_row(i, rows[i]) for i in (range(len(rows)) if whole else sorted({*adding, *named.values()}))],
        "bins": [{"first": b.first, "last": b.last, "low": finite(b.low), "high": finite(b.high)} for b in bins],
    }
    return Figure("errors", "Errors along the depth", lead, drawing, drawn, notebook=True)


def _down_to(numbers: Sequence[float | None], eps: float) -> list[float]:
    """Return the numbers without those so small that they would squeeze the others."""
    return [number for number in numbers if number is not None and number > eps * 1e-6]


def _above(tolerance: float | None) -> list[float]:
    """Return the tolerance and a number above it, so that its line is not the upper edge."""
    return [] if tolerance is None else [tolerance, 3 * tolerance]


def _first_lost(rows: Sequence[Errors]) -> list[int]:
    """Return the first op of each group of neighbours whose errors are infinite or NaN."""
    lost = [_lost(row.accumulated) for row in rows]
    return [i for i, (now, before) in enumerate(zip(lost, [False, *lost], strict=False)) if now and not before]


def _adding(rows: Sequence[Errors]) -> list[int]:
    order = sorted((i for i, row in enumerate(rows) if row.own), key=lambda i: (-_drawn(rows[i].own or 0.0), i))
    return order[:_ADDING]


def _named(marked: Marked, adding: Sequence[int]) -> dict[str, int]:
    """Return the named ops by their mark: J and T at the accumulated error, numbers at the local one."""
    places = {"T": marked.beyond, "J": marked.jump if marked.jump != marked.beyond else None}
    named = {mark: i for mark, i in places.items() if i is not None}
    others = (i for i in adding if i not in named.values())
    return named | {str(number): i for number, i in enumerate(others, 1)}


def _height(row: Errors, mark: str) -> float:
    return _drawn(row.own or 0.0) if mark.isdecimal() else _drawn(row.accumulated)


def _explained(rows: Sequence[Errors], marked: Marked, named: Mapping[str, int]) -> Element:
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


def _lead(rows: Sequence[Errors], marked: Marked, low: str, data: str, bins: int) -> str:
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


def _table(rows: Sequence[Errors], adding: Sequence[int], *, whole: bool) -> Element:
    chosen = rows if whole else [rows[i] for i in adding]
    cells = ((r.op, r.kind, r.dtype, number_text(r.own), number_text(r.accumulated)) for r in chosen)
    note = "" if whole else "The ops that add most; the JSON of locate holds all."
    return numbers(("op", "type", "runs as", "adds", "off by"), cells, right=2, note=note)


def _row(place: int, row: Errors) -> dict[str, object]:
    numbers = {"own": finite(row.own), "accumulated": finite(row.accumulated)}
    return {"place": place, "op": row.op, "kind": row.kind, "dtype": row.dtype, **numbers, "overflows": row.overflows}


def _name(rows: Sequence[Errors], place: int | None) -> str | None:
    return None if place is None else rows[place].op


def _lost(number: float) -> bool:
    return not math.isfinite(number)


def _drawn(number: float) -> float:
    return number if math.isfinite(number) else math.inf
