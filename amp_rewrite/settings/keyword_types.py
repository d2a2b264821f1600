"""Values of keywords, checked by the annotations of functions."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from numbers import Integral, Real
from typing import Any

from amp_rewrite.errors import PolicyError, spelled


def check_keyword(name: str, value: object, annotation: str, known: Mapping[str, object] = {}) -> None:
    """Raise PolicyError, naming the keyword, if the annotation excludes a value.

    `known`: what names in the annotation stand for.
    """
    forms = [_form(part, known) for part in alternatives(annotation)]
    if not any(fits(value) for _, fits in forms):
        others, _, last = ", ".join(dict(forms)).rpartition(", ")
        legal = f"{others}{' or ' if others else ''}{last}"
        raise PolicyError(f"{spelled(name, value)} is {type(value).__name__}; give {legal}")


_Form = tuple[str, Callable[[Any], bool]]


def _is(kind: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, kind) and not isinstance(value, bool)


def _items(value: object, kind: type) -> bool:
    if not isinstance(value, Collection) or isinstance(value, (str, bytes, Mapping)):
        return False
    return all(map(_is(kind), value))


_FORMS: dict[str, _Form] = {
    "None": ("None", lambda value: value is None),
    "bool": ("True, False", lambda value: isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")),
    "int": ("a whole number", _is(Integral)),
    "float": ("a number", _is(Real)),
    "str": ("text", _is(str)),
    "Path": ("a path", _is(os.PathLike)),
    "Sequence[str]": ("a list of text", lambda value: _items(value, str)),
    "Sequence[int]": ("a list of whole numbers", lambda value: _items(value, Integral)),
    "tuple[str, str]": ("two names", lambda value: _items(value, str) and len(value) == 2),
}


def _form(part: str, known: Mapping[str, object]) -> _Form:
    """Return the words for one alternative of an annotation, and a test."""
    if part in _FORMS:
        return _FORMS[part]
    if part.startswith("Callable"):
        return "a function", callable
    if "[" in part or (part in known and not isinstance(known[part], type)):
        return "", lambda value: True
    return f"a {part}", lambda value: any(kind.__name__ == part for kind in type(value).__mro__)


def alternatives(annotation: str) -> Iterator[str]:
    """Yield the parts of "str | Callable[[A | B], None] | None"; a bar in brackets does not divide."""
    depth, part = 0, ""
    for piece in re.split(r"([\[\]|])", annotation):
        depth += (piece == "[") - (piece == "]")
        if piece == "|" and depth == 0:
            yield part.strip()
            part = ""
        else:
            part += piece
    yield part.strip()
