"""`amp-rewrite bounds`: what is proved about the values of a model, from its weights."""

from __future__ import annotations

from pathlib import Path

import click

from amp_rewrite.cli import parameters
from amp_rewrite.cli.page import check_page, present
from amp_rewrite.cli.parameters import option
from amp_rewrite.settings.option import DATA, PRECISION


@parameters.command(
    parameters.model,
    click.argument("names", metavar="[NAME]...", nargs=-1),
    option("--input", "NAME=-1,1", "The range of an input.  [default: unknown]", DATA, multiple=True, default=()),
    option("--to", "float16|bfloat16|POLICY", "Type that values must fit.  [default: float16]", PRECISION),
    option("--ranges", "FILE", "Ranges that calibrate wrote.", DATA, type=parameters.FILE),
    parameters.config,
    parameters.as_json,
    parameters.verbose,
    *parameters.PAGE,
)
def bounds(
    model: Path,
    names: tuple[str, ...],
    input: tuple[str, ...],
    to: str | None,
    ranges: Path | None,
    config: Path | None,
    as_json: bool,
    verbose: bool,
    html: Path | None,
    overwrite: bool,
) -> None:
    """Print the values of MODEL that provably fit a low type, or overflow it.

    For a NAME (a value, an op or a type of ops), print the chain of the proof. The model does not run: bounds follow
    from its weights, and from the ranges of inputs if you give them.
    """
    settings = parameters.in_force({"to": to, "config": config})
    check_page(html, overwrite=overwrite, read=(model,) if ranges is None else (model, ranges))
    from amp_rewrite.evidence.bounds import bounds

    proofs = bounds(model, dict(map(_range, input)), to=settings.to, ranges=ranges)
    present(proofs, proofs.to_json() if as_json else proofs.text(*names, verbose=verbose), html, as_json=as_json)


def _range(text: str) -> tuple[str, tuple[float, float]]:
    """Return the name and both ends of "NAME=-1,1"."""
    name, equals, ends = text.rpartition("=")
    try:
        lo, hi = (float(end) for end in ends.split(","))
    except ValueError as cause:
        raise click.UsageError(f"--input {text!r} is not a range; write it as NAME=-1,1") from cause
    if not equals:
        raise click.UsageError(f"--input {text!r} names no input; write it as NAME=-1,1")
    return name, (lo, hi)
