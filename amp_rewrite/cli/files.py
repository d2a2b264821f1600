"""The files of commands: models, outputs with their folders, reports and pages, and input data."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from amp_rewrite.cli import terminal
from amp_rewrite.errors import ReportError, as_option
from amp_rewrite.files.disk import check_output_path, make_parent_folder, url_of, write_whole
from amp_rewrite.settings.option import Progress
from amp_rewrite.settings.request import CRITERION

if TYPE_CHECKING:
    from amp_rewrite.evidence.data.feed import Feed
    from amp_rewrite.files.model import Model
    from amp_rewrite.pipeline.conversion import Converted
    from amp_rewrite.pipeline.repair import Repaired
    from amp_rewrite.reports.result import Result
    from amp_rewrite.settings.request import Request

FILE = click.Path(path_type=Path)


class _FilePath(click.Path):
    """The path of a file. `output`: create its folders while the command runs."""

    def __init__(self, *, output: bool = False) -> None:
        super().__init__(path_type=Path)
        self.output = output

    def convert(self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = file_path(os.fspath(value), ctx, output=self.output)
        if self.output and ctx is not None and not ctx.resilient_parsing and not url_of(path):
            ctx.find_root().with_resource(parent_folders(path))
        return path


def file_path(word: str, ctx: click.Context | None = None, *, output: bool = False) -> Path:
    """Return an argument as a path; UsageError for an empty one, for "-", and for a folder as the output."""
    if not word:
        raise click.UsageError("the file name is empty; name a file", ctx)
    if word == "-":
        raise click.UsageError("- is not a file: models cannot be read from or written to a pipe; name a file", ctx)
    if output and word.endswith(("/", os.sep)):
        raise click.UsageError(f"{word} is a folder; name a file in it", ctx)
    return Path(word)


MODEL = _FilePath()
FILE_OUT = _FilePath(output=True)


def is_folder(word: str) -> bool:
    """True if an argument names a folder or a URL."""
    return word.endswith(("/", os.sep)) or bool(url_of(word)) or Path(word).is_dir()


def path_beside(model: Path, suffix: str) -> Path:
    """Return the path of an output in a model's folder, with the model's name and this suffix."""
    return model.parent / f"{model.stem}.{suffix}"


@contextmanager
def parent_folders(path: Path) -> Iterator[None]:
    """Create the parent folders of a file; afterwards, remove the new ones if they are empty."""
    missing = [folder for folder in path.parents if not folder.exists()]
    try:
        make_parent_folder(path)
        yield
    finally:
        for folder in missing:
            with suppress(OSError):  # not empty, spelled with "..", or never created
                folder.rmdir()


# -- reports and pages ---------------------------------------------------------------------------------------


SUFFIXES = (".html", ".htm")


def is_page(file: Path | None) -> bool:
    return file is not None and file.suffix.lower() in SUFFIXES


def check_report(file: Path | None, *, overwrite: bool, inputs: Iterable[Path] = ()) -> None:
    """Raise ReportError if a report cannot be written, for example because it would replace one of the `inputs`."""
    if file is None:
        return
    if not (file.suffix == ".json" or is_page(file)) or file.is_dir():
        advice = "the suffix determines the format; name a .json or .html file"
        raise ReportError(f"cannot write a report to {file}: {advice}")
    check_output_path(file, ReportError)
    if os.path.realpath(file) in map(os.path.realpath, inputs):  # even through links
        raise ReportError(f"cannot write a report to {file}: it would replace an input file; name another file")
    if file.exists() and not overwrite:
        raise ReportError(f"{file} already exists; name another report, or use --overwrite")


def present(
    result: Result, text: str, file: Path | None, *, as_json: bool, quiet: bool = False, commands: bool = False
) -> None:
    """Print text, and if there is a file, write the report of a result to it.

    `as_json`: the text is JSON, which `quiet` does not suppress. `commands`: see `terminal.show`.
    """
    if as_json or not quiet:
        terminal.show(text, commands=commands)
    write_report(result, file, quiet=quiet)


def write_report(result: Result, file: Path | None, *, quiet: bool) -> None:
    """Write a result to a file as a page or as JSON, depending on the suffix, and print a remark."""
    if file is not None:
        write_file(file, result.to_html() if is_page(file) else result.to_json(), "nothing was changed")
        terminal.talk(f"wrote {file}", quiet=quiet)


def write_file(file: Path, text: str, outcome: str) -> None:
    """Write text to a file atomically; ReportError on failure. `outcome`: the state after a failure, as a clause."""
    try:
        write_whole(Path(os.path.realpath(file)), text.encode())
    except OSError as error:
        raise ReportError(f"cannot write {file}: {error.strerror or error}; {outcome}") from error


# -- data -------------------------------------------------------------------------------------------------------


R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Batches:
    """The input batches for the models of a command: data, or random numbers."""

    settings: Request
    shapes: tuple[str, ...]
    random: bool

    @classmethod
    def of(cls, settings: Request, options: dict[str, Any], *, feedback: bool = True) -> Batches:
        """Extract the options for batches from all options; UsageError for missing or conflicting ones.

        `feedback`: False for a command that cannot feed outputs back.
        """
        random, shapes = options.pop("random"), options.pop("shape")
        if shapes and not random:
            raise click.UsageError("--shape describes random input; add --random")
        if not (random or settings.data):
            raise click.UsageError("no input data; add --data FILE, or --random")
        return cls(settings if feedback else replace(settings, feedback=(), steps=None), shapes, random)

    def feed(self, model: Model, *, quiet: bool) -> Feed:
        """Return the batches for a model, and print their notes unless `quiet`; FeedError as in `Feed.of`."""
        from amp_rewrite.evidence.data.feed import Feed
        from amp_rewrite.pipeline.convert import feed_of

        settings, feed = self.settings, None if self.random else feed_of(self.settings, model)
        if feed is None:
            keywords = _random_keywords(settings, self.shapes)
            return Feed.randomly(model, **keywords, feedback=settings.feedback, steps=settings.steps)
        for note in feed.notes:
            terminal.talk(note, quiet=quiet)
        return feed

    def compare(self, function: Callable[..., R], a: Path, b: Path, *, quiet: bool, **keywords: Any) -> R:
        """Run `verify` or `locate` for two models on the batches, with a progress bar."""
        from amp_rewrite.files.model import Model

        reference = Model.load(a)
        feed = self.feed(reference, quiet=True)  # the result contains its notes
        with terminal.progress(function.__name__, a, b, quiet=quiet) as progress:
            return function(reference, Model.load(b), feed, progress=progress, **keywords)


def _random_keywords(settings: Request, shapes: Collection[str]) -> dict[str, Any]:
    from amp_rewrite.evidence.data.sources import parse_int_ranges, parse_shapes

    return {"shapes": parse_shapes(shapes), "int_ranges": parse_int_ranges(settings.int_range)}


def guided_request(settings: Request, shapes: Collection[str], explicit: Collection[str]) -> Request:
    """Return the request for a conversion, without unused data and criteria.

    A criterion in a settings file applies only if there is data. If the file names both ranges and data, a repair uses
    the data, and a plain conversion uses the ranges. UsageError for command-line options (`explicit`) that conflict or
    need missing data.
    """
    ranges, data = settings.ranges, settings.data
    judged = data and settings.criterion
    unusable = {"budget": not judged, "headroom": not (data or ranges)}
    for word in explicit:
        if unusable.get(word, not data and word in (*CRITERION, "feedback", "steps")):
            raise click.UsageError(f"{as_option(word)} needs input data; add --data FILE (and --tolerance X to repair)")
    if data and shapes:
        raise click.UsageError("--shape describes random input; leave out either --shape or the data")
    if ranges and data:
        if not judged and {"data", "ranges"} <= {*explicit}:
            ways = "leave one out, or add --tolerance X to repair"
            raise click.UsageError(f"--ranges and --data both give ranges; {ways}")
        data, ranges = (data, None) if judged else (None, ranges)
    unused: dict[str, Any] = {} if judged else dict.fromkeys((*CRITERION, "budget"))
    random = _random_keywords(settings, shapes) if settings.check else None
    return replace(settings, data=data, ranges=ranges, drawn=random, **unused)


def convert_guided(
    model: Path, request: Request, tell: Progress | None, *, quiet: bool
) -> tuple[Converted, Repaired | None]:
    """Convert a model according to a request; if there is data, measure the model or repair the result."""
    from amp_rewrite.files.model import Model
    from amp_rewrite.pipeline.convert import convert_by, feed_of

    source = Model.load(model) if request.data else None
    feed = None if source is None else feed_of(request, source)
    for note in feed.notes if feed is not None and not request.criterion else ():  # a verdict also contains them
        terminal.talk(note, quiet=quiet)
    return convert_by(request, source or model, feed, tell)
