"""One self-contained HTML file: figures, their style, script and numbers; elements, tables and charts in SVG.

A chart has a bar for each item on one axis, before bands. Marks stand in percent of an area that fills its page, so
that text keeps its size on narrow and on wide ones. Numbers beyond an axis stand at its ends.
"""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from typing import Any, Self
from xml.etree.ElementTree import Element, tostring

from amp_rewrite.reports.render import cut, plain

_TICKS = 5
_LEAST, _MOST = -308, 308
"""Powers of ten that a float holds in full precision."""
_SHORT = 24
"""Characters of a cell that stays on one line."""
_LABEL, _CELL, _TITLE = 64, 160, 400
"""Characters of a name beside a row, in a table, and in what hovering shows."""


# -- axes ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Axis:
    """A logarithmic axis between two powers of ten."""

    label: str
    first: int
    last: int

    @classmethod
    def of(cls, label: str, numbers: Iterable[float | None]) -> Self:
        """Return an axis for the finite numbers above zero."""
        powers = [math.log10(number) for number in numbers if number and 0 < number < math.inf]
        first = max(math.floor(min(powers, default=0.0)), _LEAST)
        last = min(math.ceil(max(powers, default=0.0)), _MOST)
        if first >= last:
            first, last = (first - 1, first) if first == _MOST else (first, first + 1)
        return cls(label, first, last)

    def at(self, number: float) -> float:
        """Return the place of a number from 0 to 1; numbers beyond an end stand there, and NaN at the high one."""
        if not 10.0**self.first < number < 10.0**self.last:
            return 0.0 if number <= 10.0**self.first else 1.0
        return (math.log10(number) - self.first) / (self.last - self.first)

    def ticks(self, most: int = _TICKS) -> list[tuple[float, str]]:
        """Return at most so many numbers on the axis, 2 or more, with their labels."""
        step = max(1, -(-(self.last - self.first) // (most - 1)))
        start = -(-self.first // step) * step  # multiples of the step, so that 1 is a tick where it lies inside
        powers = range(start, self.last + 1, step)
        return [(10.0**n, f"{10.0**n:.{max(-n, 0)}f}" if -3 < n < 5 else f"1e{n}") for n in powers]


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


# -- charts --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bar:
    """A labelled bar from one number to another, with words beside it and words to hover."""

    label: str
    low: float
    high: float
    kind: str
    beside: str = ""
    words: str = ""


@dataclass(frozen=True, slots=True)
class Band:
    """A band of an axis behind all bars, and its words in the legend."""

    low: float
    high: float
    kind: str
    words: str


def bars(axis: Axis, shown: Sequence[Bar], bands: Sequence[Band], *, name: str) -> Element:
    """Return a chart of bars on one horizontal axis."""
    places = [percent(axis.at(n)) for n, _ in axis.ticks()]
    ticks = [element("line", x1=place, x2=place, y1="0%", y2="100%", class_="grid") for place in places]
    behind = [_span(axis, b.low, b.high, f"band {b.kind}", "", y="0%", height="100%") for b in bands]
    drawn = []
    for bar in shown:
        label = element("span", cut(plain(bar.label), _LABEL), title=cut(plain(bar.label), _TITLE), class_="label")
        mark = _span(axis, bar.low, bar.high, f"span {bar.kind}", bar.words, y="20%", height="60%")
        marks = element("svg", *ticks, *behind, mark, width="100%", height=20, aria_hidden="true")
        drawn.append(element("div", label, marks, element("span", bar.beside, class_="number"), class_="row"))
    foot = element("div", element("span", class_="label"), _below(axis), element("span", class_="number"), class_="row")
    box = element("div", *drawn, foot, class_="rows", role="group", aria_label=cut(plain(name), _TITLE))
    return element("figure", element("ul", *map(_sample, bands), class_="legend"), box, class_="chart")


def _span(axis: Axis, low: float, high: float, kind: str, words: str, **sides: str) -> Element:
    start, least = axis.at(low), 0.003 if kind.startswith("span") else 0.0
    start, width = min(start, 1 - least), max(axis.at(high) - start, least)
    return element("rect", hint(words), class_=kind, x=percent(start), width=percent(width), **sides)


def _sample(band: Band) -> Element:
    mark = element("rect", x=0, y=2, width=18, height=10, class_=f"band {band.kind}")
    return element("li", element("svg", mark, width=18, height=14, aria_hidden="true"), cut(plain(band.words), _LABEL))


def _below(axis: Axis) -> Element:
    labels = []
    for number, words in axis.ticks():
        place = axis.at(number)
        anchor = "start" if place < 0.05 else "end" if place > 0.95 else "middle"
        labels.append(element("text", words, x=percent(place), y=14, text_anchor=anchor, class_="tick"))
    name = element("text", axis.label, x="100%", y=30, text_anchor="end", class_="words")
    return element("svg", *labels, name, width="100%", height=36, aria_hidden="true", class_="scale")


# -- tables --------------------------------------------------------------------------------------------


def numbers_table(head: Sequence[str], records: Iterable[Sequence[str]], *, right: int = 0, note: str = "") -> Element:
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
    built = Element(tag)
    for name, value in attributes.items():
        built.set(name.rstrip("_").replace("_", "-"), plain(value) if isinstance(value, str) else f"{value:.6g}")
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


# -- page -------------------------------------------------------------------------------------------------------


_SCRIPT = ("dom", "graph_model", "graph_layout", "graph_details", "graph_view", "board")
"""Parts of the script, each after those that it uses while it is loaded."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawing on a page.

    `name` is its anchor, `lead` one sentence that says what is seen. `drawing` is readable in black and white, with a
    text for screen readers. `data`: what the script draws, under the name.
    """

    name: str
    title: str
    lead: str
    drawing: Element
    data: Mapping[str, Any] | None = None


def page_of(title: str, figures: Sequence[Figure]) -> str:
    """Return a page of figures in reading order as one HTML text, without references to other files."""
    parts = "".join(_resource(f"script/{name}.js") for name in _SCRIPT)
    script = f'"use strict";\n(() => {{\n{parts}}})();\n'
    digest = b64encode(sha256(script.encode()).digest()).decode()  # a page runs its own script alone
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", **{"http-equiv": "Content-Security-Policy", "content": policy}),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
    )
    main = element("main", element("h1", title), *map(_section, figures), class_="amp-rewrite")
    style = "".join(map(_resource, ("figures.css", "chart.css", "page.css")))
    data = {figure.name: figure.data for figure in figures if figure.data}
    numbers = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<!doctype html>\n<html lang="en">{written(head)}<style>{style}</style><body>{written(main)}'
        f'<script type="application/json" id="data">{numbers}</script>'
        f"<script>{script}</script></body></html>\n"
    )


def written_out(text: str) -> Figure:
    """Return the text of a result as a figure: the page of a result without drawings."""
    lines = element("pre")
    lines.text = "\n".join(map(plain, text.rstrip("\n").split("\n")))
    return Figure("text", "Text", "The result in words.", lines)


def _section(figure: Figure) -> Element:
    heading = element("h2", figure.title, id=f"{figure.name}-title")
    lead = element("p", figure.lead, class_="lead")
    return element("section", heading, lead, figure.drawing, id=figure.name, aria_labelledby=f"{figure.name}-title")


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")
