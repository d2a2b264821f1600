"""`amp-rewrite bench`: models timed side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from amp_rewrite.cli import parameters, terminal
from amp_rewrite.cli.data import DataOptions
from amp_rewrite.cli.parameters import option

if TYPE_CHECKING:
    from amp_rewrite.deploy.bench.result import Benchmark

_COUNT = click.IntRange(min=1)
_HEAD = "Timing"
_TIMING = (
    option("--provider", "NAME", "Provider that must run all models.  [default: CUDA or CPU]", _HEAD),
    option("--rounds", "N", "Rounds; all models take turns in each.  [default: 20]", _HEAD, type=_COUNT),
    option("--runs", "N", "Runs of each model in a round.  [default: as many as 50 ms hold]", _HEAD, type=_COUNT),
    option("--warm-up warm", "N", "Runs before the first one that counts.  [default: 10]", _HEAD, type=_COUNT),
    option("--threads", "N", "Threads for one op on a CPU.  [default: one per core]", _HEAD, type=_COUNT),
    option("--batch-sizes", "1,8,64", "Measure throughput at these sizes of a free batch dimension.", _HEAD),
    option("--memory/--no-memory", None, "Measure peak memory, each model in its own process.", _HEAD, default=True),
    option("--profile/--no-profile", None, "Measure the time of each op.", _HEAD, default=True),
)


@parameters.command(
    click.argument("models", metavar="A [B]...", type=parameters.MODEL, nargs=-1, required=True),
    *parameters.FEEDING,
    *_TIMING,
    parameters.config,
    parameters.keys(*parameters.FEEDING_KEYS),
    parameters.as_json,
    parameters.quiet(),
)
def bench(models: tuple[Path, ...], as_json: bool, quiet: bool, **given: Any) -> None:
    """Time models side by side: latency, throughput, memory, ops.

    All models run on the same batch; the first is the baseline. The output names the ops that got slower. Measure on a
    GPU: on a CPU half precision is slower.
    """
    feeding = DataOptions.taken(given).completed(parameters.in_force({"config": given.pop("config")})).needed()
    benchmark = _benchmark(models, feeding, given, quiet=quiet)
    if as_json or not quiet:
        terminal.show(benchmark.to_json() if as_json else benchmark.text())


def _benchmark(models: tuple[Path, ...], feeding: DataOptions, given: dict[str, Any], *, quiet: bool) -> Benchmark:
    from amp_rewrite.deploy.bench.bench import bench, parse_sizes
    from amp_rewrite.files.model import Model

    sizes = given.pop("batch_sizes")
    asked = {word: value for word, value in given.items() if value is not None}
    if sizes is not None:
        asked["sizes"] = parse_sizes(sizes)
    feed = feeding.feed(Model.load(models[0]), quiet=quiet)
    with terminal.stages("bench", quiet=quiet) as tell:
        return bench(models, feed, allow_nonfinite=bool(feeding.allow_nonfinite), progress=tell, **asked)
