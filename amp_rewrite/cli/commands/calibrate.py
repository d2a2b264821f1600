"""`amp-rewrite calibrate`: the ranges of a model's values on data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from amp_rewrite.cli import parameters, terminal
from amp_rewrite.cli.commands.ranges import WRITING, check_writable, write
from amp_rewrite.cli.data import DataOptions
from amp_rewrite.cli.files import beside
from amp_rewrite.cli.page import check_page, write_page
from amp_rewrite.settings.option import PRECISION

_RUNNING = (
    parameters.option("--to", "float16|bfloat16|POLICY", "Type that values must fit.  [default: float16]", PRECISION),
    parameters.option("--chunk", "N", "Values to measure in one session.  [default: 2000]", type=int),
    parameters.option("--threads", "N", "Threads for one op on a CPU.  [default: one per core]", type=int),
)


@parameters.command(
    parameters.model,
    *_RUNNING,
    *parameters.FEEDING,
    parameters.output("MODEL-stem.ranges.json", "file"),
    *WRITING,
    parameters.config,
)
def calibrate(
    model: Path, to: str | None, config: Path | None, output: Path | None, html: Path | None, **given: Any
) -> None:
    """Run MODEL on data and write the ranges of its values.

    The file holds the largest and smallest magnitude of each value, and the number of elements that do not fit the
    type.
    """
    settings = parameters.in_force({"to": to, "config": config})
    quiet, overwrite = given.pop("quiet"), given.pop("overwrite")
    feeding = DataOptions.taken(given).completed(settings).needed()
    from amp_rewrite.evidence.calibrate import calibrate
    from amp_rewrite.files.model import Model

    output = output or beside(model, "ranges.json")
    check_writable(output, overwrite)
    check_page(html, overwrite=overwrite, read=(model,))
    with terminal.progress(model.name, quiet=quiet) as progress:
        loaded = Model.load(model)
        given |= {"to": settings.to, "progress": progress}
        ranges = calibrate(loaded, feeding.feed(loaded, quiet=quiet), **given)
    write(ranges, output, overwrite, quiet)
    write_page(ranges, html, quiet=quiet)
