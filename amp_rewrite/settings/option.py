"""Options with their documentation and parsers, checks of keyword types, and keywords of public functions."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import partial, wraps
from inspect import Parameter, cleandoc, signature, unwrap
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, get_args, get_origin, get_type_hints

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import AmpRewriteError, ConfigError, PolicyError, advice, spelled
from amp_rewrite.ir.names import as_names
from amp_rewrite.settings.choices import (
    Assumption,
    Fuse,
    Level,
    LowType,
    Placement,
    Quantized,
    Safety,
    Target,
    TargetName,
    one_of,
)

PRECISION, DATA, OUTPUT = "Precision", "Data and accuracy", "Output and settings"
"""Groups of options: the headings in help and documentation, in order."""
ALWAYS, IF_CHANGED = "always", "if not the default"
"""Conditions for an option to be in report and metadata: always, or if its value is not the default."""


class Kind(Enum):
    """The kind of an option's value, with its Python type."""

    TEXT = "str"
    LIST = "str | Sequence[str]"
    SWITCH = "bool"
    NUMBER = "float"
    WHOLE = "int"
    PATH = "str | Path"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option. Its name, its words and, unless it is a path, its kind are derived from the dataclass field.

    `words`: the legal values, if there are only a few. `help`: the help on the command line; an option without help is
    a key of `--set`. `doc`: the text in the documentation. `default`: the value if neither the caller nor the
    environment sets one. `parse`: parses a value, and raises PolicyError for an illegal one.
    """

    doc: str
    name: str = ""
    kind: Kind = Kind.TEXT
    group: str = PRECISION
    metavar: str = ""
    help: str = ""
    default: Any = None
    words: tuple[str, ...] = ()
    parse: Callable[[Any], Any] | None = None
    recorded: str = ""
    environment: str = ""

    @property
    def key(self) -> str:
        """The name on the command line and in settings files."""
        return self.name.replace("_", "-")

    def read(self, value: Any) -> Any:
        """Return the field's value for a Python value, or for text on the command line or in a file.

        PolicyError for a value of the wrong type; also raises the errors of `parse`.
        """
        value = self.default if value is None else value
        if value is None:
            return None
        if self.kind in _FROM_TEXT:
            if isinstance(value, str):
                with suppress(ValueError):
                    value = _FROM_TEXT[self.kind](value)
            check_keyword(self.name, value, self.kind.value)
        if self.kind is Kind.NUMBER:
            value = math.inf if abs(value) > DType.DOUBLE.max else float(value)  # TOML integers are unbounded
        if self.words:
            return one_of(self.words, value, self.name)
        if self.parse is not None:
            return self.parse(value)
        check_keyword(self.name, value, self.kind.value)
        return as_names(value) if self.kind is Kind.LIST else value

    def check(self, value: object, where: str) -> object:
        """Return the value; if it is illegal, raise ConfigError with `where` in front of the message."""
        try:
            self.read(value)
        except AmpRewriteError as error:
            message = str(error)
            raise ConfigError(message if message.startswith(where) else f"{where}: {message}") from error
        return value


_FROM_TEXT: dict[Kind, Callable[[str], object]] = {
    Kind.SWITCH: lambda word: {"true": True, "false": False}.get(word.lower(), word),
    Kind.NUMBER: float,
    Kind.WHOLE: int,
}


def option(default: Any, doc: str, **keywords: Any) -> Any:
    """Return a dataclass field for an option, with the keywords of `Option`."""
    return field(default=default, metadata={"option": Option(doc=doc, default=default, **keywords)})


data_option, output_option = partial(option, group=DATA), partial(option, group=OUTPUT)


def field_options(record: type) -> dict[str, Option]:
    """Return the options of a dataclass by name, with kinds and words from the types of its fields."""
    kinds = {tuple: Kind.LIST, bool: Kind.SWITCH, float: Kind.NUMBER, int: Kind.WHOLE}
    types, found = get_type_hints(record), dict[str, Option]()
    for name, row in ((part.name, part.metadata.get("option")) for part in fields(record)):
        if row is not None:
            by_origin = {get_origin(kind) or kind: kind for kind in (types[name], *get_args(types[name]))}
            kind = next((kinds.get(kind, row.kind) for kind in by_origin if kind in (str, *kinds)), row.kind)
            words = get_args(by_origin.get(Literal))
            metavar = row.metavar or "|".join(words)
            found[name] = replace(row, name=name, kind=kind, words=words, metavar=metavar)
    return found


def check_keyword(name: str, value: object, annotation: str, names: Mapping[str, object] = {}) -> None:
    """Raise PolicyError with the keyword's name if a value does not match its annotation (see `legal_forms`)."""
    if legal := legal_forms(value, annotation, names):
        raise PolicyError(f"{spelled(name, value)} must be {legal}, not {type(value).__name__}")


# -- values and annotations ----------------------------------------------------------------------------------


Form = tuple[str, Callable[[Any], bool]]


def legal_forms(value: object, annotation: str, names: Mapping[str, object] = {}) -> str:
    """Return "" if a value matches an annotation; otherwise, a description of the legal values.

    `names`: the objects by their names in the annotation. An alias or a protocol accepts every value.
    """
    forms = [_form(part, names) for part in alternatives(annotation)]
    if any(fits(value) for _, fits in forms):
        return ""
    others, _, last = ", ".join(dict(forms)).rpartition(", ")
    return f"{others}{' or ' if others else ''}{last}"


