"""`amp-rewrite ranges`: merge and show files of ranges."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from amp_rewrite.cli import parameters, terminal
from amp_rewrite.settings.options import OUTPUT

if TYPE_CHECKING:
    from amp_rewrite.evidence.ranges import Ranges

_SHOWN = 20  # rows
_STDOUT = (None, Path("-"))

WRITING = (
    parameters.flag("--overwrite", "Replace an existing output.", OUTPUT),
    parameters.quiet("errors, and ranges that go to stdout"),
)
"""Options of a command that writes ranges, besides the file."""

_TOP = parameters.option("--top", "N", "Show the N largest.  [default: all]", type=click.IntRange(min=1))


@click.group(cls=parameters.Group, no_args_is_help=False)
def ranges() -> None:
    """Merge and show files that `amp-rewrite calibrate` wrote."""


@parameters.command(
    click.argument("files", nargs=-1, required=True, type=parameters.FILE),
    parameters.file_output("-"),
    *WRITING,
    group=ranges,
)
def merge(files: tuple[Path, ...], output: Path | None, overwrite: bool, quiet: bool) -> None:
    """Make one of several FILES, as if all data had been one run's."""
    from amp_rewrite.errors import EvidenceError
    from amp_rewrite.evidence.ranges import Ranges

    if len(files) == 1:
        raise click.UsageError("one file is merged with nothing; name two or more")
    check_writable(output, overwrite)
    shards: dict[str, Path] = {}
    merged: Ranges | None = None
    for file in files:
        shard = Ranges.load(file)
        known = shards.setdefault(shard.to_json(), file)
        if known is not file:
            raise EvidenceError(
                f"{known} and {file} hold the same ranges, which would count twice; name each shard once"
            )
        merged = shard if merged is None else merged.merge(shard)
    assert merged is not None  # click asks for a file
    write(merged, output, overwrite, quiet)


@parameters.command(click.argument("file", type=parameters.FILE), _TOP, group=ranges)
def show(file: Path, top: int | None) -> None:
    """Print the ranges in FILE as a table, the largest first."""
    from amp_rewrite.evidence.ranges import Ranges

    terminal.show(Ranges.load(file).text(top=top))


def check_writable(output: Path | None, overwrite: bool) -> None:
    """Raise EvidenceError, before the work, if ranges cannot be written to a file; None and "-" are stdout."""
    from amp_rewrite.evidence.ranges import check_writable

    if output not in _STDOUT:
        check_writable(output, overwrite)


def write(ranges: Ranges, output: Path | None, overwrite: bool, quiet: bool) -> None:
    """Write ranges to a file and print a summary; for stdout, print them as JSON."""
    if output in _STDOUT:
        terminal.show(ranges.to_json())
        return
    ranges.save(output, overwrite=overwrite)
    if not quiet:
        terminal.show(ranges.text(top=_SHOWN))
    terminal.talk(f"wrote {output}", quiet=quiet)
