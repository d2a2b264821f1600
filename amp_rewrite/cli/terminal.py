"""Terminal output: colors and progress bars on a terminal, plain text elsewhere."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from amp_rewrite.errors import by_kind
from amp_rewrite.reports.render import escape_commands, plain, wrap

if TYPE_CHECKING:
    from amp_rewrite.errors import Finding

CountProgress = Callable[[int, int], None]

_STYLES: dict[str, dict[str, Any]] = {
    r"^(error|failed|FINDING)(?=:| {2})": {"fg": "red", "bold": True},
    r"^not written(?=:)": {"fg": "red"},
    r"^(warning(?=:)|to do$|not checked on data(?=:))": {"fg": "yellow"},
    r"^ok(?=:| {2})": {"fg": "green"},
}
"""The styles of words at the start of a line; these words are never names of files or ops."""


def colored(stream: TextIO) -> bool:
    """True if a stream gets colors, according to NO_COLOR and FORCE_COLOR, or because it is a terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (stream.isatty() and os.environ.get("TERM") != "dumb")


def columns(stream: TextIO) -> int | None:
    """Return the width of a terminal; None for other streams, and for a terminal of unknown width."""
    return shutil.get_terminal_size((0, 0)).columns or None if stream.isatty() else None


def show(text: str, *, commands: bool = False) -> None:
    """Print a result to stdout. `commands`: allow commands for a CI runner."""
    _write(text if commands else escape_commands(text), sys.stdout)


def talk(text: str, *, quiet: bool) -> None:
    """Print a remark to stderr unless `quiet`. A broken stderr is ignored."""
    if quiet:
        return
    try:
        _write(escape_commands(plain(text)), sys.stderr)
    except OSError:
        silence(sys.stderr)


def silence(stream: TextIO) -> None:
    """Discard all further output to a broken stream, including the last flush."""
    with suppress(io.UnsupportedOperation), Path(os.devnull).open("wb") as devnull:
        os.dup2(devnull.fileno(), stream.fileno())


def warn(findings: Sequence[Finding], *, quiet: bool) -> None:
    """Print a line for each kind of finding, with the first finding and the number of others."""
    from amp_rewrite.decide.reasons import is_fact, remarked  # late: help and usage errors do not need it

    for kind, group in by_kind(sorted(findings)).items():
        same = sorted(group, key=lambda finding: is_fact(kind, finding.message))
        more = f" (and {len(same) - 1} more of this kind)" if len(same) > 1 else ""
        word = "note" if is_fact(kind, same[0].message) else "warning"
        fact = remarked(kind, same[0].message, more)
        talk(f"{word}: {kind}: {plain(same[0].subject)}: {plain(fact)}", quiet=quiet)


@contextmanager
def progress(title: str, *models: Path, quiet: bool) -> Iterator[CountProgress | None]:
    """Yield a callback to show the progress of the body on stderr, as `stages` does."""
    with _shown(quiet, models) as tell:
        if tell is not None:
            tell(title, 0, None)  # visible from the start, before the total is known
        yield None if tell is None else partial(tell, title)


def progress_bar(title: str = "") -> AbstractContextManager[CountProgress | None]:
    """Return a context manager with a bar on stderr for `progress` arguments.

    Args:
        title: the text before the bar.

    Returns:
        A context manager that yields the function, or None if stderr is not a terminal.

    Example:
        >>> import amp_rewrite
        >>> with amp_rewrite.progress_bar("calibrating") as bar:
        ...     ranges = amp_rewrite.calibrate("model.onnx", "batches.npz", progress=bar)
    """
    return progress(title, quiet=False)


@contextmanager
def stages(title: str, *models: Path, quiet: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """Yield a callback to show the stages of the body on stderr; None if they are not shown.

    A terminal shows a bar for each stage, and removes it at the end. Elsewhere, if one of the models is large, each
    stage prints a line at its start and then at least every two seconds.
    """
    with _shown(quiet, models) as tell:
        yield None if tell is None else lambda stage, done, total: tell(f"{title}: {stage}", done, total)


Tell = Callable[[str, int, int | None], None]


def _shown(quiet: bool, models: Sequence[Path]) -> AbstractContextManager[Tell | None]:
    from amp_rewrite.files.store import is_large  # late: most output is too short for it

    if not quiet and sys.stderr.isatty():
        return _bars()
    return _lines() if not quiet and any(map(is_large, models)) else nullcontext()


@contextmanager
def _lines() -> Iterator[Tell]:
    lines, ended = Lines(), threading.Event()

    def watch() -> None:
        while not ended.wait(_SILENCE / 8):
            lines.beat()

    watcher = threading.Thread(target=watch, daemon=True)
    with suppress(RuntimeError):  # a platform without threads
        watcher.start()
    try:
        yield lines.tell
    finally:
        ended.set()
        if watcher.ident is not None:
            watcher.join()


class Lines:
    """The lines of stages on stderr: one at the start of each stage, and more during a long stage."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._printed = set[tuple[str, int]]()
        self._clock = clock
        self._line = ""
        self._started = self._last_printed = 0.0

    def tell(self, title: str, done: int, total: int | None) -> None:
        """Print the line of a stage, or of a part of it, unless it has already been printed."""
        counted = total is not None and 1 < total <= _MAX_COUNTED
        part = title, done if counted else 0
        if part not in self._printed:
            self._printed.add(part)
            self._line = f"{title}{f' {done}/{total}' if counted and done else ''} …"
            self._started = self._last_printed = self._clock()
            talk(self._line, quiet=False)

    def beat(self) -> None:
        """Repeat the last line after some time, with the seconds since it was first printed."""
        now = self._clock()
        if self._line and now - self._last_printed >= _SILENCE:
            self._last_printed = now
            talk(f"{self._line} {now - self._started:.0f} s", quiet=False)


_SILENCE = 1.6
"""Seconds after which a line is repeated, so there is one at least every two seconds."""

_MAX_COUNTED = 1000
"""Maximum number of parts with a line each, such as batches or trials; byte counts are larger."""


@contextmanager
def _bars() -> Iterator[Tell]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress, TaskID

    tasks: dict[str, TaskID] = {}
    console = Console(stderr=True, no_color=not colored(sys.stderr), width=columns(sys.stderr), height=24)
    with Progress(console=console, transient=True) as bars:

        def tell(title: str, done: int, total: int | None) -> None:
            if title not in tasks:
                tasks[title] = bars.add_task(escape(plain(title)), total=None)
            bars.update(tasks[title], completed=done, total=total if done else None)  # pulses until there is progress

        yield tell


def _write(text: str, stream: TextIO) -> None:
    lines, width, color = text.rstrip("\n").split("\n"), columns(stream), colored(stream)
    if width is not None and not text.startswith(_VERBATIM):
        lines = [part for line in lines for part in _fit(line, width)]
    click.echo("\n".join(map(_paint, lines) if color else lines), stream, color=color)


_VERBATIM = ("{", "[", "|", "::", "next: ", "on CUDA: ")
"""Prefixes of lines with JSON, Markdown, annotations and commands; they are not wrapped, because people copy them."""


def _fit(line: str, width: int) -> list[str]:
    return [line] if len(line) <= width or line.startswith(_VERBATIM) else wrap(line, width, hanging=2)


def _paint(line: str) -> str:
    for expression, style in _STYLES.items():
        if found := re.search(expression, line):
            line = line[: found.start()] + click.style(found[0], **style) + line[found.end() :]
    return line
