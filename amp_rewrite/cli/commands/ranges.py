"""`amp-rewrite ranges`: merge and show files of ranges."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from amp_rewrite.cli import parameters, terminal
from amp_rewrite.cli.examples import Group
from amp_rewrite.cli.page import check_page, is_page, present, write_page
from amp_rewrite.settings.option import OUTPUT

if TYPE_CHECKING:
    from amp_rewrite.evidence.ranges import Ranges

_SHOWN = 20  # rows
_STDOUT = (None, Path("-"))

WRITING = (
    parameters.html,
    parameters.flag("--overwrite", "Replace an existing output.", OUTPUT),
    parameters.quiet("errors, and ranges that go to stdout"),
)
"""Options of a command that writes ranges, besides the file."""

_TOP = parameters.option("--top", "N", "Show the N largest.  [default: all]", type=click.IntRange(min=1))


@click.group(cls=Group, no_args_is_help=False)
def ranges() -> None:
    """Merge and show files that `amp-rewrite calibrate` wrote."""


@parameters.command(
    click.argument("files", nargs=-1, required=True, type=parameters.FILE),
    parameters.output("-", "file"),
    *WRITING,
    group=ranges,
)
def merge(files: tuple[Path, ...], output: Path | None, html: Path | None, overwrite: bool, quiet: bool) -> None:
    """Merge FILES into one, as if one run had read all the data."""
    from amp_rewrite.errors import EvidenceError
    from amp_rewrite.evidence.ranges import Ranges

    if len(files) == 1:
        raise click.UsageError("one file is merged with nothing; name two or more")
    check_writable(output, overwrite)
    check_page(html, overwrite=overwrite, read=files)
    shards: dict[str, Path] = {}
    merged: Ranges | None = None
    for file in files:
        shard = Ranges.load(file)
        known = shards.setdefault(shard.to_json(), file)
        if known is not file:
            twice = f"{known} and {file} hold the same ranges, which would count twice"
            raise EvidenceError(f"{twice}; name each shard once")
        merged = shard if merged is None else merged.merge(shard)
    assert merged is not None  # click asks for a file
    write(merged, output, overwrite, quiet)
    write_page(merged, html, quiet=quiet)


@parameters.command(click.argument("file", type=parameters.FILE), _TOP, *parameters.PAGE, group=ranges)
def show(file: Path, top: int | None, html: Path | None, overwrite: bool) -> None:
    """Print the ranges in FILE as a table, the largest first."""
    from amp_rewrite.evidence.ranges import Ranges

    check_page(html, overwrite=overwrite, read=(file,))
    loaded = Ranges.load(file)
    present(loaded, loaded.text(top=top), html, as_json=False)


def check_writable(output: Path | None, overwrite: bool) -> None:
    """Raise EvidenceError, before the work, if ranges cannot be written to a file; None and "-" are stdout."""
    from amp_rewrite.evidence.ranges import check_writable

    if is_page(output):
        check_page(output, overwrite=overwrite)
    elif output not in _STDOUT:
        check_writable(output, overwrite)


def write(ranges: Ranges, output: Path | None, overwrite: bool, quiet: bool) -> None:
    """Write ranges to a file, as a page if its suffix says so, and print a summary; for stdout, print them as JSON."""
    if output in _STDOUT:
        terminal.show(ranges.to_json())
        return
    page = is_page(output)
    if not page:
        ranges.save(output, overwrite=overwrite)
    if not quiet:
        terminal.show(ranges.text(top=_SHOWN))
    if page:
        write_page(ranges, output, quiet=quiet)
    else:
        terminal.talk(f"wrote {output}", quiet=quiet)
