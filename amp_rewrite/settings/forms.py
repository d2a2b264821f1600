"""Types in the annotations of public functions: their words in errors, and a test of values."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from numbers import Integral, Real
from typing import Any

Form = tuple[str, Callable[[Any], bool]]


def misfit(value: object, annotation: str, names: Mapping[str, object] = {}) -> str:
    """Return the legal forms of a value in words, if an annotation excludes it; "" if it fits.

    `names`: what names in the annotation stand for. An alias or a protocol accepts every value.
    """
    forms = [_form(part, names) for part in alternatives(annotation)]
    if any(fits(value) for _, fits in forms):
        return ""
    others, _, last = ", ".join(dict(forms)).rpartition(", ")
    return f"{others}{' or ' if others else ''}{last}"


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


def _is(kind: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, kind) and not isinstance(value, bool)


def _listed(value: object, kind: type = object) -> bool:
    if not isinstance(value, Collection) or isinstance(value, (str, bytes, Mapping)):
        return False
    return kind is object or all(map(_is(kind), value))


_PATH: Form = ("a path", _is(os.PathLike))
_LIST: Form = ("a list", lambda value: hasattr(value, "__iter__") and not isinstance(value, (str, bytes)))
_MAPPING: Form = ("a mapping", _is(Mapping))
_FUNCTION: Form = ("a function", callable)
_FORMS: dict[str, Form] = {
    "None": ("None", lambda value: value is None),
    "bool": ("True, False", lambda value: isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")),
    "int": ("a whole number", _is(Integral)),
    "float": ("a number", _is(Real)),
    "str": ("text", _is(str)),
    **dict.fromkeys(("Path", "os.PathLike", "PathLike"), _PATH),
    "Sequence[str]": ("a list of text", lambda value: _listed(value, str)),
    "Sequence[int]": ("a list of whole numbers", lambda value: _listed(value, Integral)),
    "tuple[str, str]": ("two names", lambda value: _listed(value, str) and len(value) == 2),
    **dict.fromkeys(("Sequence", "Iterable", "list", "tuple"), _LIST),
    **dict.fromkeys(("Mapping", "dict"), _MAPPING),
    **dict.fromkeys(("Callable", "Progress"), _FUNCTION),
}


def _form(part: str, names: Mapping[str, object]) -> Form:
    name = part.partition("[")[0]
    known = _FORMS.get(part) or _FORMS.get(name)
    if known is not None:
        return known
    own = names.get(name)
    if (own is not None and not isinstance(own, type)) or getattr(own, "_is_protocol", False):
        return "", lambda value: True
    article = "an" if name[:1] in "AEIOU" else "a"
    return f"{article} {name}", lambda value: any(kind.__name__ == name for kind in type(value).__mro__)
