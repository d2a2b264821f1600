"""Reports and pages: where commands may write one, and the file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from amp_rewrite.cli import terminal
from amp_rewrite.errors import ReportError

if TYPE_CHECKING:
    from amp_rewrite.reports.result import Result

SUFFIXES = (".html", ".htm")


class Shown(Protocol):
    """A result, or its page."""

    def to_html(self) -> str:
        """Return it as one HTML text."""


def is_page(file: Path | None) -> bool:
    """True if the suffix of a file says that it is a page."""
    return file is not None and file.suffix.lower() in SUFFIXES


class FileKind(NamedTuple):
    """The kind of an output file: noun, test of its name, advice, and words for what it must not replace."""

    noun: str
    fits: Callable[[Path], bool]
    advice: str
    loses: str


PAGE = FileKind("page", is_page, "browsers know pages by their suffix; name an .html file", "what is read")
REPORT = FileKind(
    "report",
    lambda file: file.suffix == ".json" or is_page(file),
    "reports are known by their suffix; name a .json or .html file",
    "the model",
)


def check_page(file: Path | None, *, overwrite: bool, read: Iterable[Path] = ()) -> None:
    """Raise ReportError, before the work, if a page cannot be written to a file. `read`: files that it must not be."""
    if file is not None:
        check_file(file, PAGE, overwrite=overwrite, read=read)


def check_file(file: Path, kind: FileKind, *, overwrite: bool, read: Iterable[Path]) -> None:
    """Raise ReportError, before the work, if a report or page cannot be written to a file, and say why."""
    if _streams(file):
        return
    if not kind.fits(file) or file.is_dir():
        raise ReportError(f"cannot write a {kind.noun} to {file}: {kind.advice}")
    from amp_rewrite.files.scratch import check_place  # late: few runs write one

    check_place(file, ReportError)
    if os.path.realpath(file) in map(os.path.realpath, read):  # behind links; those in a circle are another file
        raise ReportError(f"cannot write a {kind.noun} to {file}: it would replace {kind.loses}; name another file")
    if file.exists() and not overwrite:
        raise ReportError(f"{file} exists; name another {kind.noun}, or replace it with --overwrite")


def present(
    result: Result, text: str, html: Path | None, *, as_json: bool, quiet: bool = False, commands: bool = False
) -> None:
    """Print a text or the JSON of a result, and draw its page if a file is named; JSON then holds what is drawn.

    `quiet` silences the text; `commands`: as `terminal.show` takes it.
    """
    page = result.page() if html else None
    if as_json or not quiet:
        terminal.show(page.within(text) if as_json and page else text, commands=commands)
    write_page(page, html, quiet=quiet)


def write_page(shown: Shown | None, file: Path | None, *, quiet: bool, fate: str = "nothing was changed") -> None:
    """Write a page to a file and say so, if there is one. `fate`: words for the state of other outputs."""
    if file is not None and shown is not None:
        write_file(file, shown.to_html(), fate)
        terminal.talk(f"wrote {file}", quiet=quiet)


def write_file(file: Path, text: str, fate: str) -> None:
    """Write a text to a file, whole or not at all, or to a pipe or device. ReportError with the fate if that fails."""
    from amp_rewrite.files.scratch import write_whole  # late: few runs write one

    text = terminal.spoken(text)
    try:
        if _streams(file):
            file.write_text(text, encoding="utf-8", newline="\n")
        else:
            write_whole(Path(os.path.realpath(file)), text.encode())
    except OSError as error:
        raise ReportError(f"cannot write {file}: {error.strerror or error}; {fate}") from error


def _streams(file: Path) -> bool:
    """True for a pipe or a device."""
    return file.exists() and not file.is_file() and not file.is_dir()
