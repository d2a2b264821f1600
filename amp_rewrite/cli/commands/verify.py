"""`amp-rewrite verify`: the outputs of two models on the same data."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from amp_rewrite.cli import parameters
from amp_rewrite.cli.data import DataOptions, stated_criterion
from amp_rewrite.cli.group import FINDING
from amp_rewrite.cli.page import check_report, present
from amp_rewrite.settings.option import DATA, OUTPUT
from amp_rewrite.settings.request import STARTS

if TYPE_CHECKING:
    from amp_rewrite.evidence.verdict import Verdict

_EMULATION = "Round as half precision does, in float32.  [default: where no CUDA provider opens]"
_RUNNING = (
    parameters.option("--only", "OUTPUT", "Compare only this output; repeatable.", DATA, multiple=True),
    parameters.flag("--equal-nan", "Treat NaN on both sides as equal.", DATA),
    parameters.option("--emulate/--no-emulate", None, _EMULATION, default=None),
    parameters.option(
        "--provider", "NAME", "Provider that must run both models.  [default: CUDA, CPU, or that of the model's target]"
    ),
)


@parameters.command(
    *parameters.PAIR,
    *parameters.FEEDING,
    *parameters.FEEDBACK,
    *parameters.CRITERION,
    *_RUNNING,
    parameters.config,
    parameters.keys(*parameters.CRITERION_KEYS, *parameters.FEEDING_KEYS),
    parameters.as_json,
    parameters.quiet(),
    parameters.flag("-v --verbose", "Print every batch.", OUTPUT),
    *parameters.REPORT,
)
def verify(a: Path, b: Path, as_json: bool, quiet: bool, verbose: bool, report_file: Path | None, **given: Any) -> int:
    """Compare the outputs of B with those of A on the same data.

    Exit with 1 if they differ by more than you allow. State a criterion, for which no default exists: --tolerance, or a
    --metric with its bound.
    """
    settings = parameters.in_force({"config": given.pop("config")})
    feeding = DataOptions.taken(given).completed(settings).needed()
    criterion = stated_criterion(given) or stated_criterion(dict(vars(settings)))
    if not criterion:
        ways = "--tolerance X, or --metric NAME=X"
        raise click.UsageError(f"no criterion for the outputs; add {ways}; to start with, a tolerance of {STARTS}")
    check_report(report_file, overwrite=given.pop("overwrite"), read=(a, b))
    from amp_rewrite.evidence.verify import verify

    given |= {"outputs": given.pop("only"), **criterion}
    verdict = feeding.compared(verify, a, b, quiet=quiet, **given)
    text = verdict.to_json() if as_json else verdict.text(verbose=verbose, command=_command(verdict, report_file))
    present(verdict, text, report_file, as_json=as_json, quiet=quiet)
    return 0 if verdict.ok else FINDING


def _command(verdict: Verdict, report_file: Path | None) -> str:
    """Return the command as it was typed, with feedback of the states that the model seems to have, or ""."""
    typed = click.get_current_context().find_root().obj
    more = ["--overwrite"] if report_file and "--overwrite" not in typed else []
    repeats = bool(verdict.states) and "-" not in typed
    return shlex.join(["amp-rewrite", *typed, *verdict.advised, *more]) if repeats else ""
