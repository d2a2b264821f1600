"""Keywords of public functions: None stands for the default, and a value of another type than stated is an error.

The annotations of a function are the rules, so that a keyword is written down once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import wraps
from inspect import Parameter, signature, unwrap
from numbers import Integral, Real
from typing import Any, TypeVar

from amp_rewrite.errors import PolicyError, advice, spelled

F = TypeVar("F", bound=Callable[..., Any])


def checked(function: F) -> F:
    """Decorate a function: a value that a keyword's annotation excludes is a PolicyError, but None is the default.

    Aliases in annotations accept every value, because the function parses it; a name that its module imports for type
    checkers alone is that of a class.
    """
    parameters = signature(function).parameters.values()
    stated = {p.name: p.annotation for p in parameters if p.kind is Parameter.KEYWORD_ONLY}

    @wraps(function)
    def call(*given: Any, **keywords: Any) -> Any:
        _check_known(call, keywords)
        said = {
            name: value
            for name, value in keywords.items()
            if value is not None or "None" in _alternatives(stated.get(name, "None"))
        }
        for name in said.keys() & stated.keys():
            check_keyword(name, said[name], stated[name], unwrap(function).__globals__)
        return function(*given, **said)

    return call  # type: ignore[return-value]


def _check_known(function: Callable[..., Any], keywords: Collection[str]) -> None:
    """Raise TypeError, as Python does, for a keyword that a function does not take."""
    known = signature(function).parameters
    unknown = next((name for name in keywords if name not in known), None)
    if unknown is None or any(parameter.kind is Parameter.VAR_KEYWORD for parameter in known.values()):
        return
    raise unexpected(function, unknown, "repair and verify take it" if unknown in CRITERION else "")


def unexpected(function: Callable[..., Any], keyword: str, hint: str) -> TypeError:
    """Return the error of a keyword that a function does not take; without a hint it names those that it takes."""
    known = signature(function).parameters
    hint = hint or advice(keyword, known, f"it takes {', '.join(known)}")
    return TypeError(f"{function.__name__}() got an unexpected keyword argument {keyword!r}; {hint}")


CRITERION = ("tolerance", "rtol", "atol", "metric", "at_least", "at_most")
"""Keywords that say how near outputs must be."""


def check_keyword(name: str, value: object, annotation: str, known: Mapping[str, object] = {}) -> None:
    """Raise PolicyError, naming the keyword, if the annotation excludes a value.

    `known`: what names in the annotation stand for.
    """
    forms = [_form(part, known) for part in _alternatives(annotation)]
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


def _alternatives(annotation: str) -> Iterator[str]:
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
