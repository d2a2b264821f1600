"""One option of a conversion: its name, form, words and parser."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import AmpRewriteError, ConfigError
from amp_rewrite.settings.keyword_types import check_keyword

Values = Mapping[str, Any]

PRECISION, DATA, OUTPUT, MANY, ADVANCED = "Precision", "Data and accuracy", "Output", "Several models", "Advanced"
"""Headings of help and documentation, in their order."""


class Kind(Enum):
    """Form of an option's value; `annotation` is its Python type where `Options` does not state one."""

    TEXT = "str | None"
    LIST = "str | Sequence[str]"
    SWITCH = "bool | None"
    NUMBER = "float | None"
    WHOLE = "int | None"
    PATH = "str | Path | None"


class Stated(Enum):
    """Conversions whose report and metadata state an option: all, or those with an unusual value."""

    ALWAYS = auto()
    UNUSUAL = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option.

    `keyword`: `convert` takes it. `setting`: a settings file has a key for it. `help` is the sentence of the command
    line; without one, `--set` takes the key there. `doc` is the sentence of the documentation. `default` is the
    keyword's; `usual` holds where that is None and the environment is silent.

    `parse` reads the value, PolicyError for an illegal one; `combine` then sees the options before it in the table.
    A list comes from the command line in words between `separator`, or by repeating the option. `integers`: a settings
    file may hold a number instead of text.
    """

    name: str
    kind: Kind = Kind.TEXT
    group: str = PRECISION
    metavar: str = ""
    help: str = ""
    doc: str
    default: Any = None
    usual: Any = None
    keyword: bool = True
    setting: bool = True
    parse: Callable[[Any], object] | None = None
    combine: Callable[[Any, Values], object] | None = None
    stated: Stated | None = None
    environment: str = ""
    separator: str = ""
    integers: bool = False

    @property
    def key(self) -> str:
        """Name on the command line and in settings files."""
        return self.name.replace("_", "-")

    @property
    def unset(self) -> Any:
        """Value of a setting that neither command line nor environment nor file states."""
        if self.kind is Kind.LIST:
            return ()
        return self.default if self.usual is None else self.usual

    def read(self, value: Any, values: Values) -> Any:
        """Return the value that a conversion works with; PolicyError for one of another type."""
        if self.parse is None:
            check_keyword(self.name, value, f"{self.kind.value} | None")
        parsed = value if self.parse is None or value is None else self.parse(value)
        return parsed if self.combine is None else self.combine(parsed, values)

    def of_word(self, text: str, where: str) -> object:
        """Return the value that a word of the command line stands for. ConfigError if it is of another type."""
        value: object = text
        if self.kind is Kind.SWITCH:
            value = {"true": True, "false": False}.get(text.lower(), text)
        elif self.kind in (Kind.NUMBER, Kind.WHOLE):
            with suppress(ValueError):
                value = int(text) if self.kind is Kind.WHOLE else float(text)
        return self.typed(value, where)

    def typed(self, value: object, where: str) -> object:
        """Return the value of a settings file as the command line would give it. ConfigError for another type."""
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if self.kind is Kind.SWITCH and isinstance(value, bool):
            return value
        if self.kind is Kind.LIST:
            texts = [value] if isinstance(value, str) else value
            if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
                return tuple(texts)
        if isinstance(value, (int, float)) and number and self.kind is Kind.NUMBER:
            return float(value) if abs(value) <= DType.DOUBLE.max else math.inf  # TOML's integers have no bound
        if isinstance(value, int) and number and self.kind is Kind.WHOLE:
            return value
        if isinstance(value, int) and number and self.integers:
            return str(value)
        if self.kind in (Kind.TEXT, Kind.PATH) and isinstance(value, str):
            return value
        raise ConfigError(f"{where}: {self.name} is {value!r}; write {_FORMS[self.kind]}")

    def check(self, value: object, where: str) -> object:
        """Return the value. ConfigError, beginning with `where`, if it is not a legal one."""
        if self.parse is not None:
            try:
                self.parse(value)
            except AmpRewriteError as error:
                raise ConfigError(f"{where}: {error}") from error
        return value


_FORMS = {
    Kind.TEXT: "text in quotes",
    Kind.PATH: "text in quotes",
    Kind.LIST: 'a list of text, as in ["..."]',
    Kind.SWITCH: "true or false",
    Kind.NUMBER: "a number, as in 2",
    Kind.WHOLE: "a whole number, as in 2",
}
