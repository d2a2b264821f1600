"""`amp-rewrite report`: the inventory of a model, or a report as text; what is expected of it."""

from __future__ import annotations

from pathlib import Path

from amp_rewrite.cli import parameters, terminal
from amp_rewrite.cli.group import FINDING


@parameters.command(
    parameters.model,
    parameters.option(
        "--expect",
        "TEXT",
        "Exit with 1 unless this holds: 'float16 >= 95%', 'casts <= 4', 'io = float32', 'weights <= 40 MB',"
        " 'ops[Softmax] = float32'; repeatable.",
        multiple=True,
    ),
    parameters.as_json,
    parameters.verbose,
)
def report(model: Path, expect: tuple[str, ...], as_json: bool, verbose: bool) -> int:
    """Print the inventory of MODEL: ops, types, casts and bytes.

    MODEL may be a report, too. With --expect, print the numbers beside each expectation; exit with 1 if one fails.
    """
    from amp_rewrite.reports.expect import Expectation
    from amp_rewrite.reports.render import table
    from amp_rewrite.reports.sources import report_in

    expectations = [Expectation.parse(text) for text in expect]
    report = report_in(model)
    outcomes = [expectation.outcome(report) for expectation in expectations]
    terminal.show(report.to_json() if as_json else report.text(verbose=verbose))
    failed = [outcome for outcome in outcomes if not outcome.met]
    if outcomes and not as_json:
        rows = [("failed" if outcome in failed else "met", outcome.expected, outcome.fact) for outcome in outcomes]
        terminal.show("\n".join(["", "expected", *table(rows)]))
    for outcome in failed if as_json else ():
        terminal.talk(f"failed: {outcome}", quiet=False)
    return FINDING if failed else 0
