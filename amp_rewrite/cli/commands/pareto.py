"""`amp-rewrite pareto`: predicted time against error of the outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from amp_rewrite.cli import parameters, terminal
from amp_rewrite.cli.data import Feeding
from amp_rewrite.cli.page import check_page, write_page


@parameters.command(
    parameters.model,
    *parameters.FEEDING,
    *parameters.CONVERSION,
    parameters.option("--points", "N", "How many points to verify.  [default: 8]", type=click.IntRange(min=1)),
    parameters.as_json,
    parameters.quiet(),
    *parameters.PAGE,
)
def pareto(
    model: Path, points: int | None, as_json: bool, quiet: bool, html: Path | None, overwrite: bool, **given: Any
) -> None:
    """Print the curve of predicted time against error, from the conversion to float32.

    Each point is a choice of low ops that no other one beats in both; its error is predicted, and measured by
    emulation.
    """
    feeding = Feeding.taken(given)
    settings = parameters.in_force(given)
    feeding = feeding.completed(settings).needed()
    check_page(html, overwrite=overwrite, read=(model,))
    from amp_rewrite.files.model import Model
    from amp_rewrite.pipeline.pareto import POINTS, pareto

    source = Model.load(model)
    feed = feeding.feed(source, quiet=quiet)
    words = parameters.keywords(settings)
    curve = pareto(source, feed, points=points or POINTS, allow_nonfinite=feeding.allow_nonfinite, **words)
    if as_json or not quiet:
        terminal.show(curve.to_json() if as_json else curve.text())
    write_page(curve, html, quiet=quiet)
