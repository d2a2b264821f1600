"""What the op lists say, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from amp_rewrite.reports.render import count, table
from amp_rewrite.settings.list_entry import Color, Entry, check_known, parse_name

if TYPE_CHECKING:
    from amp_rewrite.settings.op_lists import OpLists

_HEAD = ("op", "color", "when", "source", "because")
_WHERE = "lists"


def entries_of(lists: OpLists, word: str) -> tuple[Entry, ...]:
    """All that the lists say about `Op` or `domain::Op`, and what holds where no condition does.

    ListError, with the nearest name, for an op that does not exist.
    """
    domain, op_type = parse_name(word, _WHERE)
    entries = lists.entries_of(domain, op_type)
    if not entries:
        check_known(domain, op_type, _WHERE, lambda: _known(lists))
    if entries and entries[-1].condition is None:
        return entries
    because = "none of its conditions holds" if entries else "stands on no list"
    return (*entries, Entry(domain, op_type, Color.UNLISTED, because, lists.name))


def as_text(entries: Iterable[Entry]) -> str:
    """An aligned table, one entry per line."""
    return "\n".join(table(map(_cells, entries), head=_HEAD, indent=0))


def by_color(entries: Sequence[Entry]) -> str:
    """The whole lists: for each a heading and a table."""
    parts = []
    for color in Color:
        listed = [entry for entry in entries if entry.color is color]
        rows = [(entry.name, _when(entry), entry.source, entry.because) for entry in listed]
        parts.append("\n".join([f"{color.value}: {count(len(listed), 'entry', 'entries')}", *table(rows)]))
    return "\n\n".join(parts)


def as_json(entries: Iterable[Entry]) -> str:
    """A JSON list with one object per entry."""
    rows = [json.dumps(dict(zip(_HEAD, _cells(entry), strict=True))) for entry in entries]
    return "[\n" + ",\n".join(f"  {row}" for row in rows) + "\n]" if rows else "[]"


def _cells(entry: Entry) -> tuple[str, str, str, str, str]:
    return entry.name, entry.color.value, _when(entry), entry.source, entry.because


def _when(entry: Entry) -> str:
    return str(entry.condition) if entry.condition else ""


def _known(lists: OpLists) -> set[tuple[str, str]]:
    from amp_rewrite.ir.schema import contrib_schemas

    return {*lists.entries, *(parse_name(name, _WHERE) for name in contrib_schemas())}
