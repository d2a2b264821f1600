"""One self-contained HTML file: figures, their style, script and numbers."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from itertools import islice
from xml.etree.ElementTree import Element

from amp_rewrite.reports.page.chart import element, folded, table, written
from amp_rewrite.reports.render import plain

_RECORDS = 100
"""Records on the page of a result that has no figures."""
_SCRIPT = ("dom", "graph_model", "graph_layout", "graph_details", "graph_tables", "graph_view", "board")
"""Parts of the script, each after those that it uses while it is loaded."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawing on a page, and its numbers.

    `name` is its key in JSON and its anchor, `lead` one sentence that says what is seen. `drawing` is readable in black
    and white, with a text for screen readers; `data` is everything that is drawn, as JSON.
    """

    name: str
    title: str
    lead: str
    drawing: Element
    data: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Page:
    """A title of model and contents, and figures in reading order."""

    title: str
    figures: Sequence[Figure]

    def data(self) -> dict[str, object]:
        """Return the data of all figures by name."""
        return {figure.name: figure.data for figure in self.figures}

    def to_html(self) -> str:
        """Return the page as one HTML text, without references to other files."""
        parts = "".join(_resource(f"script/{name}.js") for name in _SCRIPT)
        script = f'"use strict";\n(() => {{\n{parts}}})();\n'
        digest = b64encode(sha256(script.encode()).digest()).decode()  # a page runs its own script alone
        policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
        head = element(
            "head",
            element("meta", charset="utf-8"),
            element("meta", **{"http-equiv": "Content-Security-Policy", "content": policy}),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("title", self.title),
        )
        sections = (_section(figure) for figure in self.figures)
        main = element("main", element("h1", self.title), *sections, class_="amp-rewrite")
        style = _style() + _resource("page.css")
        numbers = json.dumps(self.data(), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
        return (
            f'<!doctype html>\n<html lang="en">{written(head)}<style>{style}</style><body>{written(main)}'
            f'<script type="application/json" id="data">{numbers}</script>'
            f"<script>{script}</script></body></html>\n"
        )


def fragment(figure: Figure) -> str:
    """Return a figure as HTML for a notebook: without script, with a style of its own."""
    return f'<div class="amp-rewrite"><style>{_style()}</style>{written(figure.drawing)}</div>'


def written_out(text: str, records: Iterable[Mapping[str, object]]) -> Figure:
    """Return the text and the first records of a result as a figure: the page of a result without drawings."""
    rows = list(islice(records, _RECORDS))
    lines = element("pre")
    lines.text = "\n".join(plain(line) for line in text.rstrip("\n").split("\n"))
    cells = (list(map(str, row.values())) for row in rows)
    drawing = element("div", lines, *([folded("Records", table(list(rows[0]), cells))] if rows else []))
    lead = f"The result in words, and its first records (at most {_RECORDS})."
    return Figure("text", "Text", lead, drawing, {"text": text})


def _section(figure: Figure) -> Element:
    heading = element("h2", figure.title, id=f"{figure.name}-title")
    lead = element("p", figure.lead, class_="lead")
    return element("section", heading, lead, figure.drawing, id=figure.name, aria_labelledby=f"{figure.name}-title")


def _style() -> str:
    return _resource("figures.css") + _resource("chart.css")


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")
