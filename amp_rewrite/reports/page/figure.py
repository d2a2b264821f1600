"""A figure: a drawing and the numbers that it shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from xml.etree.ElementTree import Element


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawing on a page.

    Attributes:
        name: key of the figure in JSON and its anchor: "barcode", "ranges".
        title: heading.
        lead: one sentence that says what is seen.
        drawing: element tree of the drawing; readable in black and white, with a text for screen readers.
        data: everything that is drawn, as JSON.
        notebook: True if notebooks show the drawing too: it is small and needs no script.
    """

    name: str
    title: str
    lead: str
    drawing: Element
    data: Mapping[str, object]
    notebook: bool = False
