"""Files of commands: models, outputs with their folders, reports and pages."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from amp_rewrite.cli import terminal
from amp_rewrite.errors import ReportError
from amp_rewrite.files.disk import url_of

if TYPE_CHECKING:
    from amp_rewrite.reports.result import Result

FILE = click.Path(path_type=Path)


class _Models(click.Path):
    """The path of a file; `made`: its folders are made while the command runs."""

    def __init__(self, *, made: bool = False) -> None:
        super().__init__(path_type=Path)
        self.made = made

    def convert(self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = file_named(os.fspath(value), ctx, written=self.made)
        if self.made and ctx is not None and not ctx.resilient_parsing and not url_of(path):
            ctx.find_root().with_resource(made_folders(path))
        return path

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        return [CompletionItem(incomplete, type="file")]


def file_named(word: str, ctx: click.Context | None = None, *, written: bool = False) -> Path:
    """Return the path of a word. UsageError if it names no file, or, where that is written, a folder."""
    if word in ("", "-"):
        fact = (
            "the name of the file is empty"
            if not word
            else "- is not a file: models cannot be read from or written to a pipe"
        )
        raise click.UsageError(f"{fact}; name a file", ctx)
    if written and word.endswith(("/", os.sep)):
        raise click.UsageError(f"{word} is a folder; name a file in it", ctx)
    return Path(word)


MODEL = _Models()
FILE_OUT = _Models(made=True)


def is_folder(word: str) -> bool:
    """True if a typed word is that of a folder, or of a store."""
    return word.endswith(("/", os.sep)) or bool(url_of(word)) or Path(word).is_dir()


def beside(model: Path, suffix: str) -> Path:
    """Return the path for an output named after a model."""
    return model.parent / f"{model.stem}.{suffix}"


@contextmanager
def made_folders(path: Path) -> Iterator[None]:
    """Make the folders of a file, and remove those that the body leaves empty."""
    from amp_rewrite.files.disk import make_folder  # late: most commands make no folder

    missing = [folder for folder in path.parents if not folder.exists()]
    try:
        make_folder(path)
        yield
    finally:
        for folder in missing:
            with suppress(OSError):  # it holds something, is spelled with "..", or was never made
                folder.rmdir()


# -- reports and pages ---------------------------------------------------------------------------------------


SUFFIXES = (".html", ".htm")


def is_page(file: Path | None) -> bool:
    return file is not None and file.suffix.lower() in SUFFIXES


def check_report(file: Path | None, *, overwrite: bool, read: Iterable[Path] = ()) -> None:
    """Raise ReportError, before the work, if a report cannot be written. `read`: files to keep."""
    if file is None:
        return
    if not (file.suffix == ".json" or is_page(file)) or file.is_dir():
        advice = "the suffix tells the format; name a .json or .html file"
        raise ReportError(f"cannot write a report to {file}: {advice}")
    from amp_rewrite.files.disk import check_place  # late: few runs write one

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
    """Write a text to a file, whole or not at all. ReportError with the fate on failure."""
    from amp_rewrite.files.disk import write_whole  # late: few runs write one

    try:
        write_whole(Path(os.path.realpath(file)), text.encode())
    except OSError as error:
        raise ReportError(f"cannot write {file}: {error.strerror or error}; {fate}") from error
