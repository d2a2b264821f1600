"""Errors of this package, and helpers for their messages.

A message states the cause, its meaning and the remedy, in this order.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


class AmpRewriteError(Exception):
    """Base of all errors of this package."""


class ModelError(AmpRewriteError):
    """A model cannot be read, is invalid, or cannot be written."""


class ConversionError(ModelError):
    """The converted model failed its final check, a bug in this package; nothing was written."""


class ListError(AmpRewriteError):
    """An op list is malformed or contradicts itself."""


class PatternError(AmpRewriteError):
    """A keep, lower or io pattern is malformed or matches nothing."""


class PolicyError(AmpRewriteError, ValueError):
    """An unknown or contradictory precision policy, level or target; also a ValueError, as in TensorFlow."""


class FeedError(AmpRewriteError):
    """Input data is missing or damaged, or does not match the inputs of the model."""


class EvidenceError(AmpRewriteError):
    """Measured ranges or verdicts cannot be read, or belong to another model or type."""


class ReportError(AmpRewriteError):
    """A report file cannot be read or written."""


class TrainingError(AmpRewriteError, ValueError):
    """A loss scale, optimizer, training step or checkpoint is malformed, or does not match its model."""


class ConfigError(AmpRewriteError):
    """A configuration file or environment variable is malformed."""


class MachineError(AmpRewriteError):
    """The machine lacks a requirement, such as a library."""


class GradientError(AmpRewriteError):
    """A requested gradient does not exist, or its op has no gradient rule."""


def one_line(cause: object) -> str:
    """Return a message on one line, without repeated spaces."""
    return " ".join(str(cause).split())


def count(number: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun: "1 op", "2 ops", "0 casts"."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def share(part: int, whole: int) -> str:
    """Return a share as a whole percentage: 100% only for the whole, 0% only for nothing, "-" if there is no whole."""
    if whole == 0:
        return "-"
    percent = 100 * part / whole
    rounded = min(max(round(percent), 1), 99) if 0 < part < whole else round(percent)
    return f"{rounded}%"


def plain(text: str) -> str:
    """Return the text on one line, with control characters, invisible characters and lone surrogates escaped.

    Names come from model files; an escape sequence in one must not reach the terminal.
    """
    if text.isprintable() and (text.isascii() or not _INVISIBLE.search(text)):
        return text
    visible = {c: c.isprintable() and not _INVISIBLE.match(c) for c in {*text}}
    return "".join(c if visible[c] else c.encode("unicode_escape").decode("ascii") for c in text)


_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Invisible characters that count as printable: fillers, joiners and variation selectors."""


def nearest(word: object, choices: Iterable[str], limit: int = 1) -> list[str]:
    """Return the choices closest to a word, ignoring case, best first."""
    import difflib  # late: only errors need it

    names = list(choices)
    names.sort(key=lambda name: name[:1] != str(word)[:1])  # "Sofmax" suggests Softmax before softmax
    close = difflib.get_close_matches(str(word).lower(), dict.fromkeys(name.lower() for name in names), limit)
    return [name for lower in close for name in names if name.lower() == lower][:limit]


def advice(
    word: object, choices: Iterable[str], otherwise: str = "", limit: int = 1, *, shown: Mapping[str, str] | None = None
) -> str:
    """Return "did you mean …?" with the choices closest to a word; if none is close, `otherwise` or a list of all.

    `shown`: the text to show for each choice, if it is not the choice itself.
    """
    suggestions = [repr(shown[name] if shown else name) for name in nearest(word, choices, limit)]
    return f"did you mean {', '.join(suggestions)}?" if suggestions else otherwise or f"use one of {', '.join(choices)}"


_OPTIONS: ContextVar[Collection[str] | None] = ContextVar("options", default=None)


@contextmanager
def option_spelling(options: Collection[str]) -> Iterator[None]:
    """Make `spelled` write command-line options instead of Python keywords while the body runs.

    `options`: the options of the command; all other names are keys of `--set`.
    """
    token = _OPTIONS.set(options)
    try:
        yield
    finally:
        _OPTIONS.reset(token)


def command_line_options() -> Collection[str] | None:
    """Return the options passed to `option_spelling`; None while `spelled` writes Python keywords."""
    return _OPTIONS.get()


def as_option(keyword: str) -> str:
    """Return the option for a keyword: `--rtol`, or `--set rtol` if the command has no such option."""
    key = keyword.replace("_", "-")
    return f"--{key}" if key in (_OPTIONS.get() or ()) else f"--set {key}"


def spelled(keyword: str, value: object = None, *, option: str = "") -> str:
    """Return a keyword as the user writes it, in Python or on the command line.

    In Python, `rtol=` or `rtol=0.1`. On the command line, `--rtol` or `--rtol 0.1`; for a key of `--set`,
    `--set rtol=…` or `--set rtol=0.1`. `option`: the text after "--", if it differs from keyword and value.
    """
    if _OPTIONS.get() is None:
        shown = "" if value is None else one_line(repr(value))
        return f"{keyword}={shown[:_MAX_VALUE_LENGTH]}{'…' if len(shown) > _MAX_VALUE_LENGTH else ''}"
    if option:
        return f"--{option}"
    name = as_option(keyword)
    if name.startswith("--set "):
        return f"{name}={'…' if value is None else str(value).lower() if isinstance(value, bool) else value}"
    return name if value is None or value is True else f"{name} {value}"


_MAX_VALUE_LENGTH = 80


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """An observation: its kind ("saturated", "unknown_type" …), its subject, and a one-line message."""

    kind: str
    subject: str
    message: str


def by_kind(findings: Iterable[Finding]) -> dict[str, list[Finding]]:
    """Group findings by kind, in order of first occurrence."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.kind, []).append(finding)
    return groups
