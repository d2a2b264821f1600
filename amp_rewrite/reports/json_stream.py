"""JSON written item by item, a line each, and read so that the long lists of an object are never in memory as a whole.

Python's decoder turns a text into dicts and lists of ten times its size. Here each item of a top-level list is decoded
and handed over alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

from amp_rewrite.reports.reading import Malformed

_BLANKS = re.compile(r"[ \t\n\r]*")


def line_by_line(fields: Mapping[str, str], lists: Mapping[str, Iterable[str]]) -> str:
    """Return a JSON object of encoded values, with one field, and one item of each list, per line."""
    lines = [f'  "{name}": {value}' for name, value in fields.items()]
    for name, items in lists.items():
        rows = ",\n".join(f"    {item}" for item in items)
        lines.append(f'  "{name}": [\n{rows}\n  ]' if rows else f'  "{name}": []')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def decode(text: str | bytes) -> object:
    """Return the value of a JSON text. Errors as in `members`; also ValueError for bytes that are not UTF-8."""
    text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    at = _skip(text, 0)
    value, at = _value(text, at)
    _end(text, at)
    return value


def members(text: str, lists: Mapping[str, Callable[[object], Any]]) -> tuple[dict[str, Any], Malformed | None]:
    """Return the members of the object in a text, and the first error of an item.

    Each item of the members in `lists` goes through its function, and such a member becomes a tuple; one that is not a
    list comes back decoded. An item that its function refuses (Malformed) ends the reading of items, not of the text,
    so that the caller may look at a version number first, wherever it stands; the error has the path of the item.

    ValueError for other text than JSON, RecursionError for one nested too deeply, Malformed for an object with two
    members of one name.
    """
    whole: dict[str, Any] = {}
    first = _First()
    at = _skip(text, _expect(text, _skip(text, 0), "{"))
    if text[at : at + 1] == "}":
        _end(text, at + 1)
        return whole, None
    while True:
        if text[at : at + 1] != '"':
            raise json.JSONDecodeError("Expecting property name enclosed in double quotes", text, at)
        name, at = _value(text, at)
        at = _skip(text, _expect(text, _skip(text, at), ":"))
        if name in whole:
            raise Malformed(f"holds the field {name!r} twice")
        try:
            if name in lists and text[at : at + 1] == "[":
                items = _Items(text, at)
                whole[name] = tuple(first.read(items, lists[name], f".{name}"))
                at = items.at
            else:
                whole[name], at = _value(text, at)
        except Malformed as error:
            error.path = f".{name}{error.path}"
            raise
        at = _skip(text, at)
        if text[at : at + 1] == "}":
            _end(text, at + 1)
            return whole, first.error
        at = _skip(text, _expect(text, at, ","))


class _First:
    """The first error of an item; items behind it are not read."""

    error: Malformed | None = None

    def read(self, items: _Items, read: Callable[[object], Any], path: str) -> Iterator[Any]:
        for i, item in enumerate(items):
            if self.error is None:
                try:
                    yield read(item)
                except Malformed as error:
                    error.path = f"{path}[{i}]{error.path}"
                    self.error = error


class _Items:
    """The items of the list at a position of a text, decoded one by one; `at` is the position behind the list."""

    def __init__(self, text: str, at: int) -> None:
        self.text = text
        self.at = at

    def __iter__(self) -> Iterator[object]:
        text, at = self.text, _skip(self.text, self.at + 1)
        closed = text[at : at + 1] == "]"
        number = 0
        while not closed:
            try:
                item, at = _value(text, at)
            except Malformed as error:
                error.path = f"[{number}]{error.path}"
                raise
            yield item
            number += 1
            at = _skip(text, at)
            closed = text[at : at + 1] == "]"
            if not closed:
                at = _skip(text, _expect(text, at, ","))
        self.at = at + 1


def first(text: str) -> str:
    """Return the first character of a text that is not blank, or an empty text."""
    at = _skip(text, 0)
    return text[at : at + 1]


def _value(text: str, at: int) -> tuple[Any, int]:
    try:
        value: tuple[Any, int] = _DECODER.scan_once(text, at)  # type: ignore[attr-defined]
        return value
    except StopIteration as stop:
        raise json.JSONDecodeError("Expecting value", text, stop.value) from None


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return the members of an object. Malformed if two have one name: readers would differ in which they take."""
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Malformed(f"holds the field {twice!r} twice")
    return members


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


def _skip(text: str, at: int) -> int:
    """Return the position of the first character from here on that is not blank."""
    blanks = _BLANKS.match(text, at)
    return blanks.end() if blanks else at


def _expect(text: str, at: int, sign: str) -> int:
    """Return the position behind a sign. JSONDecodeError if another one stands there."""
    if text[at : at + 1] != sign:
        raise json.JSONDecodeError(f"Expecting {sign!r} delimiter", text, at)
    return at + 1


def _end(text: str, at: int) -> None:
    if (rest := _skip(text, at)) != len(text):
        raise json.JSONDecodeError("Extra data", text, rest)
