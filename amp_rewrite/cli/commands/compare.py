"""`amp-rewrite diff`, `verify`, `locate` and `bench`: comparisons of models."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from amp_rewrite.cli import parameters, terminal
from amp_rewrite.cli.files import Batches, check_report, present
from amp_rewrite.cli.group import FINDING
from amp_rewrite.cli.parameters import option
from amp_rewrite.settings.option import DATA
from amp_rewrite.settings.request import CRITERION, STARTS

# -- diff ----------------------------------------------------------------------------------------------------


@parameters.command(
    *parameters.PAIR,
    *parameters.reads("fail_on"),
    parameters.form("text", "json", "markdown", "github", text="Output format; github: workflow annotations."),
    parameters.verbose,
    *parameters.REPORT,
)
def diff(a: Path, b: Path, form: str, verbose: bool, report_file: Path | None, **options: Any) -> int:
    """Print how B differs from A; exit with 1 if it does. Both are models or JSON reports.

    The text is a summary by type; -v names each op.
    """
    from amp_rewrite.reports.diff import diff

    check_report(report_file, overwrite=options.pop("overwrite"), inputs=(a, b))
    settings = parameters.take_settings(options)
    delta = diff(a, b)
    failed = delta.fails(settings.fail_on)
    text = delta.to(form, settings.fail_on, verbose=verbose)
    present(delta, text, report_file, as_json=form == "json", commands=form == "github")
    return FINDING if failed else 0


# -- verify --------------------------------------------------------------------------------------------------


_EMULATION = "Round as half precision would.  [default: on if CUDA is unavailable]"


@parameters.command(
    *parameters.PAIR,
    *parameters.reads(*parameters.FEED, *parameters.FEEDBACK, *CRITERION),
    *parameters.RANDOM,
    option("--only", "OUTPUT", "Compare only this output; repeatable.", DATA, multiple=True),
    parameters.flag("--equal-nan", "Treat NaN on both sides as equal.", DATA),
    option("--emulate/--no-emulate", None, _EMULATION, DATA, default=None),
    option("--provider", "NAME", "Provider that must run both models.", DATA),
    parameters.as_json,
    parameters.quiet(),
    parameters.flag("-v --verbose", "Print every batch."),
    *parameters.REPORT,
)
def verify(a: Path, b: Path, as_json: bool, quiet: bool, verbose: bool, report_file: Path | None, **rest: Any) -> int:
    """Compare the outputs of B with those of A on the same data.

    Exit with 1 if they differ by more than the criterion allows. A criterion is required: --tolerance, or a
    --metric with its bound.
    """
    settings = parameters.take_settings(rest)
    batches, bound = Batches.of(settings, rest), settings.criterion
    if not bound:
        ways = "--tolerance X, or --metric NAME=X"
        raise click.UsageError(f"no criterion for the outputs; add {ways}; start with a tolerance of {STARTS}")
    check_report(report_file, overwrite=settings.overwrite, inputs=(a, b))
    from amp_rewrite.evidence.verify import verify

    rest |= {"outputs": rest.pop("only"), **bound}
    verdict = batches.compare(verify, a, b, quiet=quiet, **rest)
    command = ""
    if verdict.states and not as_json:  # suggest the same command with states fed back
        typed = click.get_current_context().find_root().obj
        more = ["--overwrite"] if report_file and "--overwrite" not in typed else []
        command = shlex.join(["amp-rewrite", *typed, *verdict.advised, *more])
    text = verdict.to_json() if as_json else verdict.text(verbose=verbose, command=command)
    present(verdict, text, report_file, as_json=as_json, quiet=quiet)
    return 0 if verdict.ok else FINDING


# -- locate --------------------------------------------------------------------------------------------------


@parameters.command(
    *parameters.PAIR,
    *parameters.reads(*parameters.FEED, *parameters.FEEDBACK),
    *parameters.RANDOM,
    option("--top", "N", "Number of ops to show.  [default: 10]", type=click.IntRange(min=1)),
    parameters.as_json,
    parameters.quiet(),
    *parameters.REPORT,
)
def locate(
    a: Path, b: Path, top: int | None, as_json: bool, quiet: bool, report_file: Path | None, **options: Any
) -> None:
    """Show where B diverges from A and which ops add the most error.

    The first op is the one where the error jumps; the ops with the largest local errors follow.
    """
    settings = parameters.take_settings(options)
    batches = Batches.of(settings, options)
    check_report(report_file, overwrite=settings.overwrite, inputs=(a, b))
    from amp_rewrite.evidence.locate import locate

    located = batches.compare(locate, a, b, quiet=quiet)
    shown = {} if top is None else {"top": top}
    text = located.to_json(**shown) if as_json else located.text(**shown)
    present(located, text, report_file, as_json=as_json, quiet=quiet)


# -- bench ---------------------------------------------------------------------------------------------------


_COUNT = click.IntRange(min=1)
_TIME = "Timing"


@parameters.command(
    click.argument("models", metavar="A [B]...", type=parameters.MODEL, nargs=-1, required=True),
    *parameters.reads(*parameters.FEED),
    *parameters.RANDOM,
    option("--provider", "NAME", "Provider that must run all models.", _TIME),
    option("--rounds", "N", "Timing rounds; the models take turns within each.  [default: 20]", _TIME, type=_COUNT),
    option("--threads", "N", "Threads per op on a CPU.  [default: number of cores]", _TIME, type=_COUNT),
    option("--memory/--no-memory", None, "Also measure peak memory.", _TIME, default=True),
    parameters.as_json,
    parameters.quiet(),
)
def bench(models: tuple[Path, ...], as_json: bool, quiet: bool, **options: Any) -> None:
    """Measure the latency and memory use of models side by side.

    All models run on the same batch; the first is the baseline. Measure on a GPU: on a CPU, half precision is slower.
    """
    batches = Batches.of(parameters.take_settings(options), options, feedback=False)
    from amp_rewrite.deploy.benchmark import bench
    from amp_rewrite.files.model import Model

    keywords = {name: value for name, value in options.items() if value is not None}
    feed = batches.feed(Model.load(models[0]), quiet=quiet)
    with terminal.stages("bench", *models, quiet=quiet) as tell:
        benchmark = bench(models, feed, progress=tell, **keywords)
    if as_json or not quiet:
        terminal.show(benchmark.to_json() if as_json else benchmark.text())
