"""Calibration and verification over shards of data, each in another process or machine; results merge exactly."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any, Generic, TypeVar

from amp_rewrite.errors import FeedError, ModelError, PolicyError, spelled
from amp_rewrite.evidence.calibrate import calibrate
from amp_rewrite.evidence.measured_models import name_of
from amp_rewrite.evidence.metric import criterion as check_criterion
from amp_rewrite.evidence.ranges import Ranges
from amp_rewrite.evidence.verdict import Verdict
from amp_rewrite.evidence.verify import verify
from amp_rewrite.fleet.flow import Inline, Lost, Processes, cores, through
from amp_rewrite.settings.criterion import CRITERION
from amp_rewrite.settings.keywords import checked
from amp_rewrite.settings.policy import LowType

M = TypeVar("M", Ranges, Verdict)


@dataclass(frozen=True, slots=True)
class _Shard(Generic[M]):
    """A shard of the data by number, and what to measure on it; it names files, so it can go to another machine."""

    number: int
    data: str
    measure: Callable[[str], M]


def _measured(shard: _Shard[M]) -> tuple[int, M | str]:
    """Return the result of a shard; of one that cannot be measured, the reason."""
    try:
        return shard.number, shard.measure(shard.data)
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
    keywords: dict[str, Any] = {"to": to, "allow_nonfinite": allow_nonfinite, "chunk": chunk, "threads": threads}
    measure = partial(calibrate, str(Path(model).resolve()), **keywords)
    return reduce(Ranges.merge, _each(shards, measure, jobs, executor))


@checked
def verify_many(
    a: str | Path,
    b: str | Path,
    shards: Iterable[str | os.PathLike[str]],
    *,
    jobs: int | None = None,
    executor: Executor | None = None,
    **criterion: Any,
) -> Verdict:
    """Return the verdict on two models over shards of data, which are compared at the same time.

    Rows are those of one run over all data: batches are compared one by one, and counted through.

    Args:
        a: the path of the reference; each worker reads it.
        b: the path of the candidate.
        shards: paths of data, as `verify` takes them: files, or folders of files.
        jobs: shards at a time; by default 1, and with an `executor` one per core of this machine.
        executor: any executor of `concurrent.futures`, or Dask's, in place of our own processes.
        **criterion: the other keywords of `verify`, but for `depth` and `progress`.

    Returns:
        The verdict over all batches, in the order of the shards.

    Raises:
        FeedError: no shard is given, or one cannot be read, or does not fit the models.
        ModelError: a path is not a model, or a model does not run.
        PolicyError: the criterion is missing or invalid.

    Example:
        >>> import amp_rewrite
        >>> amp_rewrite.convert("model.onnx").save("low.onnx")
        >>> amp_rewrite.verify_many("model.onnx", "low.onnx", ["batches.npz"], tolerance=1e-2).ok
        True
    """
    for word in ("depth", "progress"):
        if word in criterion:
            raise PolicyError(f"{spelled(word)} does not go over shards; leave it out, or use verify")
    check_criterion(**{word: criterion.get(word) for word in CRITERION})
    names = {"names": (name_of(a, str(a)), name_of(b, str(b)))}
    measure = partial(verify, *(str(Path(model).resolve()) for model in (a, b)), **names | criterion)
    return reduce(Verdict.merge, _each(shards, measure, jobs, executor))


def _each(
    shards: Iterable[str | os.PathLike[str]], measure: Callable[[str], M], jobs: int | None, executor: Executor | None
) -> list[M]:
    """Return the results of all shards, in their order."""
    paths = [Path(shard).resolve() for shard in shards]
    if not paths:
        raise FeedError("no shard of data is given; give one path or more")
    count = jobs or (cores() if executor is not None else 1)
    tasks = (_Shard(i, str(path), measure) for i, path in enumerate(paths))
    local: Executor | Processes = Inline() if count == 1 else Processes(min(count, len(paths)))
    done: dict[int, M] = {}
    for result in through(tasks, _measured, executor or local, count):
        if isinstance(result, Lost):  # the result of the others would not be that of all
            raise FeedError(f"{result.job.data} was not measured: {result.reason}")
        number, measured = result
        if isinstance(measured, str):
            raise FeedError(measured)
        done[number] = measured
    return [done[number] for number in range(len(paths))]
