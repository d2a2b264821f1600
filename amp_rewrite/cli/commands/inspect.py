"""`amp-rewrite report` and `doctor`: a model, a report and this machine as they are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from amp_rewrite.cli import parameters, terminal
from amp_rewrite.cli.files import check_report, is_page, write_file
from amp_rewrite.cli.group import FINDING
from amp_rewrite.cli.parameters import option
from amp_rewrite.settings.choices import Target
from amp_rewrite.settings.policy import low_type

if TYPE_CHECKING:
    from amp_rewrite.deploy.checkup import Checkup

# -- report --------------------------------------------------------------------------------------------------


@parameters.command(
    parameters.model,
    option(
        "--expect",
        "TEXT",
        "Exit with 1 unless this holds: 'compute >= 95%', 'casts <= 4', 'io = float32', 'weights <= 40 MB',"
        " 'ops[Softmax] = float32'; repeatable.",
        multiple=True,
    ),
    parameters.as_json,
    parameters.verbose,
    option("-o --output", "FILE", "Also write the report: .json or .html.", type=parameters.FILE_OUT),
    parameters.flag("--overwrite", "Replace an existing output."),
)
def report(
    model: Path,
    expect: tuple[str, ...],
    as_json: bool,
    verbose: bool,
    output: Path | None,
    overwrite: bool,
) -> int:
    """Print the inventory of MODEL: ops, types, casts and bytes.

    MODEL can also be a JSON report. With --expect, print the numbers beside each expectation; exit with 1 if one fails.
    A page, as with -o page.html, draws the graph.
    """
    check_report(output, overwrite=overwrite, read=(model,))
    from amp_rewrite.reports.expect import Expectation
    from amp_rewrite.reports.page.page import Page
    from amp_rewrite.reports.page.report_figures import report_figures
    from amp_rewrite.reports.render import table
    from amp_rewrite.reports.sources import report_and_view

    expectations = [Expectation.parse(text) for text in expect]
    report, view = report_and_view(model)
    outcomes = [expectation.outcome(report) for expectation in expectations]
    words = report.to_json() if as_json else report.text(verbose=verbose, command="")  # a next step is a conversion's
    terminal.show(words)
    if output is not None:
        drawn = is_page(output)
        text = Page(report.brief, report_figures(report, view)).to_html() if drawn else report.to_json()
        write_file(output, text, "nothing was changed")
        terminal.talk(f"wrote {output}", quiet=False)
    failed = [outcome for outcome in outcomes if not outcome.met]
    if outcomes and not as_json:
        rows = [("failed" if outcome in failed else "met", outcome.expected, outcome.fact) for outcome in outcomes]
        terminal.show("\n".join(["", "expected", *table(rows)]))
    for outcome in failed if as_json else ():
        terminal.talk(f"failed: {outcome}", quiet=False)
    return FINDING if failed else 0


# -- doctor --------------------------------------------------------------------------------------------------


_ASKED = (
    click.argument("model", type=parameters.MODEL, required=False),
    option("--to", "float16|bfloat16|POLICY", "The low type.  [default: that of a half MODEL, else float16]"),
    option("--target", "webgpu", "Check the WebGPU provider instead of CUDA."),
    parameters.flag("--open opens", "Only open MODEL, in a process of its own, and report the outcome."),
)


@parameters.command(*_ASKED, parameters.as_json)
def doctor(
    model: Path | None,
    to: str | None,
    target: str | None,
    opens: bool,
    as_json: bool,
) -> int:
    """Find obstacles to fast half precision, here or in MODEL.

    Check GPU, driver, libraries and onnxruntime; exit with 1 if half precision cannot be fast. For a MODEL, list the
    ops that would run on the CPU, the dimensions that do not suit tensor cores, and the options of a session; if it is
    half already, also the ops that a conversion keeps in float32. Values are not checked: `verify` compares them. On a
    machine without a GPU, MODEL alone decides the exit code.
    """
    if opens and model is None:
        raise click.UsageError("--open only opens a model; name one")
    from amp_rewrite.deploy.doctor import opening

    checkup = opening(model) if opens and model else _checked(model, to, target)
    terminal.show(checkup.to_json() if as_json else checkup.text())
    return 0 if checkup.well else FINDING


def _checked(model: Path | None, to: str | None, target: str | None) -> Checkup:
    from amp_rewrite.deploy.doctor import doctor

    device = None if target is None else Target.parse(target)
    return doctor(model, to=low_type(to) if to else None, target=device)
