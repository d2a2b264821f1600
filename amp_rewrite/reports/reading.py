"""Readers of untrusted JSON: each checks a value and returns it, or raises `Malformed`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

from amp_rewrite.errors import AmpRewriteError

Reader = Callable[[object], Any]


class Malformed(Exception):
    """Error in a field; callers on the way out put the path before it."""

    def __init__(self, fact: str) -> None:
        super().__init__(fact)
        self.path = ""


def fail(path: str, fact: str) -> NoReturn:
    """Raise the error at a path."""
    error = Malformed(fact)
    error.path = path
    raise error


def load(content: str | bytes, source: str, kind: str, advice: str, error: type[AmpRewriteError]) -> object:
    """Return the value of a JSON text. Raise `error`, naming `source`, and `kind` or `advice`, for other text."""
    try:
        return json.loads(content, parse_constant=_no_constant)
    except RecursionError as cause:
        raise error(f"{source}: nested too deeply, so not {kind}") from cause
    except ValueError as cause:
        raise error(f"{source}: not JSON ({cause}); {advice}") from cause


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def text(value: object) -> str:
    """Read a text that UTF-8 can hold."""
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
    """Read an integer that is not negative."""
    number = integer(value)
    if number < 0:
        raise Malformed(f"must not be negative, but is {number}")
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
            error.path = f"[{len(items)}]{error.path}"
            raise
        return tuple(items)

    return reader


def map_of(read: Reader) -> Reader:
    """Read an object of any names."""

    def reader(value: object) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise Malformed(f"must be an object, but is {kind(value)}")
        items = {}
        for key, item in value.items():
            try:
                items[text(key)] = read(item)
            except Malformed as error:
                error.path = f".{key}{error.path}"
                raise
        return items

    return reader


def kind(value: object) -> str:
    """Return the kind of a JSON value, in words."""
    if isinstance(value, float) and not math.isfinite(value):
        return "a number out of range"
    names = {str: "text", bool: "true or false", list: "a list", dict: "an object"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else "null")
