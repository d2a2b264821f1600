"""Charts as SVG without a script: labelled rows of marks on one axis, and the tables below them.

Marks stand in percent of an area that fills its page, so that text keeps its size on narrow and on wide ones. Numbers
that an axis cannot show stand at its ends, marked as such.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self
from xml.etree.ElementTree import Element, tostring

from amp_rewrite.reports.render import cut, plain

_TICKS = 5
_ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)
"""Steps between ticks, by powers of ten."""
_LEAST, _MOST = -308, 308
"""Powers of ten that a float holds in full precision."""
_SHORT = 24
"""Characters of a cell that stays on one line."""
_LABEL, _CELL, _TITLE = 64, 160, 400
"""Characters of a name beside a row, in a table, and in what hovering shows."""


# -- axes ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Axis:
    """The two ends of an axis, and its scale; those of a logarithmic one are above zero."""

    label: str
    low: float
    high: float
    log: bool = False

    @classmethod
    def linear(cls, label: str, numbers: Iterable[float | None]) -> Self:
        """Return an axis for the finite numbers."""
        known = _finite(numbers) or [0.0]
        low, high = min(known), max(known)
        if low == high:
            low, high = (low - abs(low) / 2, low + abs(low) / 2) if low else (0.0, 1.0)
        return cls(label, low, high) if low < high and math.isfinite(high - low) else cls(label, 0.0, 1.0)

    @classmethod
    def logarithmic(cls, label: str, numbers: Iterable[float | None]) -> Self:
        """Return a logarithmic axis of whole powers of ten for the finite numbers above zero."""
        powers = [math.log10(number) for number in _finite(numbers) if number > 0]
        first = max(math.floor(min(powers, default=0.0)), _LEAST)
        last = min(math.ceil(max(powers, default=0.0)), _MOST)
        if first >= last:
            first, last = (first - 1, first) if first == _MOST else (first, first + 1)
        return cls(label, 10.0**first, 10.0**last, log=True)

    def at(self, number: float) -> float | None:
        """Return the place of a number from 0 to 1; numbers beyond an end stand at the end, and NaN has no place."""
        if math.isnan(number):
            return None
        if not self.low < number < self.high:
            return 0.0 if number <= self.low else 1.0
        if self.log:
            low = math.log10(self.low)
            return (math.log10(number) - low) / (math.log10(self.high) - low)
        return (number - self.low) / (self.high - self.low)

    def along(self, number: float) -> str:
        """Return the place of a number as an attribute; NaN stands at the start."""
        return percent(self.at(number) or 0.0)

    def holds(self, number: float) -> bool:
        """True if a number lies between the ends."""
        return self.low <= number <= self.high

    def ticks(self, most: int = 6) -> list[tuple[float, str]]:
        """Return at most so many round numbers on the axis, 2 or more, with their labels."""
        if not self.log:
            return self._steps(most)
        first, last = (round(math.log10(end)) for end in (self.low, self.high))
        step = max(1, -(-(last - first) // (most - 1)))
        start = -(-first // step) * step  # multiples of the step, so that 1 is a tick where it lies inside
        powers = range(start, last + 1, step)
        return [(10.0**n, f"{10.0**n:.{max(-n, 0)}f}" if -3 < n < 5 else f"1e{n}") for n in powers]

    def _steps(self, most: int) -> list[tuple[float, str]]:
        rough = (self.high - self.low) / (most - 1)
        power = math.floor(math.log10(rough)) if rough > 0 else 0
        step = next((s for s in (m * 10.0**power for m in _ROUND) if s >= rough), rough)
        first = math.ceil(self.low / step)
        ticks = (step * (first + i) for i in range(most))
        inside = [tick for tick in ticks if tick <= self.high] or [self.low, self.high]
        return [(tick, number_text(tick)) for tick in inside]


def number_text(number: float | None) -> str:
    """Return a number in three digits; "–" for None."""
    if number is None:
        return "–"
    if math.isinf(number):
        return "infinity" if number > 0 else "-infinity"
    if math.isnan(number):
        return "NaN"
    if abs(number) < 1e6 and (number == round(number) or abs(number) >= 1e3):
        return f"{float(f'{number:.3g}') if number != round(number) else number:.0f}"
    return f"{number:.3g}"


def percent(share: float) -> str:
    """Return a share from 0 to 1 as an attribute of SVG: "12.5%"."""
    return f"{100 * share:.5g}%"


def finite(number: float | None) -> float | None:
    """Return a number for JSON: None for infinities and NaN."""
    return number if number is not None and math.isfinite(number) else None


def _finite(numbers: Iterable[float | None]) -> list[float]:
    return [float(number) for number in numbers if number is not None and math.isfinite(number)]


# -- marks ---------------------------------------------------------------------------------------------


def stretch(axis: Axis, low: float, high: float, kind: str, words: str = "") -> list[Element]:
    """Return a bar from one number to another; hovering shows the words."""
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
    """Return a dot with words to hover; a triangle at the end beyond the axis, no mark for None."""
    if number is None:
        return []
    if not axis.holds(number):
        arrow = "▶" if math.isnan(number) or number > axis.high else "◀"
        place = {"x": "100%" if arrow == "▶" else "0%", "text_anchor": "end" if arrow == "▶" else "start"}
        return [element("text", arrow, hint(words), y="50%", dy="0.35em", class_=f"edge {kind}", **place)]
    return [element("circle", hint(words), cx=axis.along(number), cy="50%", r=4.5, class_=f"dot {kind}")]


def _extent(axis: Axis, low: float, high: float) -> tuple[float, float] | None:
    """Return the places of two numbers; None for NaN, and for numbers in the wrong order."""
    start, end = axis.at(low), axis.at(high)
    return None if start is None or end is None or end < start else (start, end)


# -- charts --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    """A labelled row of a chart: its marks, and the number beside it."""

    label: str
    marks: Sequence[Element]
    number: str = ""


def rows(axis: Axis, lines: Sequence[Line], *, name: str, legend: Iterable[Element] = ()) -> Element:
    """Return a chart of labelled rows on one horizontal axis."""
    places = [axis.along(n) for n, _ in axis.ticks(_TICKS)]
    ticks = [element("line", x1=place, x2=place, y1="0%", y2="100%", class_="grid") for place in places]
    drawn = []
    for line in lines:
        label = element("span", cut(plain(line.label), _LABEL), title=cut(plain(line.label), _TITLE), class_="label")
        bar = element("svg", *ticks, *line.marks, width="100%", height=20, aria_hidden="true")
        drawn.append(element("div", label, bar, element("span", line.number, class_="number"), class_="row"))
    foot = element("div", element("span", class_="label"), _below(axis), element("span", class_="number"), class_="row")
    box = element("div", *drawn, foot, class_="rows", role="group", aria_label=cut(plain(name), _TITLE))
    entries = list(legend)
    keys = [element("ul", *entries, class_="legend")] if entries else []
    return element("figure", *keys, box, class_="chart")


def sample(kind: str, words: str, shape: str = "span") -> Element:
    """Return an entry of a legend."""
    if shape == "dot":
        mark = element("circle", cx=9, cy=7, r=4, class_=f"dot {kind}")
    elif shape == "line":
        mark = element("line", x1=0, x2=18, y1=7, y2=7, class_=kind)
    else:
        mark = element("rect", x=0, y=2, width=18, height=10, class_=f"{shape} {kind}")
    return element("li", element("svg", mark, width=18, height=14, aria_hidden="true"), cut(plain(words), _LABEL))


def _below(x: Axis) -> Element:
    ticks = x.ticks(_TICKS)
    ends = {0: "start", len(ticks) - 1: "end"} if len(ticks) > 1 else {}
    labels = []
    for i, (number, words) in enumerate(ticks):
        place = x.at(number) or 0.0
        anchor = ends.get(i, "middle") if place < 0.05 or place > 0.95 else "middle"
        labels.append(element("text", words, x=percent(place), y=14, text_anchor=anchor, class_="tick"))
    name = element("text", x.label, x="100%", y=30, text_anchor="end", class_="words")
    return element("svg", *labels, name, width="100%", height=36, aria_hidden="true", class_="scale")


# -- tables --------------------------------------------------------------------------------------------


def numbers(head: Sequence[str], records: Iterable[Sequence[str]], *, right: int = 0, note: str = "") -> Element:
    """Return a table to unfold: the numbers of a chart for screen readers."""
    parts = [element("p", note, class_="lead")] if note else []
    return folded("Numbers", *parts, table(head, records, right=right))


def folded(name: str, *parts: Element) -> Element:
    """Return parts to unfold by a name."""
    return element("details", element("summary", name), *parts, class_="numbers")


def table(head: Sequence[str], records: Iterable[Sequence[str]], *, right: int = 0) -> Element:
    """Return a scrolling table; long cells are cut."""
    first = len(head) - right
    top = element("tr", *(element("th", name, scope="col", **_side(i, first)) for i, name in enumerate(head)))
    numbered = (enumerate(cell for _, cell in zip(head, record, strict=True)) for record in records)
    shown = ((element("td", cut(plain(c), _CELL), **_side(i, first, c)) for i, c in row) for row in numbered)
    body = [element("tr", *cells) for cells in shown]
    drawn = element("table", element("thead", top), element("tbody", *body), class_="table")
    return element("div", drawn, class_="scroll", tabindex=0)


def remarks(notes: Iterable[str]) -> list[Element]:
    """Return caveats of a result as a list; an empty one without any."""
    items = [element("li", cut(plain(note), _TITLE)) for note in notes]
    return [element("ul", *items, class_="remarks")] if items else []


def _side(column: int, first: int, cell: str = "") -> dict[str, str]:
    if column >= first:
        return {"class_": "number"}
    return {"class_": "short"} if len(cell) <= _SHORT else {}


# -- elements ---------------------------------------------------------------------------------------------------


_NAME, _HINT = 160, 400
"""Characters of a name in a sentence, and of what hovering shows."""


def element(tag: str, *children: Element | str, **attributes: str | float) -> Element:
    """Return an element with children and attributes."""
    built = Element(tag, {name.rstrip("_").replace("_", "-"): _attribute(value) for name, value in attributes.items()})
    last: Element | None = None
    for child in children:
        if isinstance(child, Element):
            built.append(child)
            last = child
        elif last is None:
            built.text = (built.text or "") + plain(child)
        else:
            last.tail = (last.tail or "") + plain(child)
    return built


def short(text: str) -> str:
    """Return a text of others, such as a name, in few characters: of a longer one both ends."""
    return cut(plain(text), _NAME)


def hint(words: str) -> Element | str:
    """Return a title to hover, cut if it is long; an empty text for no words."""
    return element("title", cut(plain(words), _HINT)) if words else ""


def written(tree: Element) -> str:
    """Return the HTML of a tree."""
    return tostring(tree, encoding="unicode", method="html")


def _attribute(value: str | float) -> str:
    return plain(value) if isinstance(value, str) else f"{value:.6g}"
