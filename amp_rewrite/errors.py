"""The errors of this package. Each message names the cause, its meaning, and the remedy."""

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
    """The converted model failed its own check, a bug of this package; nothing was written."""


class ListError(AmpRewriteError):
    """An op list is malformed or contradicts itself."""


class PatternError(AmpRewriteError):
    """A keep, lower or io pattern is malformed or matches nothing."""


class PolicyError(AmpRewriteError, ValueError):
    """An unknown or contradictory precision policy, level or target; also a ValueError, as in TensorFlow."""


class FeedError(AmpRewriteError):
    """Data to feed a model is missing, damaged, or does not fit its inputs."""


class EvidenceError(AmpRewriteError):
    """Measured ranges or verdicts cannot be read, or are those of another model or type."""


class ReportError(AmpRewriteError):
    """A report file cannot be read or written."""


class TrainingError(AmpRewriteError, ValueError):
    """A loss scale, optimizer, training step or checkpoint is malformed, or does not fit its model."""


class ConfigError(AmpRewriteError):
    """A configuration file or environment variable is malformed."""


class MachineError(AmpRewriteError):
    """This machine lacks a requirement: a library, or a readable registry."""


class GradientError(AmpRewriteError):
    """A requested gradient does not exist, or has no rule."""


def one_line(cause: object) -> str:
    """Return a message without line breaks and repeated spaces."""
    return " ".join(str(cause).split())


def count(number: int, one: str, many: str | None = None) -> str:
    """Return the number and its noun: "1 op", "2 ops", "0 casts"."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def share(part: int, whole: int) -> str:
    """Return the share in whole percent; 100 % only for the whole, 0 % only for zero."""
    if whole == 0:
        return "-"
    percent = 100 * part / whole
    rounded = min(max(round(percent), 1), 99) if 0 < part < whole else round(percent)
    return f"{rounded} %"


def plain(text: str) -> str:
    """Return the text on one line, with control characters, unseen ones and lone surrogates escaped.

    Names come out of model files; an escape sequence in one must not reach a terminal.
    """
    if text.isprintable() and (text.isascii() or not _UNSEEN.search(text)):
        return text
    visible = {c: c.isprintable() and not _UNSEEN.match(c) for c in {*text}}
    return "".join(c if visible[c] else c.encode("unicode_escape").decode("ascii") for c in text)


_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Printable characters without ink: fillers, joiners and selectors of variants."""


def nearest(word: object, known: Iterable[str], limit: int = 1) -> list[str]:
    """Return the known names most like a word in any case, best first."""
    import difflib  # late: only errors need it

    names = list(known)
    names.sort(key=lambda name: name[:1] != str(word)[:1])  # "Sofmax" is rather Softmax than softmax
    close = difflib.get_close_matches(str(word).lower(), dict.fromkeys(name.lower() for name in names), limit)
    return [name for like in close for name in names if name.lower() == like][:limit]


def advice(
    word: object, known: Iterable[str], otherwise: str = "", limit: int = 1, *, shown: Mapping[str, str] | None = None
) -> str:
    """Return "did you mean …?" with the known names nearest to a word, else the other advice, by default all names.

    `shown`: the advice for each known name, where that is another spelling.
    """
    near = [repr(shown[name] if shown else name) for name in nearest(word, known, limit)]
    return f"did you mean {', '.join(near)}?" if near else otherwise or f"use one of {', '.join(known)}"


_OPTIONS: ContextVar[Collection[str] | None] = ContextVar("options", default=None)


@contextmanager
def options_spelled(own: Collection[str]) -> Iterator[None]:
    """Let `spelled` write words of the command line while the body runs, not keywords of Python.

    `own`: the options of the command; another name is a key of `--set`.
    """
    token = _OPTIONS.set(own)
    try:
        yield
    finally:
        _OPTIONS.reset(token)


def spelled_options() -> Collection[str] | None:
    """Return the options written by `spelled`; None for keywords of Python."""
    return _OPTIONS.get()


def option_of(keyword: str) -> str:
    """Return the option of a keyword: `--rtol`, or `--set rtol` for a key alone."""
    key = keyword.replace("_", "-")
    return f"--{key}" if key in (_OPTIONS.get() or ()) else f"--set {key}"


def spelled(keyword: str, value: object = None, *, option: str = "") -> str:
    """Return a keyword as its user writes it, in Python or in a shell.

    `rtol=` or `rtol=0.1` in Python; `--rtol` or `--rtol 0.1`, and for a key `--set rtol=…` or `--set rtol=0.1`.
    `option`: the words after "--", where they differ from keyword and value.
    """
    if _OPTIONS.get() is None:
        shown = "" if value is None else one_line(repr(value))
        return f"{keyword}={shown[:_LONGEST_VALUE]}{'…' if len(shown) > _LONGEST_VALUE else ''}"
    if option:
        return f"--{option}"
    name = option_of(keyword)
    if name.startswith("--set "):
        return f"{name}={'…' if value is None else str(value).lower() if isinstance(value, bool) else value}"
    return name if value is None or value is True else f"{name} {value}"


_LONGEST_VALUE = 80


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """A fact: its kind ("saturated", "unknown_type" …), its subject, and a message of one line."""

    kind: str
    subject: str
    message: str


def by_kind(findings: Iterable[Finding]) -> dict[str, list[Finding]]:
    """Return findings by their kind, in order of first occurrence."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.kind, []).append(finding)
    return groups
