"""Reports and pages: where commands may write one, and the file."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from amp_rewrite.cli import terminal
from amp_rewrite.errors import ReportError

if TYPE_CHECKING:
    from amp_rewrite.reports.result import Result

SUFFIXES = (".html", ".htm")


def is_page(file: Path | None) -> bool:
    """True if the suffix of a file says that it is a page."""
    return file is not None and file.suffix.lower() in SUFFIXES


def check_report(file: Path | None, *, overwrite: bool, read: Iterable[Path] = ()) -> None:
    """Raise ReportError, before the work, if a report cannot be written. `read`: files that it must not replace."""
    if file is None or _streams(file):
        return
    if not (file.suffix == ".json" or is_page(file)) or file.is_dir():
        advice = "reports are known by their suffix; name a .json or .html file"
        raise ReportError(f"cannot write a report to {file}: {advice}")
    from amp_rewrite.files.scratch import check_place  # late: few runs write one

    check_place(file, ReportError)
    if os.path.realpath(file) in map(os.path.realpath, read):  # behind links; those in a circle are another file
        raise ReportError(f"cannot write a report to {file}: it would replace what is read; name another file")
    if file.exists() and not overwrite:
        raise ReportError(f"{file} exists; name another report, or replace it with --overwrite")


def present(
    result: Result, text: str, file: Path | None, *, as_json: bool, quiet: bool = False, commands: bool = False
) -> None:
    """Print a text, and write the report of a result if a file is named.

    `as_json`: the text is JSON, and printed also with `quiet`; `commands`: as `terminal.show` takes it.
    """
    if as_json or not quiet:
        terminal.show(text, commands=commands)
    write_report(result, file, quiet=quiet)


def write_report(result: Result, file: Path | None, *, quiet: bool) -> None:
    """Write a result to a file, as a page if its suffix says so, and say so."""
    if file is not None:
        write_file(file, result.to_html() if is_page(file) else result.to_json(), "nothing was changed")
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
