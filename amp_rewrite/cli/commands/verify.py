"""`amp-rewrite verify`: the outputs of two models on the same data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from amp_rewrite.cli import options, terminal
from amp_rewrite.cli.data import Feeding
from amp_rewrite.cli.group import FINDING

_VERBOSE = options.option("-v", "--verbose", is_flag=True, help="Print every batch.")
_RUNNING = (
    options.option("--only", multiple=True, metavar="OUTPUT", help="Compare this output alone; repeatable."),
    options.option("--equal-nan", is_flag=True, help="NaN on both sides is equal."),
    options.option(
        "--emulate/--no-emulate",
        default=None,
        help="Round as half precision does, in float32.  [default: where no CUDA provider opens]",
    ),
    options.option("--provider", metavar="NAME", help="Provider that must run both.  [default: CUDA or CPU]"),
)


@click.command(cls=options.Command)
@options.take(
    *options.PAIR,
    *options.FEEDING,
    *options.CRITERION,
    *_RUNNING,
    options.config,
    options.as_json,
    options.quiet(),
    _VERBOSE,
)
def verify(a: Path, b: Path, only: tuple[str, ...], as_json: bool, quiet: bool, verbose: bool, **given: Any) -> int:
    """Compare the outputs of B with those of A on the same data.

    It exits with 1 if they are not near enough. How near is up to you, there is no default: --rtol and --atol, or a
    --metric with its bound.
    """
    feeding = Feeding.taken(given).completed(options.in_force({"config": given.pop("config")})).needed()
    words = ("rtol", "atol", "metric", "at_least", "at_most")
    if all(given[word] is None for word in words):
        raise click.UsageError(
            "no criterion for the outputs; add --rtol X and/or --atol X, or --metric NAME and its bound"
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
    return 0 if verdict.ok else FINDING
