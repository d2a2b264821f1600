"""Output: text in color and progress bars on a terminal, plain text elsewhere."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from amp_rewrite.reports.render import harmless, plain

if TYPE_CHECKING:
    from amp_rewrite.errors import Finding

Progress = Callable[[int, int], None]

_STYLES = {
    r"\b(float16|bfloat16|allow|added|lowered)\b": "green",
    r"\b(float32|deny|removed|raised)\b": "yellow",
    r"\b(gray|clear|unlisted)\b": "cyan",
    r"^(warning|error):": "bold red",
}


ALIASES: dict[str, str] = {}
"""Paths of temporary files, and what messages call them."""


def spoken(text: str) -> str:
    """Return a text with temporary files by their aliases."""
    for path, alias in ALIASES.items():
        text = text.replace(path, alias)
    return text


def show(text: str, *, commands: bool = False) -> None:
    """Print a result to stdout. `commands`: its lines may be commands of a CI runner."""
    text = spoken(text)
    _write(text if commands else harmless(text), sys.stdout)


def talk(text: str, *, quiet: bool) -> None:
    """Print a remark to stderr, unless `quiet`. A stderr that cannot be written changes no outcome."""
    if quiet:
        return
    try:
        _write(harmless(plain(spoken(text))), sys.stderr)
    except OSError:
        silence(sys.stderr)


def silence(stream: TextIO) -> None:
    """Let a stream write to nowhere: its reader is gone or its disk full, also for the interpreter's last flush."""
    with suppress(io.UnsupportedOperation), Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


_FACTS = frozenset({"calibrated", "fused", "inlined", "not_fused", "opset", "placement", "repaired", "selected"})
"""Kinds of findings that are facts, not warnings."""


def warn(findings: Sequence[Finding], *, quiet: bool) -> None:
    """Print one line per kind of finding: the first, and the number of others."""
    for kind, group in groupby(sorted(findings), key=lambda finding: finding.kind):
        same = list(group)
        more = f" (and {len(same) - 1} more of this kind)" if len(same) > 1 else ""
        word = "note" if kind in _FACTS else "warning"
        talk(f"{word}: {kind}: {plain(same[0].subject)}: {plain(same[0].message)}{more}", quiet=quiet)


@contextmanager
def progress(title: str, *, quiet: bool) -> Iterator[Progress | None]:
    """Yield a callback that draws a bar on stderr while the body runs; None if stderr is not a terminal."""
    with _drawn(quiet) as tell:
        if tell is not None:
            tell(title, 0, None)  # visible from the start, before the total is known
        yield None if tell is None else partial(tell, title)


def progress_bar(title: str = "") -> AbstractContextManager[Progress | None]:
    """Return a context with a bar on stderr for `progress` arguments; None if stderr is not a terminal.

    In a program: `with progress_bar("training") as bar: trainer.fit(batches, epochs=9, progress=bar)`.
    """
    return progress(title, quiet=False)


@contextmanager
def stages(title: str, *, quiet: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """Like `progress`, for work in several stages with a bar each: the callback gets the stage's name first."""
    with _drawn(quiet) as tell:
        yield None if tell is None else lambda stage, done, total: tell(f"{title}: {stage}", done, total)


@contextmanager
def _drawn(quiet: bool) -> Iterator[Callable[[str, int, int | None], None] | None]:
    """Yield a callback that draws bars by title on stderr; None if `quiet`, or if stderr is not a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress as Drawing
    from rich.progress import TaskID

    tasks: dict[str, TaskID] = {}
    with Drawing(console=Console(stderr=True), transient=True) as drawing:

        def tell(title: str, done: int, total: int | None) -> None:
            if title not in tasks:
                tasks[title] = drawing.add_task(escape(plain(title)), total=None)
            drawing.update(tasks[title], completed=done, total=total)

        yield tell


def _write(text: str, stream: TextIO) -> None:
    if not stream.isatty():
        click.echo(text.rstrip("\n"), stream)
        return
    from rich.console import Console
    from rich.text import Text

    styled = Text(text.rstrip("\n"))
    for expression, style in _STYLES.items():
        styled.highlight_regex(expression, style)
    Console(file=stream, highlight=False).print(styled, soft_wrap=True)
