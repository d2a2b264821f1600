"""Marks between the two axes of a plot, in percent of its area."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from xml.etree.ElementTree import Element

from amp_rewrite.reports.page.axis import Axis, percent
from amp_rewrite.reports.page.bins import Bin
from amp_rewrite.reports.page.markup import element, hint

_ROOM, _RING, _RINGS = 0.07, 0.065, 15
"""Share of the area that a line of words takes, and a ring; rings that have room above each other."""
_GRAIN = 1000
"""Units of the paths, which are stretched to their area."""

Point = tuple[float, float | None]
"""Place and number; None for a number that was not measured."""


def band(y: Axis, low: float, high: float, kind: str) -> list[Element]:
    """Return a band across the area from one number to another; nothing if it lies beyond the axis.

    Args:
        y: the vertical axis.
        low: lower number.
        high: upper number.
        kind: class of the band.
    """
    bottom, top = y.at(low), y.at(high)
    if bottom is None or top is None or top <= bottom:
        return []
    place = {"y": percent(1 - top), "height": percent(top - bottom)}
    return [element("rect", x="0%", width="100%", class_=f"band {kind}", **place)]


def caption(y: Axis, low: float, high: float, words: str) -> list[Element]:
    """Return words at the upper right of a band; nothing if the band has no room for them.

    Args:
        y: the vertical axis.
        low: lower number of the band.
        high: its upper number.
        words: what it means.
    """
    bottom, top = y.at(low), y.at(high)
    if bottom is None or top is None or top - bottom < _ROOM:
        return []
    return [element("text", words, x="100%", dx="-4", y=percent(1 - top), dy="14", class_="words")]


def limit(y: Axis, number: float, words: str, kind: str = "tolerance") -> list[Element]:
    """Return a line across the area at a number, with words on it; nothing if it lies beyond the axis.

    Args:
        y: the vertical axis.
        number: where the line stands.
        words: its label.
        kind: class of the line.
    """
    if not y.holds(number):
        return []
    line = element("line", x1="0%", x2="100%", y1=y.up(number), y2=y.up(number), class_=kind)
    below, note = (y.at(number) or 0.0) > 0.9, "note" if kind == "tolerance" else "aside"
    return [line, element("text", words, x="0%", dx="4", y=y.up(number), dy="14" if below else "-5", class_=note)]


def steps(x: Axis, y: Axis, points: Iterable[Point], kind: str) -> list[Element]:
    """Return a line of steps: each number from its place to the next one. It breaks where a number is missing.

    Args:
        x: the horizontal axis.
        y: the vertical axis.
        points: place and number of each step.
        kind: class of the line.
    """
    parts, before = [], False
    for place, number in points:
        start, end, height = x.at(place), x.at(place + 1), None if number is None else y.at(number)
        if height is None or start is None or end is None:
            before = False
            continue
        level = _grain(1 - height)
        parts.append(f"{'V' if before else f'M{_grain(start)} '}{level}H{_grain(end)}")
        before = True
    return _path("".join(parts), f"line {kind}")


def envelope(x: Axis, y: Axis, bins: Iterable[Bin], kind: str) -> list[Element]:
    """Return a filled area from the least to the largest number of each bin.

    Args:
        x: the horizontal axis.
        y: the vertical axis.
        bins: what `binned` returns.
        kind: class of the area.
    """
    parts = []
    for part in bins:
        left, right = x.at(part.first) or 0.0, x.at(part.last + 1) or 0.0
        bottom, top = y.at(part.low), y.at(part.high)
        if bottom is not None and top is not None:
            corners = (_grain(left), _grain(1 - bottom + 0.002), _grain(1 - top - 0.002), _grain(right))
            parts.append("M{0} {1}V{2}H{3}V{1}Z".format(*corners))
    return _path("".join(parts), f"filled {kind}")


def polyline(x: Axis, y: Axis, points: Iterable[tuple[float, float]], kind: str) -> list[Element]:
    """Return a line through points.

    Args:
        x: the horizontal axis.
        y: the vertical axis.
        points: place and number of each.
        kind: class of the line.
    """
    places = ((x.at(place), y.at(number)) for place, number in points)
    corners = [f"{_grain(a)} {_grain(1 - height)}" for a, height in places if a is not None and height is not None]
    return _path("M" + "L".join(corners), f"line {kind}") if corners else []


def dots(x: Axis, y: Axis, points: Iterable[tuple[float, float | None, str]], kind: str) -> list[Element]:
    """Return a dot for each number, which hovering names; a triangle at the edge for one beyond the axis.

    Args:
        x: the horizontal axis.
        y: the vertical axis.
        points: place, number and words of each dot; one without a number is left out.
        kind: class of the dots.
    """
    return [mark for place, number, words in points for mark in _dot(x, y, place, number, words, kind)]


def spans(x: Axis, y: Axis, items: Iterable[tuple[float, float, float, str]], kind: str) -> list[Element]:
    """Return an upright bar for each span of numbers, which hovering names.

    Args:
        x: the horizontal axis.
        y: the vertical axis.
        items: place, least and largest number, and words of each bar.
        kind: class of the bars.
    """
    marks = []
    for place, low, high, words in items:
        left, right, bottom, top = x.at(place + 0.1), x.at(place + 0.9), y.at(low), y.at(high)
        if None not in (left, right, bottom, top):
            assert left is not None and right is not None and bottom is not None and top is not None
            sides = {"x": percent(left), "width": percent(right - left)}
            ends = {"y": percent(1 - top - 0.002), "height": percent(top - bottom + 0.004)}
            marks.append(element("rect", hint(words), class_=f"span {kind}", **sides, **ends))
    return marks


def pins(x: Axis, y: Axis, items: Sequence[tuple[float, float, str]]) -> list[Element]:
    """Return rings with a short mark each, such as a number, that the text below a chart explains.

    A ring that would cover another one stands above or below it.

    Args:
        x: the horizontal axis.
        y: the vertical axis.
        items: place, number and mark of each; NaN stands at the top.
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


def _dot(x: Axis, y: Axis, place: float, number: float | None, words: str, kind: str) -> Iterator[Element]:
    if number is None:
        return
    across = x.along(place)
    if not y.holds(number):
        top = math.isnan(number) or number > y.high
        mark, height, shift = ("▲", "0%", "11") if top else ("▼", "100%", "-2")
        yield element(
            "text", mark, hint(words), x=across, y=height, dy=shift, text_anchor="middle", class_=f"edge {kind}"
        )
    else:
        yield element("circle", hint(words), cx=across, cy=y.up(number), r=3.5, class_=f"dot {kind}")


def _path(drawn: str, kind: str) -> list[Element]:
    """Return a path in units of the whole area, in lines of constant width."""
    if not drawn:
        return []
    path = element("path", d=drawn, class_=kind, vector_effect="non-scaling-stroke")
    box = {"viewBox": f"0 0 {_GRAIN} {_GRAIN}", "preserveAspectRatio": "none", "width": "100%", "height": "100%"}
    return [element("svg", path, **box)]


def _grain(share: float) -> str:
    return f"{share * _GRAIN:.5g}"
