"""`amp-rewrite lists`: the op lists in force, as a table and as JSON."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from amp_rewrite.cli import parameters, terminal
from amp_rewrite.cli.completion import ops as known_ops
from amp_rewrite.reports.render import count, shortened, table
from amp_rewrite.settings.choices import Level
from amp_rewrite.settings.list_entry import Color, Entry, check_known, parse_name
from amp_rewrite.settings.policy import low_type

if TYPE_CHECKING:
    from amp_rewrite.settings.op_lists import OpLists

_HEAD = ("op", "color", "when", "source", "because")
_WHERE = "lists"


@parameters.command(
    parameters.argument("ops", metavar="[OP]...", nargs=-1, choices=lambda _ctx: known_ops("")),
    parameters.flag("--all whole", "Print every op."),
    *parameters.LISTING,
    parameters.as_json,
)
def lists(ops: tuple[str, ...], whole: bool, as_json: bool, **given: Any) -> None:
    """Print the list of each OP, its source and its reason.

    Without OP, print a summary of the lists.
    """
    if ops and whole:
        raise click.UsageError(f"--all prints every op; leave it out, or leave out {' '.join(ops)}")
    from amp_rewrite.settings.op_lists import environment_edits, load_lists

    settings = parameters.in_force(given)
    loaded = load_lists(low_type(settings.to), settings.lists, environment_edits(os.environ))
    in_force = loaded.at_level(Level.parse(settings.level))
    entries = [entry for op in ops for entry in _entries_of(in_force, op)] if ops else list(in_force)
    if as_json:
        terminal.show(_as_json(entries))
    elif ops:
        terminal.show("\n".join(table(map(_cells, entries), head=_HEAD, indent=0)))
    elif whole:
        terminal.show(_by_color(entries))
    else:
        low = low_type(settings.to).spelling
        named = "" if loaded.name == low else f" of {loaded.name}"
        title = f"op lists of {low}: {count(len(entries), 'entry', 'entries')}{named}"
        terminal.show("\n".join([title, *_summary(entries), _MORE]))


def _entries_of(lists: OpLists, word: str) -> tuple[Entry, ...]:
    """Return the entries of an op by name, and the entry without a condition; ListError for an unknown op."""
    domain, op_type = parse_name(word, _WHERE)
    entries = lists.entries_of(domain, op_type)
    if not entries:
        check_known(domain, op_type, _WHERE, lambda: _known(lists))
    whole = entries and entries[-1].condition is None
    return entries if whole else (*entries, lists.otherwise(domain, op_type))


_MORE = "`amp-rewrite lists OP` shows who lists an op and why, `amp-rewrite lists --all` all ops"
_SHOWN = 5  # ops of a list in the summary


def _summary(entries: Sequence[Entry]) -> list[str]:
    """Return a row for each list: how many entries it has, and the first ops."""
    names = {color: list(dict.fromkeys(entry.name for entry in entries if entry.color is color)) for color in Color}
    counts = Counter(entry.color for entry in entries)
    rows = [(color.value, str(counts[color]), shortened(names[color], _SHOWN)) for color in Color]
    return table(rows, right=" >")


def _by_color(entries: Sequence[Entry]) -> str:
    parts = []
    for color in Color:
        listed = [entry for entry in entries if entry.color is color]
        rows = [(name, when, source, because) for name, _, when, source, because in map(_cells, listed)]
        parts.append("\n".join([f"{color.value}: {count(len(listed), 'entry', 'entries')}", *table(rows)]))
    return "\n\n".join(parts)


def _as_json(entries: Iterable[Entry]) -> str:
    rows = [json.dumps(dict(zip(_HEAD, _cells(entry), strict=True))) for entry in entries]
    return "[\n" + ",\n".join(f"  {row}" for row in rows) + "\n]" if rows else "[]"


def _cells(entry: Entry) -> tuple[str, str, str, str, str]:
    return entry.name, entry.color.value, str(entry.condition or ""), entry.source, entry.because


def _known(lists: OpLists) -> set[tuple[str, str]]:
    from amp_rewrite.ir.schema import contrib_schemas

    return {*lists.entries, *(parse_name(name, _WHERE) for name in contrib_schemas())}
