"""`amp-rewrite explain`: the chain of reasons behind the type of one op."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from amp_rewrite.cli import parameters, reports, terminal
from amp_rewrite.cli.data import Measuring


@parameters.command(parameters.model, click.argument("node"), *parameters.CONVERSION, *parameters.MEASURING)
def explain(model: Path, node: str, **given: Any) -> None:
    """Print why NODE gets its type, back to the op that decides.

    MODEL may be a report, too. NODE is an op, or a value of the model, for the op that makes it. With the options of
    `convert`, those for data among them, it says what `convert` would do.
    """
    from amp_rewrite.reports.explain import explain, makers

    measuring = Measuring.taken(given)
    settings = parameters.in_force(given)
    if reports.is_report(model):
        terminal.show(explain(reports.report_in(model), node))
        return
    with terminal.stages(model.name, quiet=False) as tell:
        converted, _ = measuring.completed(settings).converted(model, parameters.keywords(settings), tell)
    terminal.show(explain(converted.report, node, makers(converted.view)))
