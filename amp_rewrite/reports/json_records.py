"""JSON of records: written with an item per line, read by type hints."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from amp_rewrite.errors import AmpRewriteError

Reader = Callable[[Any], Any]
Value = TypeVar("Value")


def line_by_line(members: Mapping[str, str], lists: Mapping[str, Iterable[str]]) -> str:
    """Return a JSON object of encoded values, with one field, and one item of each list, per line."""
    lines = [f'  "{name}": {value}' for name, value in members.items()]
    for name, items in lists.items():
        rows = ",\n".join(f"    {item}" for item in items)
        lines.append(f'  "{name}": [\n{rows}\n  ]' if rows else f'  "{name}": []')
    return "{\n" + ",\n".join(lines) + "\n}\n"


class Malformed(ValueError):
    """Error in a field; `path` leads to it."""

    def __init__(self, fact: str, path: str = "") -> None:
        self.fact, self.path = fact, path

    def __str__(self) -> str:
        return f"{self.path.lstrip('.') or 'the whole'} {self.fact}"


def decode(text: str | bytes) -> Any:
    """Return the value of a JSON text. ValueError for other texts."""
    text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    return json.loads(text, parse_constant=_no_constant)


def load(
    content: str | bytes,
    source: str,
    kind: str,
    advice: str,
    error: type[AmpRewriteError],
    read: Callable[[Any], Value],
) -> Value:
    """Read the value of a JSON text, or raise `error`, naming `source`, and `kind` or `advice`."""
    try:
        return read(decode(content))
    except RecursionError as cause:
        raise error(f"{source}: nested too deeply, so not {kind}") from cause
    except Malformed as cause:
        raise error(f"{source}: {cause}; {advice}") from cause
    except UnicodeDecodeError as cause:
        raise error(f"{source}: not UTF-8 text, so not {kind}; {advice}") from cause
    except ValueError as cause:
        raise error(f"{source}: not JSON ({cause}); {advice}") from cause


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


# -- by type hints -------------------------------------------------------------------------------------


@cache
def reader_of(hint: Any) -> Reader:
    origin, parts = get_origin(hint), get_args(hint)
    if hint in _WORDS:
        return lambda value: _plain(value, hint)
    if origin in (Union, UnionType):
        (inner,) = (reader_of(part) for part in parts if part is not NoneType)
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        item = reader_of(parts[0])
        return lambda value: tuple([_within(f"[{i}]", item, part) for i, part in enumerate(_plain(value, list))])
    if origin is not None and issubclass(origin, Mapping):
        return map_of(reader_of(parts[1]))
    return record(hint) if is_dataclass(hint) or hasattr(hint, "_fields") else lambda value: value


_WORDS = {str: "text", int: "an integer", float: "a number", bool: "true or false", dict: "an object", list: "a list"}


def _plain(value: Any, wanted: Any) -> Any:
    if type(value) is wanted:
        if wanted is float and not math.isfinite(value):
            raise Malformed("is a number out of range")
        return value
    if wanted is float and type(value) is int and abs(value) < 2**63:
        return float(value)
    raise Malformed(f"must be {_WORDS[wanted]}, but is {_WORDS.get(type(value), 'null')}")


def _within(part: str, read: Reader, value: Any) -> Any:
    try:
        return read(value)
    except Malformed as error:
        error.path = part + error.path
        raise


def map_of(read: Reader) -> Reader:
    """Return the reader of an object of any names."""
    return lambda value: {key: _within(f".{key}", read, item) for key, item in _plain(value, dict).items()}


@cache
def defaults_of(cls: Any) -> Mapping[str, object]:
    """Return the default of each field of a dataclass or a named tuple; MISSING for none."""
    if issubclass(cls, tuple):
        return {name: cls._field_defaults.get(name, MISSING) for name in cls._fields}
    return {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(cls)}


def record(
    cls: Any,
    readers: Mapping[str, Reader] = {},
    *,
    needed: Collection[str] | None = None,
    make: Callable[..., Any] | None = None,
) -> Reader:
    """Return the reader of an object as a record; it leaves out unknown fields.

    Args:
        cls: a dataclass or a named tuple; a "_" at the end of a field's name keeps it apart from a word of Python.
        readers: of fields that are not read by their hints, and of further ones.
        needed: the fields that must be there, by default those without a default.
        make: makes the record of the fields.
    """
    hints, defaults = get_type_hints(cls), defaults_of(cls)
    known = {name.rstrip("_"): (name, readers.get(name) or reader_of(hints[name])) for name in defaults}
    known |= {name: (name, read) for name, read in readers.items() if name not in defaults}
    needed = [name for name, default in defaults.items() if default is MISSING] if needed is None else needed

    def reader(value: Any) -> Any:
        members = {}
        for name, item in _plain(value, dict).items():
            if name in known:
                attribute, read = known[name]
                members[attribute] = _within(f".{name}", read, item)
        for name in needed:
            if name not in members:
                raise Malformed(f"lacks the field {name!r}")
        return (make or cls)(**members)

    return reader
