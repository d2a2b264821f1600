"""The commands. Each parses, makes one library call, prints, and gives back its exit code."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from amp_rewrite.cli import options, terminal
from amp_rewrite.cli.door import FOUND, Door
from amp_rewrite.cli.measuring import MEASURING, Measuring
from amp_rewrite.errors import ReportError
from amp_rewrite.ir.gc_paused import gc_paused
from amp_rewrite.settings.policy import low_type
from amp_rewrite.version import VERSION

if TYPE_CHECKING:
    from amp_rewrite.pipeline.convert import Converted
    from amp_rewrite.pipeline.repair import Repaired
    from amp_rewrite.reports.report import Report
    from amp_rewrite.settings.config_file import Settings


@click.group(cls=Door, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(VERSION, prog_name="amp-rewrite", message="%(prog)s %(version)s")
def door() -> None:
    """Convert float32 ONNX models to float16 or bfloat16 where that is safe, and say why.

    `amp-rewrite MODEL` is `amp-rewrite convert MODEL`.
    """


@door.command()
@options.take(options.model, options.output, *options.CONVERSION, *MEASURING, *options.WRITING, *options.TALKING)
@gc_paused(last=True)
def convert(
    model: Path,
    output: Path | None,
    dry_run: bool,
    report_file: Path | None,
    check_weights: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **given: Any,
) -> int:
    """Convert MODEL and print what was done and why.

    The result is for GPUs: on a CPU half precision is slower, and onnxruntime computes most of it in float32.

    A PATTERN chooses ops: a glob on the node name, or terms such as op=MatMul,feeds=Softmax or
    scope=encoder/* or name~=REGEX.
    """
    measuring = Measuring.taken(given)
    asked = bool(given["overwrite"])
    if check_weights and as_json:
        raise click.UsageError("--check-weights prints a table, and --json asks for JSON alone; leave one out")
    settings = options.in_force(given)
    measuring = measuring.completed(settings)
    output = output or model.parent / f"{model.stem}.{low_type(settings.to).spelling}.onnx"
    if report_file:
        _check_report_file(report_file, model, output)
    if not dry_run:
        lost = f"what its weights have beyond {settings.to}"
        options.check_target(output, model, settings, asked=asked, lost=lost)  # before the work, not after it
    left = [] if dry_run else _foreign_data(output)
    with terminal.stages(model.name, quiet=quiet) as tell:
        converted, repaired = measuring.converted(model, _wanted(settings), tell)
        solved = repaired is None or repaired.solved
        if solved and not dry_run:
            progress = None if tell is None else lambda done, total: tell("write", done, total)
            save = converted.result.save
            save(output, overwrite=settings.overwrite, external_data=settings.external_data, progress=progress)
    if report_file and solved:
        _write_report(report_file, converted.report.to_json(), None if dry_run else output)
    _say(converted, repaired, check_weights, as_json=as_json, verbose=verbose, quiet=quiet, asked=as_json or dry_run)
    if converted.plan.empty and solved:
        terminal.talk(f"nothing to lower: {model.name} stays as it is", quiet=quiet)
    if not dry_run:
        terminal.talk(f"wrote {output}" if solved else f"not written: {output}", quiet=quiet)
    for file in left if solved else ():
        terminal.talk(
            f"{file} held the data of the old {output.name}: remove it if no other model reads it", quiet=quiet
        )
    return 0 if solved else FOUND


@door.command()
@options.take(options.model, options.as_json, options.verbose)
def report(model: Path, as_json: bool, verbose: bool) -> None:
    """Print what MODEL is made of: ops, types, casts and bytes.

    MODEL may be a report, too.
    """
    terminal.show(_printed(_told(model), as_json=as_json, verbose=verbose))


@door.command()
@options.take(options.model, click.argument("node"), *options.CONVERSION, *MEASURING)
def explain(model: Path, node: str, **given: Any) -> None:
    """Print why NODE gets its type, back to the op that decides.

    MODEL may be a report, too. NODE is an op, or a value of the model, for the op that makes it. With the options of
    `convert`, those for data among them, it says what `convert` would do.
    """
    from amp_rewrite.reports.explain import explain, makers

    measuring = Measuring.taken(given)
    settings = options.in_force(given)
    if _is_report(model):
        terminal.show(explain(_told(model), node))
        return
    with terminal.stages(model.name, quiet=False) as tell:
        converted, _ = measuring.completed(settings).converted(model, _wanted(settings), tell)
    terminal.show(explain(converted.report, node, makers(converted.view)))


@door.command()
@options.take(
    click.argument("a", type=options.FILE),
    click.argument("b", type=options.FILE),
    options.fail_on,
    options.form,
    options.config,
)
def diff(a: Path, b: Path, form: str, **given: Any) -> int:
    """Print how B differs from A; exit with 1 if it does. Both are models or JSON reports."""
    from amp_rewrite.reports.diff import diff

    settings = options.in_force(given)
    delta = diff(_told(a), _told(b))
    failed = delta.fails(settings.fail_on)
    terminal.show(delta.to(form, settings.fail_on))
    return FOUND if failed else 0


@door.command()
@options.take(click.argument("ops", metavar="[OP]...", nargs=-1), *options.LISTING, options.as_json)
def lists(ops: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """Print which list each OP is on, who says so and why.

    Without OP, all lists.
    """
    from amp_rewrite.cli import listing
    from amp_rewrite.settings.choices import Level
    from amp_rewrite.settings.op_lists import environment_edits, load_lists

    settings = options.in_force(given)
    found = load_lists(low_type(settings.to), settings.lists, environment_edits(os.environ))
    found = found.at_level(Level.parse(settings.level))
    entries = [entry for op in ops for entry in listing.entries_of(found, op)] if ops else list(found)
    form = listing.as_json if as_json else listing.as_text if ops else listing.by_color
    terminal.show(form(entries))


def _check_report_file(file: Path, model: Path, output: Path) -> None:
    """Nothing, where a report may be written; ReportError, saying what is in the way, elsewhere."""
    if file.exists() and not file.is_file() and not file.is_dir():
        return  # a pipe or a device
    if not file.parent.is_dir():
        raise ReportError(f"cannot write {file}: the folder {file.parent} does not exist; make it first")
    if file.suffix != ".json" or file.is_dir():
        raise ReportError(f"cannot write a report to {file}: reports are known by their suffix; name a .json file")
    if file.resolve() in (model.resolve(), output.resolve()):
        raise ReportError(f"cannot write a report to {file}: it would replace the model; name another file")


def _write_report(file: Path, text: str, written: Path | None) -> None:
    """A report in a file, whole or not at all; down a pipe or a device as it comes. `written`: the model, if it is."""
    from amp_rewrite.files.scratch import write_whole

    if file.exists() and not file.is_file():
        file.write_text(text, encoding="utf-8", newline="\n")
        return
    try:
        write_whole(Path(os.path.realpath(file)), text.encode())
    except OSError as error:
        fate = "nothing was changed" if written is None else f"{written} is written, the report is not"
        raise ReportError(f"cannot write {file}: {error.strerror or error}; {fate}") from error


def _foreign_data(output: Path) -> list[Path]:
    """The data files of the model that is replaced, as far as they stay."""
    from amp_rewrite.files.store import foreign_data

    return foreign_data(output)


def _say(
    converted: Converted,
    repaired: Repaired | None,
    check_weights: bool,
    *,
    as_json: bool,
    verbose: bool,
    quiet: bool,
    asked: bool,
) -> None:
    """The report, what weights lose, what a repair pinned: on stdout, where JSON however stands alone."""
    if asked or not quiet:
        terminal.show(_printed(converted.report, as_json=as_json, verbose=verbose))
    if as_json:
        terminal.warn(converted.report.findings, quiet=quiet)
    if check_weights:
        terminal.show(f"\n{_weights(converted, verbose=verbose)}")
    if repaired is not None and as_json:
        for line in repaired.text().splitlines():
            terminal.talk(line, quiet=quiet)
    elif repaired is not None and not quiet:
        terminal.show(f"\n{repaired.text()}")


def _weights(converted: Converted, *, verbose: bool) -> str:
    """What the weights lose that the conversion stores in the low type."""
    from amp_rewrite.evidence.weights import check_weights, weights_text

    low = converted.plan.to
    found = check_weights(converted.view, low, values={bake.value for bake in converted.plan.bakes})
    return weights_text(found, low.spelling, limit=None if verbose else _SHOWN_WEIGHTS)


_SHOWN_WEIGHTS = 20


def _wanted(settings: Settings) -> dict[str, Any]:
    """The arguments of `convert` that settings state."""
    from amp_rewrite.settings.options import DEFAULTS

    return {option: getattr(settings, option) for option in DEFAULTS}


def _is_report(file: Path) -> bool:
    """Whether a file is a report by its name, or a pipe, as in `diff <(git show main:report.json) report.json`."""
    return file.suffix == ".json" or file.is_fifo()


def _content(file: Path) -> bytes:
    """The bytes of a report, or as many as show that it is none."""
    from amp_rewrite.reports.report import MAX_CHARACTERS

    with file.open("rb") as stream:
        status = os.fstat(stream.fileno())
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISFIFO(status.st_mode)):
            raise ReportError(f"cannot read {file}: it is no regular file; name a model or a JSON report")
        if status.st_size > MAX_CHARACTERS:
            raise ReportError(f"{file}: larger than {MAX_CHARACTERS >> 20} MiB, so not a report of this tool")
        return stream.read(MAX_CHARACTERS + 1)


def _told(file: Path) -> Report:
    """The report in a file, or the inventory of a model."""
    if _is_report(file):
        from amp_rewrite.reports.report import Report

        try:
            return Report.from_json(_content(file), str(file))
        except OSError as error:
            raise ReportError(f"cannot read {file}: {error.strerror}; name a model or a JSON report") from error
    from amp_rewrite.files.model import Model
    from amp_rewrite.ir.view import View
    from amp_rewrite.reports.inventory import report_of

    return report_of(View.of(Model.load(file)), name=file.name, tool=VERSION)


def _printed(report: Report, *, as_json: bool, verbose: bool) -> str:
    return report.to_json() if as_json else report.text(verbose=verbose)
