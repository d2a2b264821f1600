"""What is asked of a conversion: the options of `convert`, and what they come to together with the environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import PolicyError
from amp_rewrite.settings.choices import AUTO, PROPAGATE, Fuse, Opset, Placement, Safety, Target, parse_opset
from amp_rewrite.settings.config_file import from_environment
from amp_rewrite.settings.op_lists import Level, OpLists, environment_edits, load_lists
from amp_rewrite.settings.policy import Policy, low_type

ListSource = str | Path | Mapping[str, object]


class Painting(TypedDict, total=False):
    """The options that painting depends on, whether a model is converted or a training step is made."""

    lists: Sequence[ListSource] | ListSource
    level: str | Level | None
    target: str | Target
    safety: str | Safety
    keep: Sequence[str]
    lower: Sequence[str]
    gray_follows_allow: bool | None


class Options(Painting, total=False):
    """The options of a conversion, with the meaning that `convert` gives them; what is left out is as in DEFAULTS."""

    to: str | DType | Policy
    io: str | Sequence[str] | None
    fuse: str | Fuse
    opset: Opset | None
    placement: str | Placement | None


DEFAULTS: Options = {
    "to": "float16",
    "lists": (),
    "level": None,
    "target": "ort-cuda",
    "safety": "default",
    "keep": (),
    "lower": (),
    "io": None,
    "gray_follows_allow": None,
    "fuse": "basic",
    "opset": None,
    "placement": None,
}
"""Every option, in the order in which people read them. None: the environment, the type or the model decides."""

F = TypeVar("F", bound=Callable[..., Any])


def takes_options(function: F) -> F:
    """The function, whose `**options: Unpack[Options]` help() and completion show one by one, with their defaults."""
    own = signature(function)
    types = {name: reference.__forward_arg__ for name, reference in Options.__annotations__.items()}
    options = [Parameter(n, Parameter.KEYWORD_ONLY, default=d, annotation=types[n]) for n, d in DEFAULTS.items()]
    named = [p for p in own.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    first = [p for p in named if p.kind is not Parameter.KEYWORD_ONLY]
    function.__signature__ = own.replace(parameters=[*first, *options, *named[len(first) :]])  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of a conversion, by options and environment, read and checked.

    `keep`, `lower` and `io` are patterns as `convert` takes them.
    """

    to: DType
    lists: OpLists
    level: Level
    target: Target
    safety: Safety
    keep: tuple[str, ...]
    lower: tuple[str, ...]
    io: str | Sequence[str] | None
    gray_follows_allow: bool | None
    fuse: Fuse
    opset: Opset | None
    placement: Placement
    log_path: Path | None

    @classmethod
    def of(cls, **options: Unpack[Options]) -> Request:
        """The request of options; raises as `convert` does, TypeError for what is no option."""
        unknown = next((name for name in options if name not in DEFAULTS), None)
        if unknown is not None:
            raise TypeError(
                f"unexpected keyword argument {unknown!r}; the options of a conversion are {', '.join(DEFAULTS)}"
            )
        given, environment = DEFAULTS | options, from_environment(os.environ)
        low = low_type(given["to"])
        level = given["level"] if given["level"] is not None else str(environment.get("level", "default"))
        target, safety, fuse = given["target"], given["safety"], given["fuse"]
        target = target if isinstance(target, Target) else Target.parse(target)
        safety = safety if isinstance(safety, Safety) else Safety.parse(safety)
        return cls(
            low,
            _lists(low, given["lists"], environment),
            level if isinstance(level, Level) else Level.parse(level),
            target,
            safety,
            _texts(given["keep"]),
            _texts(given["lower"]),
            given["io"],
            given["gray_follows_allow"],
            _for(target, fuse if isinstance(fuse, Fuse) else Fuse.parse(fuse)),
            None if given["opset"] is None else parse_opset(given["opset"]),
            _placement(given["placement"], safety),
            Path(str(environment["log_path"])) if "log_path" in environment else None,
        )

    @property
    def safe(self) -> bool:
        """Whether this project's rules hold on top of TensorFlow's."""
        return self.safety is Safety.DEFAULT

    @property
    def settings(self) -> dict[str, str]:
        """Level, target and safety as they are spelled; fuse, opset and placement too, if they are not the usual."""
        chosen = {"fuse": self.fuse.value, "opset": str(self.opset or ""), "placement": self.placement.spelling}
        told = {"level": self.level.value, "target": self.target.value, "safety": self.safety.value}
        usual = {"fuse": Fuse.BASIC.value, "opset": "", "placement": _placement(None, self.safety).spelling}
        return told | {name: spelling for name, spelling in chosen.items() if spelling != usual[name]}


def _lists(to: DType, given: Sequence[ListSource] | ListSource, environment: Mapping[str, object]) -> OpLists:
    overlays = [given] if isinstance(given, (str, Path, Mapping)) else list(given)
    if not overlays:
        overlays = list(environment.get("lists", ()))  # type: ignore[call-overload]
    return load_lists(to, overlays, environment_edits(os.environ))


def _texts(patterns: str | Sequence[str]) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _for(target: Target, fuse: Fuse) -> Fuse:
    """What is fused, where the target can run it. PolicyError for operators of a runtime that is not the target's."""
    if fuse is Fuse.CONTRIB and target is not Target.ORT_CUDA:
        raise PolicyError(
            f"fuse 'contrib' makes operators that only onnxruntime has, and the target is {target.value!r}; use target"
            " 'ort-cuda', or fuse 'basic'"
        )
    return fuse


def _placement(given: str | Placement | None, safety: Safety) -> Placement:
    """What is asked for; else "auto", but for TensorFlow's rules alone its way of placing, too."""
    if given is None:
        return AUTO if safety is Safety.DEFAULT else PROPAGATE
    return given if isinstance(given, Placement) else Placement.parse(given)
