"""Marks in the rows of a chart, in percent of the row."""

from __future__ import annotations

import math
from xml.etree.ElementTree import Element

from amp_rewrite.reports.page.axis import Axis, percent
from amp_rewrite.reports.page.markup import element, hint


def stretch(axis: Axis, low: float, high: float, kind: str, words: str = "") -> list[Element]:
    """Return a bar in a row, from one number to another.

    Args:
        axis: axis of the row.
        low: its start.
        high: its end.
        kind: class of the bar.
        words: what hovering shows.
    """
    start, end = axis.at(low), axis.at(high)
    if start is None or end is None or end < start:
        return []
    sides = {"x": percent(start), "width": percent(max(end - start, 0.003))}
    return [element("rect", hint(words), y="20%", height="60%", class_=f"span {kind}", **sides)]


def backdrop(axis: Axis, low: float, high: float, kind: str) -> list[Element]:
    """Return a band over the full height of a row.

    Args:
        axis: axis of the row.
        low: its start.
        high: its end.
        kind: class of the band.
    """
    start, end = axis.at(low), axis.at(high)
    if start is None or end is None or end <= start:
        return []
    return [element("rect", x=percent(start), width=percent(end - start), y="0%", height="100%", class_=f"band {kind}")]


def whisker(axis: Axis, low: float, high: float) -> list[Element]:
    """Return a line with ends in a row: a spread.

    Args:
        axis: axis of the row.
        low: its start.
        high: its end.
    """
    ends = (axis.along(low), axis.along(high))
    beyond = spot(axis, high, "muted", f"{high:.4g}") if high > axis.high else []
    bars = [element("line", x1=end, x2=end, y1="30%", y2="70%", class_="whisker") for end in ends]
    return [element("line", x1=ends[0], x2=ends[1], y1="50%", y2="50%", class_="whisker"), *bars, *beyond]


def upright(axis: Axis, number: float, kind: str) -> list[Element]:
    """Return a line across a row at a number; nothing if it lies beyond the axis.

    Args:
        axis: axis of the row.
        number: where it stands.
        kind: class of the line.
    """
    place = axis.along(number)
    return [element("line", x1=place, x2=place, y1="0%", y2="100%", class_=kind)] if axis.holds(number) else []


def spot(axis: Axis, number: float | None, kind: str, words: str = "") -> list[Element]:
    """Return a dot in a row; a triangle at the end for a number beyond the axis, nothing for None.

    Args:
        axis: axis of the row.
        number: where it stands.
        kind: class of the dot.
        words: what hovering shows.
    """
    if number is None:
        return []
    if not axis.holds(number):
        arrow = "▶" if math.isnan(number) or number > axis.high else "◀"
        place = {"x": "100%" if arrow == "▶" else "0%", "text_anchor": "end" if arrow == "▶" else "start"}
        return [element("text", arrow, hint(words), y="50%", dy="0.35em", class_=f"edge {kind}", **place)]
    return [element("circle", hint(words), cx=axis.along(number), cy="50%", r=4.5, class_=f"dot {kind}")]
