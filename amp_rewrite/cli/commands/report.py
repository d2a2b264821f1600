"""`amp-rewrite report`: the inventory of a model, or a report as text."""

from __future__ import annotations

from pathlib import Path

from amp_rewrite.cli import parameters, reports, terminal


@parameters.command(parameters.model, parameters.as_json, parameters.verbose)
def report(model: Path, as_json: bool, verbose: bool) -> None:
    """Print the inventory of MODEL: ops, types, casts and bytes.

    MODEL may be a report, too.
    """
    report = reports.report_in(model)
    terminal.show(report.to_json() if as_json else report.text(verbose=verbose))
