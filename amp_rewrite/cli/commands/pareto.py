"""`amp-rewrite pareto`: predicted time against error of the outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from amp_rewrite.cli import parameters, terminal
from amp_rewrite.cli.data import DataOptions
from amp_rewrite.cli.files import MODEL_OUT
from amp_rewrite.cli.page import check_page, present
from amp_rewrite.cli.parameters import option
from amp_rewrite.settings.option import OUTPUT


@parameters.command(
    parameters.model,
    *parameters.FEEDING,
    *parameters.CONVERSION,
    option("--points", "N", "The number of points to verify.  [default: 8]", type=click.IntRange(min=1)),
    option("--point", "N", "The number of the point that -o writes.", type=click.IntRange(min=0)),
    option("-o --output", "OUT", "Write the model of --point here.", OUTPUT, type=MODEL_OUT),
    *parameters.SAVING,
    parameters.as_json,
    parameters.quiet(),
    parameters.html,
)
def pareto(
    model: Path,
    points: int | None,
    point: int | None,
    output: Path | None,
    overwrite: bool,
    external_data: bool | str | None,
    as_json: bool,
    quiet: bool,
    html: Path | None,
    **given: Any,
) -> None:
    """Print predicted time against error, from the conversion to float32.

    Each point is a choice of low ops; no other choice is both faster and more exact. Its error is predicted, and
    measured by emulation. `--point 2 -o OUT` writes the model of point 2.
    """
    if (point is None) != (output is None):
        raise click.UsageError("--point N and -o OUT go together: the point, and the file that its model is written to")
    feeding = DataOptions.taken(given)
    settings = parameters.in_force(given)
    feeding = feeding.completed(settings).needed()
    check_page(html, overwrite=overwrite, read=(model,))
    from amp_rewrite.files.model import Model
    from amp_rewrite.files.targets import check_target
    from amp_rewrite.pipeline.pareto import POINTS, pareto

    if output is not None:
        check_target(output, overwrite, read=model)  # before the work, not after it
    source = Model.load(model)
    feed = feeding.feed(source, quiet=quiet)
    words = parameters.keywords(settings)
    curve = pareto(source, feed, points=points or POINTS, allow_nonfinite=feeding.allow_nonfinite, **words)
    present(curve, curve.to_json() if as_json else curve.text(), html, as_json=as_json, quiet=quiet)
    if output is not None:
        assert point is not None
        curve.converted(point).save(output, overwrite=overwrite, external_data=external_data)
        terminal.talk(f"wrote {output}", quiet=quiet)
