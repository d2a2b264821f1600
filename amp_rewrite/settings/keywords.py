"""Keywords of public functions: their types, their docs, and None as their default.

The annotations of a function are the rules, so that a keyword is written down once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import wraps
from inspect import Parameter, cleandoc, signature, unwrap
from typing import Any, TypeVar

from amp_rewrite.errors import advice
from amp_rewrite.settings.option import Option, alternatives, check_keyword
from amp_rewrite.settings.request import CRITERION, OptionsAndCriterion

F = TypeVar("F", bound=Callable[..., Any])


def checked(function: F) -> F:
    """Decorate a function: a value beyond a keyword's annotation is a PolicyError, but None is the default.

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
    known = signature(function).parameters
    unknown = next((name for name in keywords if name not in known), None)
    if unknown is None or any(parameter.kind is Parameter.VAR_KEYWORD for parameter in known.values()):
        return
    raise unexpected(function, unknown, "repair and verify take it" if unknown in CRITERION else "")


def unexpected(function: Callable[..., Any], keyword: str, hint: str) -> TypeError:
    """Return the error of an unknown keyword; without a hint it names the known ones."""
    known = signature(function).parameters
    hint = hint or advice(keyword, known, f"it takes {', '.join(known)}")
    return TypeError(f"{function.__name__}() got an unexpected keyword argument {keyword!r}; {hint}")


def takes(*tables: Mapping[str, Option]) -> Callable[[F], F]:
    """Show the keywords of tables behind `**` one by one to help() and completion, with their docs."""
    rows = {name: row for table in tables for name, row in table.items()}
    types = {name: reference.__forward_arg__ for name, reference in OptionsAndCriterion.__annotations__.items()}
    keywords = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=row.default, annotation=types[name])
        for name, row in rows.items()
    ]

    def shown(function: F) -> F:
        own = signature(function)
        named = [p for p in own.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        first = [p for p in named if p.kind is not Parameter.KEYWORD_ONLY]
        parameters = [*first, *keywords, *named[len(first) :]]
        function.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        if function.__doc__:  # absent under python -OO
            lines = [f"{name}: {row.doc}." for name, row in rows.items()]
            function.__doc__ = "\n".join([cleandoc(function.__doc__), "\nOptions:\n", *lines])
        return function

    return shown
