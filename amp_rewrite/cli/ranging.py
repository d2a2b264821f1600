"""The commands that measure what a model's values hold, and that merge and show what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from amp_rewrite.cli import options, terminal
from amp_rewrite.cli.feeding import FEEDING, Feeding

if TYPE_CHECKING:
    from amp_rewrite.evidence.ranges import Ranges

_SHOWN = 20  # rows

_OUTPUT = (
    click.option("-o", "--output", type=options.FILE, metavar="FILE", help="Where they go.  [default: stdout]"),
    click.option("--overwrite", is_flag=True, help="Replace an output that is there already."),
    click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors, and ranges that go to stdout."),
)
_TOP = click.option("--top", type=click.IntRange(min=1), metavar="N", help="Show the N largest.  [default: all]")
_RUNNING = (
    click.option("--to", metavar="float16|bfloat16|POLICY", help="The type that it may fit.  [default: float16]"),
    click.option("--chunk", type=int, metavar="N", help="Values that are measured in one session.  [default: 2000]"),
    click.option("--threads", type=int, metavar="N", help="Threads for one op on a CPU.  [default: one per core]"),
)


@click.command()
@options.take(options.model, *_RUNNING, *FEEDING, *_OUTPUT, options.config)
def calibrate(
    model: Path,
    to: str | None,
    config: Path | None,
    chunk: int | None,
    threads: int | None,
    output: Path | None,
    overwrite: bool,
    quiet: bool,
    **given: Any,
) -> None:
    """Run MODEL on data and write the ranges of its values.

    Of each value the largest and the smallest magnitude, and how many numbers would not fit the type.
    """
    settings = options.in_force({"to": to, "config": config})
    feeding = Feeding.taken(given).completed(settings).needed()
    from amp_rewrite.evidence.calibrate import calibrate
    from amp_rewrite.evidence.ranges import check_writable
    from amp_rewrite.files.model import Model

    if output:
        check_writable(output, overwrite)  # before the work, not after it
    with terminal.progress(model.name, quiet=quiet) as progress:
        loaded = Model.load(model)
        found = calibrate(
            loaded,
            feeding.feed(loaded),
            to=settings.to,
            allow_nonfinite=feeding.allow_nonfinite,
            chunk=chunk,
            threads=threads,
            progress=progress,
        )
    _give(found, output, overwrite, quiet)


@click.group(no_args_is_help=False)
def ranges() -> None:
    """Merge and show files that `amp-rewrite calibrate` wrote."""


@ranges.command()
@options.take(click.argument("files", nargs=-1, required=True, type=options.FILE), *_OUTPUT)
def merge(files: tuple[Path, ...], output: Path | None, overwrite: bool, quiet: bool) -> None:
    """Make one of several FILES, as if all data had been one run's."""
    from amp_rewrite.errors import EvidenceError
    from amp_rewrite.evidence.ranges import Ranges, check_writable

    if len(files) == 1:
        raise click.UsageError("one file is merged with nothing; name two or more")
    if output:
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
    _give(merged, output, overwrite, quiet)


@ranges.command()
@options.take(click.argument("file", type=options.FILE), _TOP)
def show(file: Path, top: int | None) -> None:
    """Print the ranges in FILE as a table, the largest first."""
    from amp_rewrite.evidence.ranges import Ranges

    terminal.show(Ranges.load(file).text(top=top))


def _give(found: Ranges, output: Path | None, overwrite: bool, quiet: bool) -> None:
    """Into a file, and a summary for who is watching; or as JSON on stdout."""
    if output is None:
        terminal.show(found.to_json())
        return
    found.save(output, overwrite=overwrite)
    if not quiet:
        terminal.show(found.text(top=_SHOWN))
    terminal.talk(f"wrote {output}", quiet=quiet)
