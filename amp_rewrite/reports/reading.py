"""JSON of results: written with an item per line, and read from untrusted files into dataclasses and named tuples."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, fields
from functools import cache, lru_cache
from typing import Any, NoReturn, TypeVar

from amp_rewrite.errors import AmpRewriteError

Reader = Callable[[object], Any]
Content = TypeVar("Content")
Value = TypeVar("Value")


def line_by_line(members: Mapping[str, str], lists: Mapping[str, Iterable[str]]) -> str:
    """Return a JSON object of encoded values, with one field, and one item of each list, per line."""
    lines = [f'  "{name}": {value}' for name, value in members.items()]
    for name, items in lists.items():
        rows = ",\n".join(f"    {item}" for item in items)
        lines.append(f'  "{name}": [\n{rows}\n  ]' if rows else f'  "{name}": []')
    return "{\n" + ",\n".join(lines) + "\n}\n"


class Malformed(Exception):
    """Error in a field; `path` leads to it."""

    def __init__(self, fact: str, path: str = "") -> None:
        super().__init__(fact)
        self.path = path

    @property
    def where(self) -> str:
        """The path in words."""
        return self.path.lstrip(".") or "the whole"

    def within(self, part: str) -> Malformed:
        """Return the error with a part before its path."""
        self.path = part + self.path
        return self


def decode(text: str | bytes) -> Any:
    """Return the value of a JSON text. ValueError for other texts, Malformed for two fields of one name."""
    text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)


def load(
    content: Content,
    source: str,
    kind: str,
    advice: str,
    error: type[AmpRewriteError],
    decode: Callable[[Content], Value],
) -> Value:
    """Decode a JSON text, or raise `error`, naming `source`, and `kind` or `advice`."""
    try:
        return decode(content)
    except RecursionError as cause:
        raise error(f"{source}: nested too deeply, so not {kind}") from cause
    except Malformed as cause:
        raise error(f"{source}: {cause.where} {cause}; {advice}") from cause
    except ValueError as cause:
        raise error(f"{source}: not JSON ({cause}); {advice}") from cause


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        raise Malformed(f"holds the field {next(name for name in names if names.count(name) > 1)!r} twice")
    return members


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


# -- values --------------------------------------------------------------------------------------------


def text(value: object) -> str:
    """Read a text, without half surrogate pairs."""
    if not isinstance(value, str):
        raise Malformed(f"must be text, but is {kind(value)}")
    if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
        raise Malformed("holds half a surrogate pair")
    return value


def integer(value: object) -> int:
    """Read an integer of 64 bits."""
    if type(value) is not int:
        raise Malformed(f"must be an integer, but is {kind(value)}")
    if abs(value) >= 2**63:
        raise Malformed("does not fit in 64 bits")
    return value


def natural(value: object) -> int:
    """Read an integer from 0 on."""
    return _not_negative(integer(value))


def size(value: object) -> float:
    """Read a finite number from 0 on."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise Malformed(f"must be a number, but is {kind(value)}")
    return float(_not_negative(value))


_Number = TypeVar("_Number", int, float)


def _not_negative(number: _Number) -> _Number:
    if number < 0:
        raise Malformed(f"must not be negative, but is {number:g}")
    return number


def flag(value: object) -> bool:
    """Read true or false."""
    if not isinstance(value, bool):
        raise Malformed(f"must be true or false, but is {kind(value)}")
    return value


def optional(read: Reader) -> Reader:
    """Read null, or a value with `read`."""
    return lambda value: None if value is None else read(value)


def list_of(read: Reader) -> Reader:
    """Read a list, as a tuple."""

    def reader(value: object) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise Malformed(f"must be a list, but is {kind(value)}")
        items: list[Any] = []
        try:
            items.extend(map(read, value))
        except Malformed as error:
            raise error.within(f"[{len(items)}]") from None
        return tuple(items)

    return reader


