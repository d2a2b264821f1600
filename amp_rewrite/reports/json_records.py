"""Records in JSON: written with one item per line, and read by type hints."""

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
    """Return a JSON object of encoded values, with each field and each item of a list on its own line."""
    lines = [f'  "{name}": {value}' for name, value in members.items()]
    for name, items in lists.items():
        rows = ",\n".join(f"    {item}" for item in items)
        lines.append(f'  "{name}": [\n{rows}\n  ]' if rows else f'  "{name}": []')
    return "{\n" + ",\n".join(lines) + "\n}\n"


class Malformed(ValueError):
    """An error in the field at `path`."""

    def __init__(self, fact: str, path: str = "") -> None:
        self.fact, self.path = fact, path

    def __str__(self) -> str:
        return f"{self.path.lstrip('.') or 'the document'} {self.fact}"


def decode(text: str | bytes) -> Any:
    """Parse strict JSON, or raise ValueError for any other text."""
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
    """Read a value from a JSON text, or raise `error` with `source`, and `kind` or `advice`, in its message."""
    try:
        return read(decode(content))
    except RecursionError as cause:
        raise error(f"{source}: the text is nested too deeply, so it is not {kind}; {advice}") from cause
    except Malformed as cause:
        raise error(f"{source}: {cause}; {advice}") from cause
    except UnicodeDecodeError as cause:
        raise error(f"{source}: the text is not UTF-8, so it is not {kind}; {advice}") from cause
    except ValueError as cause:
        raise error(f"{source}: the text is not JSON ({cause}); {advice}") from cause


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


# -- by type hints -------------------------------------------------------------------------------------


@cache
def reader_of(hint: Any) -> Reader:
    origin, parts = get_origin(hint), get_args(hint)
    if hint in _KINDS:
        return lambda value: _typed(value, hint)
    if origin in (Union, UnionType):
        (inner,) = (reader_of(part) for part in parts if part is not NoneType)
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        item = reader_of(parts[0])
        return lambda value: tuple([_within(f"[{i}]", item, part) for i, part in enumerate(_typed(value, list))])
    if origin is not None and issubclass(origin, Mapping):
        return map_of(reader_of(parts[1]))
    return record(hint) if is_dataclass(hint) or hasattr(hint, "_fields") else lambda value: value


_KINDS = {str: "text", int: "an integer", float: "a number", bool: "true or false", dict: "an object", list: "a list"}


def _typed(value: Any, expected: Any) -> Any:
    if type(value) is expected:
        if expected is float and not math.isfinite(value):
            raise Malformed("is a number out of range")
        return value
    if expected is float and type(value) is int and abs(value) < 2**63:
        return float(value)
    raise Malformed(f"must be {_KINDS[expected]}, but is {_KINDS.get(type(value), 'null')}")


def _within(part: str, read: Reader, value: Any) -> Any:
    try:
        return read(value)
    except Malformed as error:
        error.path = part + error.path
        raise


def map_of(read: Reader) -> Reader:
    """Return a reader of objects with arbitrary keys."""
    return lambda value: {key: _within(f".{key}", read, item) for key, item in _typed(value, dict).items()}


@cache
def defaults_of(cls: Any) -> Mapping[str, object]:
    """Return the default of each field of a dataclass or a named tuple; MISSING for a field without one."""
    if issubclass(cls, tuple):
        return {name: cls._field_defaults.get(name, MISSING) for name in cls._fields}
    return {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(cls)}


def record(
    cls: Any,
    readers: Mapping[str, Reader] = {},
    *,
    required: Collection[str] | None = None,
    make: Callable[..., Any] | None = None,
) -> Reader:
    """Return a reader of objects as records; it ignores unknown fields.

    Args:
        cls: a dataclass or a named tuple; a trailing "_" in a field's name avoids a Python keyword.
        readers: readers for additional fields, and in place of those from type hints.
        required: names of the required fields; by default, those of the fields without a default.
        make: constructor of the record; by default, `cls`.
    """
    hints, defaults = get_type_hints(cls), defaults_of(cls)
    targets = {name.rstrip("_"): (name, readers.get(name) or reader_of(hints[name])) for name in defaults}
    targets |= {name: (name, read) for name, read in readers.items() if name not in defaults}
    required = [name for name, default in defaults.items() if default is MISSING] if required is None else required

    def reader(value: Any) -> Any:
        members = {}
        for name, item in _typed(value, dict).items():
            if name in targets:
                attribute, read = targets[name]
                members[attribute] = _within(f".{name}", read, item)
        for name in required:
            if name not in members:
                raise Malformed(f"is missing the field {name!r}")
        return (make or cls)(**members)

    return reader
