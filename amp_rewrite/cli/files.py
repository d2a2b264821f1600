"""Files of commands: models from stdin and to stdout, outputs with their folders, reports and pages."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from amp_rewrite.cli import terminal
from amp_rewrite.errors import ModelError, ReportError
from amp_rewrite.fleet.stores import local, url_of

if TYPE_CHECKING:
    from amp_rewrite.reports.result import Result

FILE = click.Path(path_type=Path)
_DASH = Path("-")
_STDIN, _STDOUT = "stdin", "stdout"
_FOLDERS = f"{__name__}.folders"


class _Models(click.Path):
    """The path of a model; "-" stands for a temporary copy of stdin."""

    def convert(self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = self.named(value, param, ctx)
        return path if path != _DASH or ctx is None or ctx.resilient_parsing else _from_stdin(ctx)

    def named(self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path of a word. Only "-" as it was typed becomes the path "-"; "./-" is a file of that name."""
        if not os.fspath(value):
            raise click.UsageError("the name of the file is empty; name a file", ctx)
        path = Path(local(str(super().convert(value, param, ctx))))
        return path.absolute() if path == _DASH and os.fspath(value) != str(_DASH) else path

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        return [CompletionItem("*.onnx", type="glob")]


class _Outputs(_Models):
    """The path of a file to write, with its folders; "-" is a model for stdout.

    `folders`: the word may be that of a folder, too; `as_folder` tells.
    """

    def __init__(self, *, streamed: bool, folders: bool = False) -> None:
        super().__init__(path_type=Path)
        self.streamed, self.folders = streamed, folders

    def convert(self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = self.named(value, param, ctx)
        if ctx is None or ctx.resilient_parsing:
            return path
        if url_of(path):
            ctx.meta.setdefault(_FOLDERS, {})[path] = os.fspath(value)
            return path
        slashed = os.fspath(value).endswith(("/", os.sep))
        if slashed and not self.folders:
            raise click.UsageError(f"{os.fspath(value)} is a folder; name a file in it", ctx)
        if slashed or (self.folders and path.is_dir()):
            ctx.meta.setdefault(_FOLDERS, {})[path] = os.fspath(value)
            return path
        if path != _DASH:
            ctx.find_root().with_resource(_in_made_folders(path))
        elif self.streamed:
            return ctx.find_root().with_resource(_to_stdout(ctx))
        return path


MODEL = _Models(path_type=Path)
MODEL_OUT = _Outputs(streamed=True)
MODELS_OUT = _Outputs(streamed=True, folders=True)
FILE_OUT = _Outputs(streamed=False)


def is_stdout(path: Path | None) -> bool:
    """True if a model written to `path` goes to stdout."""
    return path is not None and terminal.ALIASES.get(str(path)) == _STDOUT


def as_folder(path: Path | None) -> str:
    """Return the typed word of a folder in place of a file; empty for other words."""
    return str(click.get_current_context().meta.get(_FOLDERS, {}).get(path, ""))


def beside(model: Path, suffix: str, *, needed: bool = True) -> Path:
    """Return the path for an output named after a model. UsageError for a model from stdin, if `needed`."""
    if needed and terminal.ALIASES.get(str(model)) == _STDIN:
        raise click.UsageError("a model from stdin leaves the output without a name; add -o FILE, or -o - for stdout")
    return model.parent / f"{model.stem}.{suffix}"


def _from_stdin(ctx: click.Context) -> Path:
    if _STDIN in terminal.ALIASES.values():
        raise click.UsageError("only one model can come from stdin; name a file for the other", ctx)
    if sys.stdin is None or sys.stdin.isatty():
        what = "closed" if sys.stdin is None else "a terminal"
        raise click.UsageError(f"- reads a model from stdin, which is {what}; pipe a model in, or name a file", ctx)
    from amp_rewrite.files.targets import data_files  # late: most models come from files

    stream = sys.stdin.buffer
    try:
        folder = ctx.find_root().with_resource(_temporary())
        first = stream.read(1)
        path = folder / ("stdin.json" if first == b"{" else "stdin.onnx")  # reports are known by their suffix
        terminal.ALIASES[str(path)] = _STDIN
        with path.open("wb") as file:
            file.write(first)
            shutil.copyfileobj(stream, file, 1 << 20)
        if data_files(path):
            raise ModelError("a model on stdin cannot have external data; name the file instead")
    except OSError as error:
        raise ModelError(f"cannot copy a model from stdin to {tempfile.gettempdir()}: {error.strerror}") from error
    return path


@contextmanager
def _to_stdout(ctx: click.Context) -> Iterator[Path]:
    """Yield a path for a model. What is printed goes to stderr, and the model to stdout if the body succeeds."""
    stream = sys.stdout.buffer
    if stream.isatty():
        raise click.UsageError("- writes a model to stdout, which is a terminal; redirect it, or name a file", ctx)
    with _temporary() as folder:
        path = folder / "stdout.onnx"
        terminal.ALIASES[str(path)] = _STDOUT
        with redirect_stdout(sys.stderr):
            yield path
        if any(other != path for other in folder.iterdir()):
            raise ModelError("the weights need a file of their own, which stdout cannot hold; name a file with -o")
        if path.exists():
            with path.open("rb") as file:
                shutil.copyfileobj(file, stream, 1 << 20)
            stream.flush()


@contextmanager
def _temporary() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-") as folder:
        yield Path(folder)


@contextmanager
def _in_made_folders(path: Path) -> Iterator[None]:
    from amp_rewrite.files.disk import make_folder  # late: most commands make no folder

    missing = [folder for folder in path.parents if not folder.exists()]
    try:
        make_folder(path)
        yield
    finally:
        _remove(missing)


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # it holds something, is spelled with "..", or was never made
            folder.rmdir()


# -- reports and pages ---------------------------------------------------------------------------------------


SUFFIXES = (".html", ".htm")


def is_page(file: Path | None) -> bool:
    return file is not None and file.suffix.lower() in SUFFIXES


def check_report(file: Path | None, *, overwrite: bool, read: Iterable[Path] = ()) -> None:
    """Raise ReportError, before the work, if a report cannot be written. `read`: files to keep."""
    if file is None or _streams(file):
        return
    if not (file.suffix == ".json" or is_page(file)) or file.is_dir():
        advice = "reports are known by their suffix; name a .json or .html file"
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
    """Write a text to a file, whole or not at all, or to a pipe or device. ReportError with the fate on failure."""
    from amp_rewrite.files.disk import write_whole  # late: few runs write one

    text = terminal.spoken(text)
    try:
        if _streams(file):
            file.write_text(text, encoding="utf-8", newline="\n")
        else:
            write_whole(Path(os.path.realpath(file)), text.encode())
    except OSError as error:
        raise ReportError(f"cannot write {file}: {error.strerror or error}; {fate}") from error


def _streams(file: Path) -> bool:
    return file.exists() and not file.is_file() and not file.is_dir()