def map_of(read: Reader) -> Reader:
    """Read an object of any names."""

    def reader(value: object) -> dict[str, Any]:
        items = {}
        for key, item in _object(value).items():
            try:
                items[text(key)] = read(item)
            except Malformed as error:
                raise error.within(f".{key}") from None
        return items

    return reader


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Malformed(f"must be an object, but is {kind(value)}")
    return value


def kind(value: object) -> str:
    """Return the kind of a JSON value, in words."""
    if isinstance(value, float) and not math.isfinite(value):
        return "a number out of range"
    names = {str: "text", bool: "true or false", list: "a list", dict: "an object"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else "null")


# -- records -------------------------------------------------------------------------------------------


@cache
def parts_of(cls: Any) -> Mapping[str, tuple[str, object]]:
    """Return annotation and default of each field of a record: a dataclass, or a tuple with names.

    Postponed annotations are their own source text.
    """
    if issubclass(cls, tuple):
        stated, defaults = cls.__annotations__, cls._field_defaults
        return {name: (stated[name].__forward_arg__, defaults.get(name, MISSING)) for name in cls._fields}
    defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(cls)}
    return {f.name: (str(f.type), defaults[f.name]) for f in fields(cls)}


def record(
    cls: type,
    readers: Mapping[str, Reader] = {},
    *,
    needed: Collection[str] | None = None,
    without: Collection[str] = (),
    make: Callable[..., Any] | None = None,
) -> Reader:
    """Read an object as a record: each field by its annotation, or by its reader, also further ones.

    `needed`: the fields that must be there, by default those without a default; `without`: fields that JSON does not
    have. `make` makes the record of the fields. A "_" at the end of a name keeps it apart from a word of Python.
    """
    parts = {name: part for name, part in parts_of(cls).items() if name not in without}
    known = {name.rstrip("_"): (name, readers.get(name) or _reader_of(part[0])) for name, part in parts.items()}
    known |= {name: (name, read) for name, read in readers.items() if name not in parts}
    needed = [name for name, part in parts.items() if part[1] is MISSING] if needed is None else needed

    def reader(value: object) -> Any:
        members, name = {}, ""
        try:
            for name, item in _object(value).items():
                attribute, read = known[name]
                members[attribute] = read(item)
        except KeyError:
            raise Malformed(f"has an unknown field {name!r}") from None
        except Malformed as error:
            raise error.within(f".{name}" if name else "") from None
        for name in needed:
            if name not in members:
                raise Malformed(f"lacks the field {name!r}")
        return (make or cls)(**members)

    return reader


_SHORT = 200


def _shared(read: Reader) -> Reader:
    """Read a text, a list of texts or a map with `read`; equal short ones are one object, which stays as it is."""
    keep = lru_cache(maxsize=4096)(lambda item: item)
    keep_map: Callable[..., dict[str, Any]] = lru_cache(maxsize=4096)(dict)

    def reader(value: object) -> Any:
        item = read(value)
        if item is None or len(item) > _SHORT:
            return item
        return keep_map(tuple(item.items())) if isinstance(item, dict) else keep(item)

    return reader


_BY_ANNOTATION: dict[str, Reader] = {
    "Name": text,
    "int": natural,
    "int | None": optional(natural),
    "Position": integer,
    "float": size,
    "float | None": optional(size),
    "bool": flag,
    "Mapping[str, int]": map_of(integer),
    "Mapping[str, object]": map_of(lambda value: value),
    "tuple[int, ...]": list_of(integer),
}
_SHARED: dict[str, Reader] = {
    "str": text,
    "str | None": optional(text),
    "Mapping[str, str]": map_of(text),
    "tuple[str, ...]": list_of(text),
}
"""Readers of fields whose values many rows share."""


def _reader_of(annotation: str) -> Reader:
    return _BY_ANNOTATION[annotation] if annotation in _BY_ANNOTATION else _shared(_SHARED[annotation])
