"""Figures in words: the checks of a machine, and the reasons behind the types of ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.etree.ElementTree import Element

from amp_rewrite.errors import count
from amp_rewrite.reports.page.markup import element
from amp_rewrite.reports.page.page import Figure
from amp_rewrite.reports.render import cut, plain

_LINE = 1000
"""Characters of a line."""
_MARKS = {"ok": "✓", "finding": "✗", "advice": "→", "unknown": "?"}


def checks_figure(checks: Sequence[Mapping[str, str]], brief: str, data: Mapping[str, object]) -> Figure:
    """Return checks as a list, each with its remedy."""
    items = []
    for check in checks:
        topic = element("b", f"{_MARKS.get(check['state'], '?')} {check['topic']}")
        facts = [element("div", _short(check["fact"]))]
        facts += [element("div", _short(check["remedy"]), class_="remedy")] if check["remedy"] else []
        items.append(element("li", topic, f" {check['state']}", *facts, class_=check["state"]))
    lead = f"{count(len(checks), 'check')}: {brief}."
    return Figure("checks", "Checks", lead, element("ul", *items, class_="checks"), data)


def reasons_figure(chains: Sequence[str], brief: str, data: Mapping[str, object]) -> Figure:
    """Return chains of reasons as lists, one for each op."""
    lists = [element("ul", *_steps(chain.splitlines()), class_="reasons") for chain in chains]
    return Figure("reasons", "Reasons", f"{_short(brief)}.", element("div", *lists), data)


def _steps(lines: Sequence[str]) -> list[Element]:
    items: list[list[str]] = []
    for line in lines:
        if line.startswith(" ") and items:
            items[-1].append(line)
        else:
            items.append([line])
    parts = (
        [element("b", _short(head)), *(element("div", _short(line.strip())) for line in more)] for head, *more in items
    )
    return [element("li", *part) for part in parts]


def _short(text: str) -> str:
    return cut(plain(text), _LINE)
