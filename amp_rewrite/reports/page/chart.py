"""Charts as SVG without a script: marks between two axes (`plot`), or labelled rows on one axis (`rows`).

Marks stand in percent of an area that fills its page, so that text keeps its size on narrow and on wide ones. Numbers
that an axis cannot show stand at its ends, marked as such.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from amp_rewrite.reports.page.axis import Axis, percent
from amp_rewrite.reports.page.markup import element
from amp_rewrite.reports.render import cut, plain

_HEIGHT, _TICKS = 300, 5
_SHORT = 24
"""Characters of a cell that stays on one line."""
_LABEL, _CELL, _TITLE = 64, 160, 400
"""Characters of a name beside a row, in a table, and in what hovering shows."""


@dataclass(frozen=True, slots=True)
class Line:
    """A labelled row of a chart: what is drawn in it, and the number beside it."""

    label: str
    marks: Sequence[Element]
    number: str = ""


def plot(x: Axis, y: Axis, marks: Iterable[Element], *, name: str, legend: Iterable[Element] = ()) -> Element:
    """Return a chart of marks between two axes."""
    grid = [element("line", x1="0%", x2="100%", y1=y.up(n), y2=y.up(n), class_="grid") for n, _ in y.ticks()]
    size: dict[str, str | float] = {"width": "100%", "height": _HEIGHT}
    area = element("svg", *grid, *marks, role="img", aria_label=cut(plain(name), _TITLE), class_="area", **size)
    at_end: dict[str, str | float] = {"dy": "0.35em", "text_anchor": "end", "class_": "tick"}
    left = [element("text", words, x="100%", y=y.up(n), **at_end) for n, words in y.ticks()]
    scale = element("svg", *left, width=48, height=_HEIGHT, aria_hidden="true", class_="scale")
    between = element("div", scale, area, element("span"), _below(x), class_="plot")
    return element("figure", *_legend(legend), element("p", y.label, class_="quantity"), between, class_="chart")


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
    return element("figure", *_legend(legend), box, class_="chart")


def sample(kind: str, words: str, shape: str = "span") -> Element:
    """Return an entry of a legend."""
    if shape == "dot":
        mark = element("circle", cx=9, cy=7, r=4, class_=f"dot {kind}")
    elif shape == "line":
        mark = element("line", x1=0, x2=18, y1=7, y2=7, class_=kind if kind == "tolerance" else f"line {kind}")
    else:
        mark = element("rect", x=0, y=2, width=18, height=10, class_=f"{shape} {kind}")
    return element("li", element("svg", mark, width=18, height=14, aria_hidden="true"), cut(plain(words), _LABEL))


def numbers(head: Sequence[str], records: Iterable[Sequence[str]], *, right: int = 0, note: str = "") -> Element:
    """Return a table to unfold: the numbers of a chart for those who do not see it."""
    parts = [element("p", note, class_="lead")] if note else []
    return folded("Numbers", *parts, table(head, records, right=right))


def folded(name: str, *parts: Element) -> Element:
    """Return parts to unfold by a name."""
    return element("details", element("summary", name), *parts, class_="numbers")


def table(head: Sequence[str], records: Iterable[Sequence[str]], *, right: int = 0) -> Element:
    """Return a table that scrolls where it is wide; long cells are cut."""
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


def _below(x: Axis) -> Element:
    """Return the ticks and the name of a horizontal axis."""
    ticks = x.ticks(_TICKS)
    ends = {0: "start", len(ticks) - 1: "end"} if len(ticks) > 1 else {}
    places = [(x.at(n) or 0.0, words, i) for i, (n, words) in enumerate(ticks)]
    labels = []
    for place, words, i in places:
        anchor = ends.get(i, "middle") if place < 0.05 or place > 0.95 else "middle"
        labels.append(element("text", words, x=percent(place), y=14, text_anchor=anchor, class_="tick"))
    name = element("text", x.label, x="100%", y=30, text_anchor="end", class_="words")
    return element("svg", *labels, name, width="100%", height=36, aria_hidden="true", class_="scale")


def _legend(samples: Iterable[Element]) -> list[Element]:
    items = list(samples)
    return [element("ul", *items, class_="legend")] if items else []


def _side(column: int, first: int, cell: str = "") -> dict[str, str]:
    if column >= first:
        return {"class_": "number"}
    return {"class_": "short"} if len(cell) <= _SHORT else {}
