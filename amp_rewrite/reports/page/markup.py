"""HTML and SVG as element trees: text and attributes are escaped when a tree is written, never by hand."""

from __future__ import annotations

from xml.etree.ElementTree import Element, tostring

from amp_rewrite.reports.render import cut, plain

_SHORT, _HINT = 160, 400
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
    return cut(plain(text), _SHORT)


def hint(words: str) -> Element | str:
    """Return a title to hover, cut if it is long; an empty text for no words."""
    return element("title", cut(plain(words), _HINT)) if words else ""


def written(tree: Element) -> str:
    """Return the HTML of a tree."""
    return tostring(tree, encoding="unicode", method="html")


def _attribute(value: str | float) -> str:
    return plain(value) if isinstance(value, str) else f"{value:.6g}"