def alternatives(annotation: str) -> Iterator[str]:
    """Yield the parts of a union such as "str | Callable[[A | B], None] | None"."""
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


def _is_list_of_strings(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, (str, bytes, Mapping)) and all(map(_is(str), value))


_FORMS: dict[str, Form] = {
    "None": ("None", lambda value: value is None),
    "bool": ("True, False", lambda value: isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")),
    "int": ("a whole number", _is(Integral)),
    "float": ("a number", _is(Real)),
    "str": ("a string", _is(str)),
    **dict.fromkeys(("Path", "os.PathLike"), ("a path", _is(os.PathLike))),
    "Sequence[str]": ("a list of strings", _is_list_of_strings),
    **dict.fromkeys(
        ("Sequence", "Iterable", "list", "tuple"),
        ("a list", lambda value: hasattr(value, "__iter__") and not isinstance(value, (str, bytes))),
    ),
    **dict.fromkeys(("Mapping", "dict"), ("a mapping", _is(Mapping))),
    **dict.fromkeys(("Callable", "Progress"), ("a function", callable)),
}


def _form(part: str, names: Mapping[str, object]) -> Form:
    name = part.partition("[")[0]
    form = _FORMS.get(part) or _FORMS.get(name)
    if form is not None:
        return form
    target = names.get(name)
    if (target is not None and not isinstance(target, type)) or getattr(target, "_is_protocol", False):
        return "", lambda value: True
    article = "an" if name[:1] in "AEIOU" else "a"
    return f"{article} {name}", lambda value: any(kind.__name__ == name for kind in type(value).__mro__)


# -- keywords of public functions, with their types for type checkers ---------------------------------------


Progress = Callable[[str, int, int], None]
"""A function called with the stage of the work ("read", "decide" …), the amount done, and the total."""
ListSource = str | Path | Mapping[str, object]
Data = str | os.PathLike[str] | Iterable[Any] | Callable[[], Iterable[Any]]
"""Everything accepted as input data; `Feed.of` lists the forms. Mappings, arrays and feeds are iterable."""


class Painting(TypedDict, total=False):
    """Keywords of a conversion and of a training step."""

    lists: Sequence[ListSource] | ListSource | None
    level: Level | None
    target: TargetName | str | Target | None
    safety: Safety | None
    keep: str | Sequence[str] | None
    lower: str | Sequence[str] | None
    gray_follows_allow: bool | None


class Options(Painting, total=False):
    """Keywords of a conversion, with their types for type checkers; None is the default."""

    to: LowType | None
    io: str | Sequence[str] | None
    narrow: bool | None
    quantized: Quantized | None
    fuse: Fuse | None
    assume: Assumption | None
    opset: Literal["auto", "keep"] | int | None
    shift: Literal["auto", "none"] | int | None
    placement: Placement | None


class CriterionKeywords(TypedDict, total=False):
    """Keywords of a criterion, with their types for type checkers."""

    tolerance: float | None
    rtol: float | None
    atol: float | None
    metric: str | None


class OptionsAndCriterion(Options, CriterionKeywords, total=False):
    """Keywords of a conversion and of a criterion."""


F = TypeVar("F", bound=Callable[..., Any])


def checked(function: F) -> F:
    """Decorate a function to check keywords against their annotations, and to treat None as the default.

    PolicyError for a value of the wrong type; TypeError for an unknown keyword, with the closest legal one. Aliases in
    annotations accept every value, since the function parses it. A name imported only for type checkers is assumed to
    be a class.
    """
    parameters = signature(function).parameters.values()
    annotations = {p.name: p.annotation for p in parameters if p.kind is Parameter.KEYWORD_ONLY}

    @wraps(function)
    def call(*positional: Any, **keywords: Any) -> Any:
        legal = signature(call).parameters
        if not any(parameter.kind is Parameter.VAR_KEYWORD for parameter in legal.values()):
            check_keyword_names(function.__name__, keywords, legal)
        passed = {
            name: value
            for name, value in keywords.items()
            if value is not None or "None" in alternatives(annotations.get(name, "None"))
        }
        for name in passed.keys() & annotations.keys():
            check_keyword(name, passed[name], annotations[name], unwrap(function).__globals__)
        return function(*positional, **passed)

    return call  # type: ignore[return-value]


def check_keyword_names(function: str, keywords: Iterable[str], legal: Collection[str]) -> None:
    """Raise TypeError for an unknown keyword of a function, with the closest legal one."""
    for name in keywords:
        if name not in legal:
            hint = advice(name, legal, f"it accepts {', '.join(legal)}")
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}; {hint}")


def takes(*tables: Mapping[str, Option]) -> Callable[[F], F]:
    """Decorate a function with `**keywords` to list its options in help() and completion."""
    rows = {name: row for table in tables for name, row in table.items()}
    types = {name: reference.__forward_arg__ for name, reference in OptionsAndCriterion.__annotations__.items()}
    keywords = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=row.default, annotation=types[name])
        for name, row in rows.items()
    ]

    def decorate(function: F) -> F:
        original = signature(function)
        named = [p for p in original.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        first = [p for p in named if p.kind is not Parameter.KEYWORD_ONLY]
        parameters = [*first, *keywords, *named[len(first) :]]
        function.__signature__ = original.replace(parameters=parameters)  # type: ignore[attr-defined]
        if function.__doc__:  # missing under python -OO
            lines = [f"{name}: {row.doc}." for name, row in rows.items()]
            function.__doc__ = "\n".join([cleandoc(function.__doc__), "\nOptions:\n", *lines])
        return function

    return decorate
