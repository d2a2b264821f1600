"""`amp-rewrite locate`: the ops at which two models part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from amp_rewrite.cli import parameters, terminal
from amp_rewrite.cli.data import Feeding


@parameters.command(
    *parameters.PAIR,
    *parameters.FEEDING,
    parameters.config,
    parameters.option("--top", "N", "How many ops to show.  [default: 10]", type=click.IntRange(min=1)),
    parameters.as_json,
    parameters.quiet(),
)
def locate(a: Path, b: Path, top: int | None, as_json: bool, quiet: bool, **given: Any) -> None:
    """Print where B departs from A, and which ops add most to that.

    First the op where the error jumps, then those whose own share of it is largest.
    """
    feeding = Feeding.taken(given).completed(parameters.in_force({"config": given.pop("config")})).needed()
    from amp_rewrite.evidence.locate import locate

    located = feeding.compared(locate, a, b, quiet=quiet)
    if as_json or not quiet:
        terminal.show(located.to_json(top=top) if as_json else located.text(top=top or 10))
