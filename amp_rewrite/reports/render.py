"""Text for terminals and for GitHub: aligned tables, Markdown tables, annotations."""

from __future__ import annotations

import re
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from itertools import zip_longest

from amp_rewrite.errors import count as count
from amp_rewrite.errors import plain as plain
from amp_rewrite.errors import share as share


def escape_commands(text: str) -> str:
    """Escape commands of CI runners: GitHub reads `::` at the start of a line, Azure `##…[` anywhere.

    The names in a text come from model files. Escaped JSON has the same meaning.
    """
    return _COMMAND.sub(lambda match: match[0].replace(":", "\\x3a", 1).replace("#", "\\u0023", 1), text)


_COMMAND = re.compile(r"^[^\S\n]*::|##(?=[A-Za-z]*\[)", re.MULTILINE)


WIDTH: ContextVar[int | None] = ContextVar("WIDTH", default=None)
"""Maximum width of tables on a terminal, in columns; None for no limit."""
_GAP = 2
_LAST_COLUMN = 24
"""Width reserved for the last column before the others shrink."""
_MIN_WIDTH = 10
"""Minimum width of a shrunk column."""


def table(rows: Iterable[Sequence[str]], *, head: Sequence[str] = (), right: str = "", indent: int = 2) -> list[str]:
    """Return the lines of a table with aligned columns and without trailing blanks.

    `right` marks right-aligned columns by position: " >" aligns the second one. The last column is never padded, so
    that one long cell does not widen every line. If `WIDTH` is set, cells wrap between words; longer words and lines
    are truncated.
    """
    return [line for lines in blocks(rows, head=head, right=right, indent=indent) for line in lines]


def blocks(
    rows: Iterable[Sequence[str]], *, head: Sequence[str] = (), right: str = "", indent: int = 2
) -> list[list[str]]:
    """Return the lines of each row of a table: one, or several if cells wrap."""
    cells = [[plain(cell) for cell in row] for row in rows]
    if head:  # strict: each cell has a heading
        cells = [list(head), *([cell for _, cell in zip(head, row, strict=True)] for row in cells)]
    columns = max(map(len, cells), default=0)
    widths = [max((display_width(row[i]) for row in cells if i < len(row)), default=0) for i in range(columns)]
    limit = WIDTH.get()
    if limit is None or indent + sum(widths) + _GAP * (columns - 1) <= limit:
        return [[_line(row, widths, right, indent)] for row in cells]
    widths = _fitted(widths, limit - indent - _GAP * (columns - 1), right)
    return [_wrapped(row, widths, right, indent) for row in cells]


def _fitted(widths: Sequence[int], room: int, right: str) -> list[int]:
    fitted, last = list(widths), min(widths[-1], max(_LAST_COLUMN, room // 3))
    texts = [i for i in range(len(widths) - 1) if right[i : i + 1] != ">"]
    while texts and sum(fitted[:-1]) + last > room:
        widest = max(texts, key=lambda i: fitted[i])
        if fitted[widest] <= _MIN_WIDTH:
            break
        fitted[widest] -= 1
    fitted[-1] = max(room - sum(fitted[:-1]), min(widths[-1], _MIN_WIDTH))
    return fitted


def _wrapped(row: Sequence[str], widths: Sequence[int], right: str, indent: int) -> list[str]:
    parts = [
        [cell] if right[i : i + 1] == ">" else [cut(part, widths[i]) for part in wrap(cell, widths[i])]
        for i, cell in enumerate(row)
    ]
    lines = [_line(line, widths, right, indent) for line in zip_longest(*parts, fillvalue="")]
    limit = WIDTH.get() or sys.maxsize
    return [line if display_width(line) <= limit else _prefix(line, limit - 1) + "…" for line in lines]


def wrap(text: str, width: int, hanging: int = 0) -> list[str]:
    """Wrap a text between words, without breaking words longer than a line."""
    lead = " " * (len(text) - len(text.lstrip(" ")))
    after = lead + " " * hanging
    lines = textwrap.wrap(
        text.strip() if text.isascii() else "".join(c + _HALF * (display_width(c) - 1) for c in text.strip()),
        max(width, 1),
        initial_indent=lead,
        subsequent_indent=after,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_HALF, "") for line in lines]


def cut(text: str, width: int) -> str:
    """Truncate a text to a width, keeping both ends with an ellipsis between them."""
    if _prefix(text, width) == text:
        return text
    tail = (width - 1) // 2 if width > 2 * _MIN_WIDTH else 0
    return f"{_prefix(text, max(width, 1) - 1 - tail)}…{_prefix(text[::-1], tail)[::-1]}"


def display_width(text: str) -> int:
    """Return the width of a text: two columns for each wide character, and none for combining characters."""
    return len(text) if text.isascii() else sum(map(_columns, text))


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


_HALF = "\0"
"""The second column of a wide character during wrapping; texts do not contain control characters."""


def _prefix(text: str, columns: int) -> str:
    """Return the longest prefix of a text within a width, without reading the rest."""
    for at, character in enumerate(text):
        columns -= _columns(character)
        if columns < 0:
            return text[:at]
    return text


def _line(row: Sequence[str], widths: Sequence[int], right: str, indent: int) -> str:
    padded = (
        f"{gap}{cell}" if right[i : i + 1] == ">" else cell if i == len(row) - 1 else f"{cell}{gap}"
        for i, cell in enumerate(row)
        for gap in [" " * (widths[i] - display_width(cell))]
    )
    return (" " * indent + (" " * _GAP).join(padded)).rstrip()


def size(number: int) -> str:
    """Format a number of bytes in powers of 1000: "0 B", "999 B", "1.0 kB", "4.3 MB"."""
    if number < 1000:
        return f"{number} B"
    scaled = float(number)
    for unit in ("kB", "MB", "GB"):
        scaled /= 1000
        if scaled < 999.95:
            return f"{scaled:.1f} {unit}"
    return f"{scaled / 1000:.1f} TB"


def shortened(names: Sequence[str], limit: int = 3) -> str:
    """Join the first names: "a, b, c, …"."""
    return ", ".join(names[:limit]) + (", …" if len(names) > limit else "")


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table. Cells are code spans, so that names cannot break out."""
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(_code(cell) for cell in row) + " |" for row in rows]
    return lines


def _code(cell: str) -> str:
    """Return a code span with a fence longer than any inside it; pipes split cells even in code, so escape them."""
    if not cell:
        return ""
    text = plain(cell).replace("|", "\\|")
    fence = "`"
    while fence in text:
        fence += "`"
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def annotation(level: str, message: str, properties: Mapping[str, str]) -> str:
    """Return one GitHub workflow command: "::warning title=…::…".

    The runner unescapes %, CR and LF everywhere, and colons and commas in properties. Other unprintable characters are
    escaped as in `plain`, and nested commands as in `escape_commands`.
    """
    escaped = {name: _message(value).replace(":", "%3A").replace(",", "%2C") for name, value in properties.items()}
    listed = ",".join(f"{name}={value}" for name, value in escaped.items())
    return f"::{level}{' ' + listed if listed else ''}::{_message(message)}"


def _message(text: str) -> str:
    escaped = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return escape_commands(plain(escaped))
