"""The commands that compare two models on data: whether they agree, and where they part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from amp_rewrite.cli import options, terminal
from amp_rewrite.cli.door import FOUND
from amp_rewrite.cli.feeding import FEEDING, Feeding
from amp_rewrite.cli.measuring import CRITERION

_MODELS = (click.argument("a", type=options.FILE), click.argument("b", type=options.FILE))
_QUIET = click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors and what --json asks for.")
_VERBOSE = click.option("-v", "--verbose", is_flag=True, help="Print every batch.")
_RUNNING = (
    click.option("--only", multiple=True, metavar="OUTPUT", help="Compare this output alone; repeatable."),
    click.option("--equal-nan", is_flag=True, help="NaN on both sides is equal."),
    click.option(
        "--emulate/--no-emulate",
        default=None,
        help="Round as half precision does, in float32.  [default: where no CUDA provider opens]",
    ),
    click.option(
        "--provider", metavar="NAME", help="What must run both, as onnxruntime calls it.  [default: CUDA or CPU]"
    ),
)


@click.command()
@options.take(*_MODELS, *FEEDING, *CRITERION, *_RUNNING, options.config, options.as_json, _QUIET, _VERBOSE)
def verify(a: Path, b: Path, only: tuple[str, ...], as_json: bool, quiet: bool, verbose: bool, **given: Any) -> int:
    """Compare the outputs of B with those of A on the same data.

    It exits with 1 if they are not near enough. How near is up to you, there is no default: --rtol and --atol, or a
    --metric with its bound.
    """
    feeding = Feeding.taken(given).completed(options.in_force(_config(given))).needed()
    words = ("rtol", "atol", "metric", "at_least", "at_most")
    if all(given[word] is None for word in words):
        raise click.UsageError(
            "nothing says how near the outputs must be; add --rtol X and/or --atol X, or --metric NAME and its bound"
        )
    from amp_rewrite.evidence.verify import verify
    from amp_rewrite.files.model import Model

    reference = Model.load(a)
    feed = feeding.feed(reference)
    named = (str(a), str(b))
    with terminal.progress("verify", quiet=quiet) as progress:
        verdict = verify(
            reference,
            Model.load(b),
            feed,
            outputs=only,
            allow_nonfinite=feeding.allow_nonfinite,
            names=named,
            progress=progress,
            **given,
        )
    if as_json or not quiet:
        terminal.show(verdict.to_json() if as_json else verdict.text(verbose=verbose))
    return 0 if verdict.ok else FOUND


@click.command()
@options.take(
    *_MODELS,
    *FEEDING,
    options.config,
    click.option("--top", type=click.IntRange(min=1), metavar="N", help="How many ops to show.  [default: 10]"),
    options.as_json,
    _QUIET,
)
def locate(a: Path, b: Path, top: int | None, as_json: bool, quiet: bool, **given: Any) -> None:
    """Print where B departs from A, and which ops add most to that.

    First the op where the error jumps, then those whose own share of it is largest.
    """
    feeding = Feeding.taken(given).completed(options.in_force(_config(given))).needed()
    from amp_rewrite.evidence.locate import locate
    from amp_rewrite.files.model import Model

    reference = Model.load(a)
    feed = feeding.feed(reference)
    named = (str(a), str(b))
    nonfinite = feeding.allow_nonfinite
    with terminal.progress("locate", quiet=quiet) as progress:
        located = locate(reference, Model.load(b), feed, allow_nonfinite=nonfinite, names=named, progress=progress)
    if as_json or not quiet:
        terminal.show(located.to_json(top=top) if as_json else located.text(top=top or 10))


def _config(given: dict[str, Any]) -> dict[str, Any]:
    """Takes the file of settings out of all that was given: of those here only data counts."""
    return {"config": given.pop("config")}
