"""`amp-rewrite calibrate`: the ranges of a model's values on data, and of earlier runs."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from amp_rewrite.cli import parameters, terminal
from amp_rewrite.cli.data import DataOptions
from amp_rewrite.cli.files import beside, check_report, write_report
from amp_rewrite.errors import option_of
from amp_rewrite.settings.option import DATA, OUTPUT, PRECISION

if TYPE_CHECKING:
    from amp_rewrite.dtypes import DType
    from amp_rewrite.evidence.data.feed import Feed
    from amp_rewrite.evidence.ranges import Ranges
    from amp_rewrite.files.model import Model

_SHOWN = 20  # rows, beside a file with all
_STDOUT = Path("-")

_RUNNING = (
    parameters.option("--to", "float16|bfloat16|POLICY", "Type that values must fit.  [default: float16]", PRECISION),
    parameters.option("--chunk", "N", "Values to measure in one session.  [default: 2000]", type=int),
    parameters.option("--threads", "N", "Threads for one op on a CPU.  [default: one per core]", type=int),
)
_EARLIER = parameters.option(
    "--ranges earlier",
    "FILE",
    "Merge ranges of an earlier run; repeatable. Without data: show them.",
    DATA,
    multiple=True,
    type=parameters.FILE,
)


@parameters.command(
    parameters.model,
    *_RUNNING,
    *parameters.FEEDING,
    *parameters.FEEDBACK,
    _EARLIER,
    parameters.output("MODEL-stem.ranges.json", "file"),
    parameters.report_file,
    parameters.flag("--overwrite", "Replace an existing output.", OUTPUT),
    parameters.quiet("errors, and ranges that go to stdout"),
    parameters.config,
    parameters.keys(*parameters.FEEDING_KEYS),
)
def calibrate(
    model: Path,
    earlier: tuple[Path, ...],
    to: str | None,
    config: Path | None,
    output: Path | None,
    report_file: Path | None,
    **given: Any,
) -> None:
    """Run MODEL on data and write the ranges of its values.

    The file holds the largest and smallest magnitude of each value, and the number of elements that do not fit the
    type. With --ranges and without data, print the ranges of earlier runs as one, and write them only with -o.
    """
    settings = parameters.in_force({"to": to, "config": config})
    quiet, overwrite = given.pop("quiet"), given.pop("overwrite")
    feeding = DataOptions.taken(given)
    measuring = bool(feeding) or not earlier
    if measuring:
        feeding = feeding.completed(settings).needed()
        output = output or beside(model, "ranges.json")
    else:
        _check_unmeasured({"to": to, "feedback": feeding.feedback or None, "steps": feeding.steps, **given})
    from amp_rewrite.files.model import Model

    _check_writable(output, overwrite)
    check_report(report_file, overwrite=overwrite, read=(model, *earlier))
    with terminal.progress(model.name, quiet=quiet) as progress:
        loaded = Model.load(model)
        shards = _shards(earlier, loaded, settings.to if measuring else None)
        if measuring:
            given |= {"to": settings.to, "progress": progress}
            known = dict(zip(earlier, shards, strict=True))
            shards.insert(0, _measured(loaded, feeding.feed(loaded, quiet=quiet), known, given))
    ranges = reduce(lambda merged, shard: merged.merge(shard), shards)
    _write(ranges, output, overwrite, quiet)
    write_report(ranges, report_file, quiet=quiet)


def _check_unmeasured(given: dict[str, Any]) -> None:
    for word, value in given.items():
        if value is not None:
            raise click.UsageError(f"{option_of(word)} describes a measurement; add --data FILE, or --random")


def _shards(files: tuple[Path, ...], model: Model, to: DType | None) -> list[Ranges]:
    """Return earlier ranges. EvidenceError for another model, the same ranges twice, or another type than `to`."""
    from amp_rewrite.errors import EvidenceError
    from amp_rewrite.evidence.ranges import Ranges

    shards: list[Ranges] = []
    for file in files:
        shard = Ranges.load(file)
        try:
            shard.check(model)
        except EvidenceError as error:
            raise EvidenceError(f"{file}: {error}") from error
        if to is not None and shard.to != to.spelling:
            raise EvidenceError(f"{file} holds ranges for {shard.to}; add --to {shard.to}, or leave the file out")
        if shard in shards:
            twice = f"{files[shards.index(shard)]} and {file} hold the same ranges, which would count twice"
            raise EvidenceError(f"{twice}; name each file once")
        shards.append(shard)
    return shards


def _measured(model: Model, feed: Feed, earlier: dict[Path, Ranges], given: dict[str, Any]) -> Ranges:
    from amp_rewrite.errors import EvidenceError
    from amp_rewrite.evidence.calibrate import calibrate

    measured = calibrate(model, feed, **given)
    for file, shard in earlier.items():
        if shard == measured:
            fact = f"{file} holds what these data give, which would count twice"
            raise EvidenceError(f"{fact}; leave out --ranges {file}")
    return measured


def _check_writable(output: Path | None, overwrite: bool) -> None:
    from amp_rewrite.evidence.ranges import check_writable

    if output not in (None, _STDOUT):
        check_writable(output, overwrite)


def _write(ranges: Ranges, output: Path | None, overwrite: bool, quiet: bool) -> None:
    if output == _STDOUT:
        terminal.show(ranges.to_json())
        return
    if output is not None:
        ranges.save(output, overwrite=overwrite)
    if not quiet:
        terminal.show(ranges.text(top=_SHOWN if output else None))
    if output is not None:
        terminal.talk(f"wrote {output}", quiet=quiet)
