"""`amp-rewrite locate`: the ops at which two models part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from amp_rewrite.cli import parameters
from amp_rewrite.cli.data import DataOptions
from amp_rewrite.cli.page import check_report, present


@parameters.command(
    *parameters.PAIR,
    *parameters.FEEDING,
    *parameters.FEEDBACK,
    parameters.config,
    parameters.keys(*parameters.FEEDING_KEYS),
    parameters.option("--top", "N", "The number of ops to show.  [default: 10]", type=click.IntRange(min=1)),
    parameters.option("--tolerance", "X", "Also name the first op whose error is larger.", type=float),
    parameters.as_json,
    parameters.quiet(),
    *parameters.REPORT,
)
def locate(
    a: Path, b: Path, top: int | None, as_json: bool, quiet: bool, report_file: Path | None, **given: Any
) -> None:
    """Print where values of B depart from A, and the ops that add most.

    First comes the op where the error jumps, then the ops with the largest local errors.
    """
    feeding = DataOptions.taken(given).completed(parameters.in_force({"config": given.pop("config")})).needed()
    check_report(report_file, overwrite=given.pop("overwrite"), read=(a, b))
    from amp_rewrite.evidence.locate import locate

    located = feeding.compared(locate, a, b, quiet=quiet, **given)
    shown = {} if top is None else {"top": top}
    text = located.to_json(**shown) if as_json else located.text(**shown)
    present(located, text, report_file, as_json=as_json, quiet=quiet)
