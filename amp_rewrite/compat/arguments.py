"""Arguments of other converters: patterns for names, and a warning for one without effect."""

from __future__ import annotations

import glob
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from amp_rewrite.settings.selectors import one_of_many

_PLAIN = re.compile(r"[\w/.]+")


def without_effect(given: Mapping[str, object], why: Mapping[str, str]) -> None:
    """Warn of each argument that is set (not None, not False) but has no effect here.

    `why`: what happens instead, by name.
    """
    for name, value in given.items():
        if value is not None and value is not False:
            warnings.warn(
                f"{name}={value!r} has no effect: {why[name]}", UserWarning, stacklevel=3
            )  # the line of the user


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
            warnings.warn(f"{what} is not in the model, so it has no effect", UserWarning, stacklevel=4)
