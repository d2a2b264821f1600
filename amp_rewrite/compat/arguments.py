"""Arguments of other converters: what an unknown one is called here, and a warning for one without effect."""

from __future__ import annotations

import glob
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

from amp_rewrite.settings.keywords import unexpected
from amp_rewrite.settings.options import KEYWORDS
from amp_rewrite.settings.selectors import one_of_many

F = TypeVar("F", bound=Callable[..., Any])

_KNOWN_AS = {
    "keep=": ("nodes_to_exclude", "op_types_to_exclude", "exclude_nodes", "blocked_nodes", "disabled_node_name_regex"),
    "lower=": ("nodes_to_include", "op_types_to_include", "op_allow_list", "node_allow_list"),
    "to=": ("low_precision_type", "dtype", "precision", "use_bfloat16"),
    "io=": ("io_types", "keep_inputs", "keep_outputs", "use_gpu_io"),
    "opset=": ("target_opset", "opset_version"),
    "headroom=": ("data_max",),
    "data=": ("calibration_data", "feed_dict", "input_feed"),
    "lists=": ("custom_rule",),
}
_MEANT = {word: ours for ours, words in _KNOWN_AS.items() for word in words}
_PLAIN = re.compile(r"[\w/.]+")


def refuses_unknown(function: F) -> F:
    """Decorate a function: an unknown keyword is a TypeError that names this package's word for the same thing."""
    known = signature(function).parameters

    @wraps(function)
    def call(*given: Any, **keywords: Any) -> Any:
        unknown = next((word for word in keywords if word not in known), None)
        if unknown is not None:
            ours = f"{unknown}=" if unknown in KEYWORDS else _MEANT.get(unknown)
            raise unexpected(function, unknown, f"amp_rewrite.convert takes {ours} for it" if ours else "")
        return function(*given, **keywords)

    return call  # type: ignore[return-value]


def without_effect(given: Mapping[str, object], why: Mapping[str, str]) -> None:
    """Warn of each argument that is set (not None, not False) but has no effect here.

    `why`: what happens instead, by name.
    """
    for name, value in given.items():
        if value is not None and value is not False:
            # the user's line is above this function, its caller and the wrapper of `refuses_unknown`
            warnings.warn(f"{name}={value!r} has no effect: {why[name]}", UserWarning, stacklevel=4)


def node_pattern(name: str) -> str:
    """Return the pattern for the nodes of exactly this name."""
    return name if _PLAIN.fullmatch(name) else rf"re:\A{re.escape(name)}\Z"


def op_patterns(op_type: str) -> tuple[str, str]:
    """Return patterns for an op type in ai.onnx and in every other domain, as other converters ignore domains."""
    escaped = glob.escape(op_type).replace(",", r"\,")
    return f"op={escaped}", f"op=*::{escaped}"


@contextmanager
def matching_nothing(names: Mapping[str, str]) -> Iterator[None]:
    """Accept patterns without a match while the body runs, then warn of those in `names`, each by its words."""
    with one_of_many() as unmatched:
        yield
    for pattern, what in names.items():
        if pattern in unmatched:  # the frame of the context manager counts, too
            warnings.warn(f"{what} is not in the model, so it has no effect", UserWarning, stacklevel=5)
