"""`amp-rewrite report`: the inventory of a model, or a report as text; what is expected of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from amp_rewrite.cli import parameters, terminal
from amp_rewrite.cli.group import FINDING
from amp_rewrite.cli.page import check_report, is_page, write_file
from amp_rewrite.cli.parameters import option
from amp_rewrite.settings.option import OUTPUT

if TYPE_CHECKING:
    from amp_rewrite.ir.view import View
    from amp_rewrite.reports.page.page import Page
    from amp_rewrite.reports.report import Report

_VIEWER = (
    parameters.form("text", "json", "model-explorer", says="model-explorer: node data for that viewer, one layer."),
    parameters.choice("--layer", ("type", "rule", "error"), "The layer for Model Explorer.  [default: type]", OUTPUT),
    option("--reasons", "FILE", "The report of MODEL's conversion, for --layer rule.", OUTPUT, type=parameters.FILE),
    option(
        "--errors",
        "FILE",
        "The output of `locate --json`, for --layer error and for a page.",
        OUTPUT,
        type=parameters.FILE,
    ),
)


@parameters.command(
    parameters.model,
    option(
        "--expect",
        "TEXT",
        "Exit with 1 unless this holds: 'float16 >= 95%', 'casts <= 4', 'io = float32', 'weights <= 40 MB',"
        " 'ops[Softmax] = float32'; repeatable.",
        multiple=True,
    ),
    parameters.as_json,
    *_VIEWER,
    parameters.verbose,
    option("-o --output", "FILE", "Also write it, as a .json file or an .html page.", OUTPUT, type=parameters.FILE_OUT),
    parameters.flag("--overwrite", "Replace an existing output.", OUTPUT),
)
def report(
    model: Path,
    expect: tuple[str, ...],
    as_json: bool,
    verbose: bool,
    output: Path | None,
    overwrite: bool,
    **viewer: Any,
) -> int:
    """Print the inventory of MODEL: ops, types, casts and bytes.

    MODEL may also be a report. With --expect, print the numbers beside each expectation; exit with 1 if one fails. A
    page, as with -o page.html, draws the graph.
    """
    form = viewer.pop("form")
    if form == "model-explorer":
        if as_json or expect or output:
            words = "leave out --json, --output and --expect"
            raise click.UsageError(f"--format model-explorer prints node data alone; {words}")
        terminal.show(_overlay(model, **viewer))
        return 0
    errors = viewer.pop("errors") if is_page(output) else None
    if unused := next((name for name, value in viewer.items() if value), None):
        raise click.UsageError(f"--{unused} is about --format model-explorer; leave it out, or add that")
    as_json = as_json or form == "json"
    check_report(output, overwrite=overwrite, read=(model,))
    from amp_rewrite.reports.expect import Expectation
    from amp_rewrite.reports.render import table
    from amp_rewrite.reports.sources import report_and_view

    expectations = [Expectation.parse(text) for text in expect]
    report, view = report_and_view(model)
    outcomes = [expectation.outcome(report) for expectation in expectations]
    words = report.to_json() if as_json else report.text(verbose=verbose, command="")  # a next step is a conversion's
    terminal.show(words)
    if output is not None:
        text = _page(report, view, errors).to_html() if is_page(output) else report.to_json()
        write_file(output, text, "nothing was changed")
        terminal.talk(f"wrote {output}", quiet=False)
    failed = [outcome for outcome in outcomes if not outcome.met]
    if outcomes and not as_json:
        rows = [("failed" if outcome in failed else "met", outcome.expected, outcome.fact) for outcome in outcomes]
        terminal.show("\n".join(["", "expected", *table(rows)]))
    for outcome in failed if as_json else ():
        terminal.talk(f"failed: {outcome}", quiet=False)
    return FINDING if failed else 0


def _overlay(model: Path, layer: str | None, reasons: Path | None, errors: Path | None) -> str:
    """Return a layer for Model Explorer of a model, or of a report alone."""
    from amp_rewrite.files.model import Model
    from amp_rewrite.reports.located_errors import LocatedErrors
    from amp_rewrite.reports.model_explorer import overlay, overlay_of_report
    from amp_rewrite.reports.sources import is_report, report_in

    layer = layer or ("error" if errors else "rule" if reasons else "type")
    located = LocatedErrors.load(errors) if errors else None
    if is_report(model):
        return overlay_of_report(report_in(model), layer, errors=located)
    return overlay(Model.load(model), layer, report=report_in(reasons) if reasons else None, errors=located)


def _page(report: Report, view: View | None, errors: Path | None) -> Page:
    """Return the page of a report, with the facts of its model and the errors that locate measured."""
    from amp_rewrite.reports.located_errors import LocatedErrors
    from amp_rewrite.reports.page.page import Page
    from amp_rewrite.reports.page.report_figures import report_figures

    shares = LocatedErrors.load(errors).shares(report.rows, report.model.name) if errors else None
    return Page(report.brief, report_figures(report, view, shares))
