"""Keywords of public functions: None stands for the default, and a value of another type than stated is an error.

The annotations of a function are the rules, so that a keyword is written down once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from inspect import Parameter, signature, unwrap
from typing import Any, TypeVar

from amp_rewrite.errors import advice
from amp_rewrite.settings.criterion import CRITERION
from amp_rewrite.settings.keyword_types import alternatives, check_keyword

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
            if value is not None or "None" in alternatives(stated.get(name, "None"))
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
