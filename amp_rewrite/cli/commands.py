"""The commands. Each parses, makes one library call, prints, and gives back its exit code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from amp_rewrite.cli import options, terminal
from amp_rewrite.cli.door import FOUND, Door
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ReportError
from amp_rewrite.version import VERSION

if TYPE_CHECKING:
    from amp_rewrite.config import Settings
    from amp_rewrite.convert import Converted
    from amp_rewrite.reports.report import Report


@click.group(cls=Door, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(VERSION, prog_name="amp-rewrite", message="%(prog)s %(version)s")
def door() -> None:
    """Convert float32 ONNX models to float16 or bfloat16 where that is safe, and say why.

    `amp-rewrite MODEL` is `amp-rewrite convert MODEL`.
    """


@door.command()
@options.take(options.model, options.output, *options.CONVERSION, *options.WRITING, *options.TALKING)
def convert(
    model: Path,
    output: Path | None,
    dry_run: bool,
    report_file: Path | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **given: Any,
) -> None:
    """Convert MODEL and print what was done and why.

    A PATTERN chooses ops: a glob on the node name, or terms such as op=MatMul,feeds=Softmax or
    scope=encoder/* or name~=REGEX.
    """
    settings = options.in_force(given)
    output = output or model.with_name(f"{model.stem}.{DType.parse(settings.to).spelling}.onnx")
    with terminal.progress(model.name, quiet=quiet) as progress:
        converted = _converted(model, settings)
        if not dry_run:
            save = converted.result.save
            save(output, overwrite=settings.overwrite, external_data=settings.external_data, progress=progress)
    if report_file:
        report_file.write_text(converted.report.to_json(), encoding="utf-8", newline="\n")
    if as_json or dry_run or not quiet:
        terminal.show(_printed(converted.report, as_json=as_json, verbose=verbose))
    if as_json:
        terminal.warn(converted.report.findings, quiet=quiet)
    if not dry_run:
        terminal.talk(f"wrote {output}", quiet=quiet)


@door.command()
@options.take(options.model, options.as_json, options.verbose)
def report(model: Path, as_json: bool, verbose: bool) -> None:
    """Print what MODEL is made of: ops, element types, casts and bytes. MODEL may be a report, too."""
    terminal.show(_printed(_told(model), as_json=as_json, verbose=verbose))


@door.command()
@options.take(options.model, click.argument("node"), *options.CONVERSION)
def explain(model: Path, node: str, **given: Any) -> None:
    """Print why NODE gets its type, back to the op that decides. MODEL may be a report, too."""
    from amp_rewrite.reports.explain import explain

    settings = options.in_force(given)
    told = _told(model) if _is_report(model) else _converted(model, settings).report
    terminal.show(explain(told, node))


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
    """Print which list each OP is on, who says so and why; without OP, all lists."""
    from amp_rewrite.cli import listing
    from amp_rewrite.lists import Level, environment_edits, load_lists

    settings = options.in_force(given)
    found = load_lists(DType.parse(settings.to), settings.lists, environment_edits(os.environ))
    found = found.at_level(Level.parse(settings.level))
    entries = [entry for op in ops for entry in listing.entries_of(found, op)] if ops else list(found)
    form = listing.as_json if as_json else listing.as_text if ops else listing.by_color
    terminal.show(form(entries))


def _converted(model: Path, settings: Settings) -> Converted:
    from amp_rewrite.convert import convert

    return convert(
        model,
        to=settings.to,
        lists=settings.lists,
        level=settings.level,
        target=settings.target,
        safety=settings.safety,
        keep=settings.keep,
        lower=settings.lower,
        io=settings.io,
        gray_follows_allow=settings.gray_follows_allow,
    )


def _is_report(file: Path) -> bool:
    """Whether a file is a report by its name, or a pipe, as in `diff <(git show main:report.json) report.json`."""
    return file.suffix == ".json" or file.is_fifo()


def _told(file: Path) -> Report:
    """The report in a file, or the inventory of a model."""
    if _is_report(file):
        from amp_rewrite.reports.report import Report

        try:
            return Report.from_json(file.read_bytes(), str(file))
        except OSError as error:
            raise ReportError(f"cannot read {file}: {error.strerror}; name a model or a JSON report") from error
    from amp_rewrite.files.model import Model
    from amp_rewrite.reports.inventory import report_of
    from amp_rewrite.view import View

    return report_of(View.of(Model.load(file)), name=file.name, tool=VERSION)


def _printed(report: Report, *, as_json: bool, verbose: bool) -> str:
    return report.to_json() if as_json else report.text(verbose=verbose)
