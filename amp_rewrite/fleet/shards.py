"""Calibration over shards of data, each measured by another process or machine; the ranges merge exactly."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from amp_rewrite.errors import FeedError, ModelError
from amp_rewrite.evidence.calibrate import calibrate
from amp_rewrite.evidence.ranges import Ranges
from amp_rewrite.fleet.flow import Inline, Lost, Processes, cores, through
from amp_rewrite.settings.keywords import checked
from amp_rewrite.settings.policy import LowType


@dataclass(frozen=True, slots=True)
class _Shard:
    """Data to measure a model on, by number; files alone, so that it can go to another machine."""

    number: int
    model: str
    data: str
    keywords: dict[str, Any]


def _measure(shard: _Shard) -> tuple[int, Ranges | str]:
    """Return the ranges of a shard; of one that cannot be measured, the reason."""
    try:
        return shard.number, calibrate(shard.model, shard.data, **shard.keywords)
    except (ModelError, FeedError) as error:
        return shard.number, f"{shard.data}: {error}"


@checked
def calibrate_many(
    model: str | Path,
    shards: Iterable[str | os.PathLike[str]],
    *,
    to: LowType = "float16",
    jobs: int | None = None,
    executor: Executor | None = None,
    allow_nonfinite: bool = False,
    chunk: int | None = None,
    threads: int | None = None,
) -> Ranges:
    """Return the ranges of a model over shards of data, which are measured at the same time.

    The ranges are the same as over all data in one run: they are counts and extremes, which merge without rounding.
    Sums of the model may depend on `threads` in the last digit, so that both runs need the same number.

    Args:
        model: the path of the model; each worker reads it.
        shards: paths of data, as `calibrate` takes them: files, or folders of files.
        to: the low type, as `convert` takes it.
        jobs: shards at a time; by default 1, and with an `executor` one per core of this machine.
        executor: any executor of `concurrent.futures`, or Dask's, in place of our own processes.
        allow_nonfinite: accept NaN and infinity in the data.
        chunk: as `calibrate` takes it.
        threads: for one op; by default one per core, as for `calibrate`.

    Returns:
        The ranges, merged in the order of the shards.

    Raises:
        FeedError: no shard is given, or one cannot be read, or does not fit the model.

    Example:
        >>> import amp_rewrite
        >>> ranges = amp_rewrite.calibrate_many("model.onnx", ["batches.npz"])
        >>> ranges == amp_rewrite.calibrate("model.onnx", "batches.npz")
        True
    """
    paths = [Path(shard).resolve() for shard in shards]
    if not paths:
        raise FeedError("no shard of data is given; give one path or more")
    count = jobs or (cores() if executor is not None else 1)
    keywords = {"to": to, "allow_nonfinite": allow_nonfinite, "chunk": chunk, "threads": threads}
    tasks = (_Shard(i, str(Path(model).resolve()), str(path), keywords) for i, path in enumerate(paths))
    local: Executor | Processes = Inline() if count == 1 else Processes(min(count, len(paths)))
    measured = dict(_results(through(tasks, _measure, executor or local, count)))
    return reduce(Ranges.merge, (measured[number] for number in range(len(paths))))


def _results(results: Iterable[tuple[int, Ranges | str] | Lost[_Shard]]) -> Iterator[tuple[int, Ranges]]:
    """Yield numbers and ranges. FeedError for a shard without ranges: those of the others would not be those of all."""
    for result in results:
        if isinstance(result, Lost):
            raise FeedError(f"{result.job.data} was not measured: {result.reason}")
        number, ranges = result
        if isinstance(ranges, str):
            raise FeedError(ranges)
        yield number, ranges
