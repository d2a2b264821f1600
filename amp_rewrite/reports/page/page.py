"""Self-contained HTML pages of figures, with style, script and data; elements and tables."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from typing import Any
from xml.etree.ElementTree import Element, tostring

from amp_rewrite.reports.render import cut, plain

_MAX_SHORT = 24
"""Maximum length of a cell kept on one line."""
_MAX_CELL, _MAX_REMARK = 160, 400
"""Maximum lengths of a table cell and of a remark."""


# -- tables --------------------------------------------------------------------------------------------


def numbers_table(head: Sequence[str], records: Iterable[Sequence[str]], *, right: int = 0, note: str = "") -> Element:
    """Return a collapsed table of the numbers in a chart, for screen readers."""
    parts = [element("p", note, class_="lead")] if note else []
    return collapsed("Numbers", *parts, table(head, records, right=right))


def collapsed(name: str, *parts: Element) -> Element:
    return element("details", element("summary", name), *parts, class_="numbers")


def table(head: Sequence[str], records: Iterable[Sequence[str]], *, right: int = 0) -> Element:
    """Return a scrollable table with long cells truncated."""
    first = len(head) - right
    top = element("tr", *(element("th", name, scope="col", **_side(i, first)) for i, name in enumerate(head)))
    numbered = (enumerate(cell for _, cell in zip(head, record, strict=True)) for record in records)
    shown = ((element("td", cut(plain(c), _MAX_CELL), **_side(i, first, c)) for i, c in row) for row in numbered)
    body = [element("tr", *cells) for cells in shown]
    drawn = element("table", element("thead", top), element("tbody", *body), class_="table")
    return element("div", drawn, class_="scroll", tabindex=0)


def remarks(notes: Iterable[str]) -> list[Element]:
    """Return the caveats of a result as an HTML list, or nothing if there are none."""
    items = [element("li", cut(plain(note), _MAX_REMARK)) for note in notes]
    return [element("ul", *items, class_="remarks")] if items else []


def _side(column: int, first: int, cell: str = "") -> dict[str, str]:
    if column >= first:
        return {"class_": "number"}
    return {"class_": "short"} if len(cell) <= _MAX_SHORT else {}


# -- elements ---------------------------------------------------------------------------------------------------


_MAX_NAME = 160
"""Maximum length of a name in a sentence."""


def element(tag: str, *children: Element | str, **attributes: str | float) -> Element:
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
    """Escape an untrusted text, such as a name, and shorten it for a sentence."""
    return cut(plain(text), _MAX_NAME)


def html_of(tree: Element) -> str:
    return tostring(tree, encoding="unicode", method="html")


# -- page -------------------------------------------------------------------------------------------------------


_SCRIPT = ("dom", "graph_model", "graph_layout", "graph_details", "graph_view", "board")
"""Parts of the script, each after its dependencies at load time."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure on a page.

    `name`: its anchor. `lead`: a sentence that introduces it. `drawing`: an element readable in black and white, with
    text for screen readers. `data`: input of the script, stored under the name.
    """

    name: str
    title: str
    lead: str
    drawing: Element
    data: Mapping[str, Any] | None = None


def page_of(title: str, figures: Sequence[Figure]) -> str:
    """Return a self-contained HTML page of figures in reading order."""
    parts = "".join(_resource(f"script/{name}.js") for name in _SCRIPT)
    script = f'"use strict";\n(() => {{\n{parts}}})();\n'
    digest = b64encode(sha256(script.encode()).digest()).decode()  # a page only runs its own script
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
        f'<!doctype html>\n<html lang="en">{html_of(head)}<style>{style}</style><body>{html_of(main)}'
        f'<script type="application/json" id="data">{numbers}</script>'
        f"<script>{script}</script></body></html>\n"
    )


def text_figure(text: str) -> Figure:
    """Return the text of a result as a figure, for results without figures."""
    lines = element("pre")
    lines.text = "\n".join(map(plain, text.rstrip("\n").split("\n")))
    return Figure("text", "Text", "The result as text.", lines)


def _section(figure: Figure) -> Element:
    heading = element("h2", figure.title, id=f"{figure.name}-title")
    lead = element("p", figure.lead, class_="lead")
    return element("section", heading, lead, figure.drawing, id=figure.name, aria_labelledby=f"{figure.name}-title")


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")
