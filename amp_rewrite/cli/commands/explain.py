"""`amp-rewrite explain`: the chain of reasons behind the types of ops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from amp_rewrite.cli import parameters, terminal
from amp_rewrite.cli.data import MeasuringOptions


@parameters.command(
    parameters.model,
    click.argument("names", metavar="NODE...", nargs=-1, required=True),
    *parameters.CONVERSION,
    *parameters.MEASURING,
    parameters.as_json,
)
def explain(model: Path, names: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """Print why NODE gets its type, back to the op that decides.

    MODEL may also be a report. NODE is an op, a type of ops (Softmax) or a pattern (op=Softmax); an input of the model
    stands for the ops that read it, another value for the op that computes it. Options of `convert`, including those
    for data, explain what `convert` would do with them.
    """
    from amp_rewrite.reports.sources import is_report, report_in

    measuring = MeasuringOptions.taken(given)
    settings = parameters.in_force(given)
    if is_report(model):
        from amp_rewrite.reports.explain import explained

        explanation = explained(report_in(model), names)
    else:
        from amp_rewrite.pipeline.explain import explain

        with terminal.stages(model.name, quiet=False) as tell:
            converted, _ = measuring.completed(settings).converted(model, parameters.keywords(settings), tell)
        explanation = explain(converted, *names)
    terminal.show(explanation.to_json() if as_json else explanation.text())
