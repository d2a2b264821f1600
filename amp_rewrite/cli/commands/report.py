"""`amp-rewrite report`: the inventory of a model, or a report as text."""

from __future__ import annotations

from pathlib import Path

import click

from amp_rewrite.cli import options, reports, terminal


@click.command(cls=options.Command)
@options.take(options.model, options.as_json, options.verbose)
def report(model: Path, as_json: bool, verbose: bool) -> None:
    """Print the inventory of MODEL: ops, types, casts and bytes.

    MODEL may be a report, too.
    """
    terminal.show(reports.printed(reports.report_in(model), as_json=as_json, verbose=verbose))
