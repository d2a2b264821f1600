"""Op lists in force, as `amp-rewrite explain` prints them: a table, or rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from amp_rewrite.reports.render import count, shortened, table
from amp_rewrite.settings.list_entry import Color, Entry, check_known, parse_name

if TYPE_CHECKING:
    from amp_rewrite.settings.op_lists import OpLists
    from amp_rewrite.settings.request import Request

_HEAD = ("op", "color", "when", "source", "because")
_WHERE = "lists"


def lists_in_force(settings: Request) -> OpLists:
    """Return the op lists as the level of settings sees them, with edits of the environment."""
    return settings.op_lists.at_level(settings.level)


def list_rows(entries: Iterable[Entry]) -> list[Mapping[str, str]]:
    """Return entries as rows of texts."""
    return [dict(zip(_HEAD, _cells(entry), strict=True)) for entry in entries]


def list_table(entries: Iterable[Entry]) -> str:
    """Return entries as a table."""
    return "\n".join(table(map(_cells, entries), head=_HEAD, indent=0))


def list_summary(lists: OpLists, low: str) -> str:
    """Return a row for each list: how many entries it has, and the first ops. `low`: the type of the lists."""
    entries = list(lists)
    named = "" if lists.name == low else f" of {lists.name}"
    title = f"op lists of {low}: {count(len(entries), 'entry', 'entries')}{named}"
    names = {color: list(dict.fromkeys(entry.name for entry in entries if entry.color is color)) for color in Color}
    counts = Counter(entry.color for entry in entries)
    rows = [(color.value, str(counts[color]), shortened(names[color], _SHOWN)) for color in Color]
    return "\n".join([title, *table(rows, right=" >"), _MORE])


def entries_of(lists: OpLists, word: str) -> tuple[Entry, ...]:
    """Return the entries of an op by name, and the entry without a condition; ListError for an unknown op."""
    domain, op_type = parse_name(word, _WHERE)
    entries = lists.entries_of(domain, op_type)
    if not entries:
        check_known(domain, op_type, _WHERE, lambda: _known(lists))
    whole = entries and entries[-1].condition is None
    return entries if whole else (*entries, lists.otherwise(domain, op_type))


_MORE = "`amp-rewrite explain OP` shows who lists an op and why, `amp-rewrite explain lists` all ops"
_SHOWN = 5  # ops of a list in the summary


def lists_by_color(entries: Sequence[Entry]) -> str:
    """Return a table of each list."""
    parts = []
    for color in Color:
        listed = [entry for entry in entries if entry.color is color]
        rows = [(name, when, source, because) for name, _, when, source, because in map(_cells, listed)]
        parts.append("\n".join([f"{color.value}: {count(len(listed), 'entry', 'entries')}", *table(rows)]))
    return "\n\n".join(parts)


def _cells(entry: Entry) -> tuple[str, str, str, str, str]:
    return entry.name, entry.color.value, str(entry.condition or ""), entry.source, entry.because


def _known(lists: OpLists) -> set[tuple[str, str]]:
    from amp_rewrite.ir.schema import contrib_schemas

    return {*lists.entries, *(parse_name(name, _WHERE) for name in contrib_schemas())}
