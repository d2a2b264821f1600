"""Marks of charts, in percent: those between the two axes of a plot, and those in the rows of one axis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from xml.etree.ElementTree import Element

from amp_rewrite.reports.page.axis import Axis, Bin, percent
from amp_rewrite.reports.page.markup import element, hint

_ROOM, _RING, _RINGS = 0.07, 0.065, 15
"""Share of the area that a line of words takes, and a ring; rings that have room above each other."""
_GRAIN = 1000
"""Units of the paths, which are stretched to their area."""


def _extent(axis: Axis, low: float, high: float, least: float = 0.0) -> tuple[float, float] | None:
    """Return the places of two numbers; None for NaN, or if they are nearer than `least`."""
    start, end = axis.at(low), axis.at(high)
    return None if start is None or end is None or end - start < least else (start, end)


# -- in a plot -----------------------------------------------------------------------------------------


def band(y: Axis, low: float, high: float, kind: str) -> list[Element]:
    """Return a band across the area from one number to another; an empty list if it lies beyond the axis."""
    bottom, top = _extent(y, low, high) or (0.0, 0.0)
    if top <= bottom:
        return []
    place = {"y": percent(1 - top), "height": percent(top - bottom)}
    return [element("rect", x="0%", width="100%", class_=f"band {kind}", **place)]


def caption(y: Axis, low: float, high: float, words: str) -> list[Element]:
    """Return words at the upper right of a band; an empty list if the band has no room for them."""
    extent = _extent(y, low, high, _ROOM)
    place = percent(1 - extent[1]) if extent else ""
    return [element("text", words, x="100%", dx="-4", y=place, dy="14", class_="words")] if extent else []


def limit(y: Axis, number: float, words: str, kind: str = "tolerance") -> list[Element]:
    """Return a line across the area at a number, with words on it; an empty list if it lies beyond the axis."""
    if not y.holds(number):
        return []
    line = element("line", x1="0%", x2="100%", y1=y.up(number), y2=y.up(number), class_=kind)
    below, note = (y.at(number) or 0.0) > 0.9, "note" if kind == "tolerance" else "aside"
    return [line, element("text", words, x="0%", dx="4", y=y.up(number), dy="14" if below else "-5", class_=note)]


def envelope(x: Axis, y: Axis, bins: Iterable[Bin], kind: str) -> list[Element]:
    """Return a filled area from the least to the largest number of each bin."""
    parts = []
    for part in bins:
        left, right = x.at(part.first) or 0.0, x.at(part.last + 1) or 0.0
        if extent := _extent(y, part.low, part.high):
            corners = (_grain(left), _grain(1 - extent[0] + 0.002), _grain(1 - extent[1] - 0.002), _grain(right))
            parts.append("M{0} {1}V{2}H{3}V{1}Z".format(*corners))
    return _path("".join(parts), f"filled {kind}")


def spans(x: Axis, y: Axis, items: Iterable[tuple[float, float, float, str]], kind: str) -> list[Element]:
    """Return an upright bar for each place, least and largest number and words, which hovering shows."""
    marks = []
    for place, low, high, words in items:
        if (across := _extent(x, place + 0.1, place + 0.9)) and (extent := _extent(y, low, high)):
            sides = {"x": percent(across[0]), "width": percent(across[1] - across[0])}
            ends = {"y": percent(1 - extent[1] - 0.002), "height": percent(extent[1] - extent[0] + 0.004)}
            marks.append(element("rect", hint(words), class_=f"span {kind}", **sides, **ends))
    return marks


def pins(x: Axis, y: Axis, items: Sequence[tuple[float, float, str]]) -> list[Element]:
    """Return a ring for each place and number, with a short mark that the text below a chart explains.

    A ring that would cover another one stands above or below it, and one for NaN at the top.
    """
    taken: list[tuple[float, float]] = []
    for place, number, _ in items:
        height = y.at(number)
        across, down = _inside(x.at(place) or 0.0), _inside(0.0 if height is None else 1 - height)
        near = sorted((_inside(down + i * _RING) for i in range(-_RINGS, _RINGS)), key=lambda other: abs(other - down))
        free = (d for d in near if not any(abs(across - a) < _RING and abs(d - b) < _RING for a, b in taken))
        taken.append((across, next(free, down)))
    return [_pin(across, down, mark) for (across, down), (_, _, mark) in zip(taken, items, strict=True)]


def _inside(share: float) -> float:
    return min(max(share, 0.04), 0.96)


def _pin(across: float, down: float, mark: str) -> Element:
    ring = element("circle", cx=0, cy=0, r=9, class_="pin")
    words = element("text", mark, x=0, y=0, dy="0.35em", text_anchor="middle", class_="pin")
    return element("svg", ring, words, x=percent(across), y=percent(down), overflow="visible")


def _path(drawn: str, kind: str) -> list[Element]:
    """Return a path in units of the whole area, in lines of constant width."""
    if not drawn:
        return []
    path = element("path", d=drawn, class_=kind, vector_effect="non-scaling-stroke")
    box = {"viewBox": f"0 0 {_GRAIN} {_GRAIN}", "preserveAspectRatio": "none", "width": "100%", "height": "100%"}
    return [element("svg", path, **box)]


def _grain(share: float) -> str:
    return f"{share * _GRAIN:.5g}"


# -- in a row ------------------------------------------------------------------------------------------


def stretch(axis: Axis, low: float, high: float, kind: str, words: str = "") -> list[Element]:
    """Return a bar in a row, from one number to another; hovering shows the words."""
    if (extent := _extent(axis, low, high)) is None:
        return []
    sides = {"x": percent(extent[0]), "width": percent(max(extent[1] - extent[0], 0.003))}
    return [element("rect", hint(words), y="20%", height="60%", class_=f"span {kind}", **sides)]


def backdrop(axis: Axis, low: float, high: float, kind: str) -> list[Element]:
    """Return a band over the full height of a row."""
    start, end = _extent(axis, low, high) or (0.0, 0.0)
    sides = {"x": percent(start), "width": percent(end - start)}
    return [element("rect", **sides, y="0%", height="100%", class_=f"band {kind}")] if end > start else []


def upright(axis: Axis, number: float, kind: str) -> list[Element]:
    """Return a line across a row at a number; an empty list if it lies beyond the axis."""
    place = axis.along(number)
    return [element("line", x1=place, x2=place, y1="0%", y2="100%", class_=kind)] if axis.holds(number) else []


def spot(axis: Axis, number: float | None, kind: str, words: str = "") -> list[Element]:
    """Return a dot in a row, whose words hovering shows; a triangle at the end beyond the axis, no mark for None."""
    if number is None:
        return []
    if not axis.holds(number):
        arrow = "▶" if math.isnan(number) or number > axis.high else "◀"
        place = {"x": "100%" if arrow == "▶" else "0%", "text_anchor": "end" if arrow == "▶" else "start"}
        return [element("text", arrow, hint(words), y="50%", dy="0.35em", class_=f"edge {kind}", **place)]
    return [element("circle", hint(words), cx=axis.along(number), cy="50%", r=4.5, class_=f"dot {kind}")]
