"""Signatures of functions that take the keywords of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, cleandoc, signature
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

from amp_rewrite.settings.choices import (
    Fuse,
    FuseName,
    Level,
    LevelName,
    Placement,
    PlacementName,
    Quantized,
    QuantizedName,
    Safety,
    SafetyName,
    Target,
    TargetName,
    TargetRelease,
)
from amp_rewrite.settings.criterion import CriterionKeywords
from amp_rewrite.settings.option import Option
from amp_rewrite.settings.options import KEYWORDS, ListSource
from amp_rewrite.settings.policy import LowType


class Painting(TypedDict, total=False):
    """Keywords of a conversion that a training step takes, too."""

    lists: Sequence[ListSource] | ListSource | None
    level: LevelName | Level | None
    target: TargetName | TargetRelease | Target | Path | None
    safety: SafetyName | Safety | None
    keep: str | Sequence[str] | None
    lower: str | Sequence[str] | None
    gray_follows_allow: bool | None


class Options(Painting, total=False):
    """Keywords of a conversion, with their types for static checkers; None is the default."""

    to: LowType | None
    io: str | Sequence[str] | None
    kv: LowType | Literal["float32"] | None
    quantized: QuantizedName | Quantized | None
    fuse: FuseName | Fuse | None
    opset: Literal["auto", "keep"] | int | None
    shift: Literal["auto", "none"] | int | None
    placement: PlacementName | Placement | None


class OptionsAndCriterion(Options, CriterionKeywords, total=False):
    """Keywords of a conversion that a criterion judges."""


PAINTING = tuple(name for name in KEYWORDS if name in Painting.__annotations__)
"""Keywords of a training step."""

F = TypeVar("F", bound=Callable[..., Any])


def takes(*tables: Mapping[str, Option]) -> Callable[[F], F]:
    """Show the keywords of tables behind `**` one by one to help() and completion, with their docs."""
    rows = {name: row for table in tables for name, row in table.items()}
    types = {name: reference.__forward_arg__ for name, reference in OptionsAndCriterion.__annotations__.items()}
    keywords = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=row.default, annotation=types.get(name, row.kind.value))
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
