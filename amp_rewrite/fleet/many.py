"""`convert_many`: the public function for repositories and batches."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Unpack

from amp_rewrite.errors import PolicyError, spelled
from amp_rewrite.files.store import SaveOptions
from amp_rewrite.fleet.batch import Batch, BatchSettings
from amp_rewrite.fleet.naming import SAME
from amp_rewrite.fleet.outcome import Outcome
from amp_rewrite.fleet.processes import cores
from amp_rewrite.fleet.tree import FileGlobs
from amp_rewrite.fleet.urls import local
from amp_rewrite.ir.names import as_names
from amp_rewrite.pipeline.guidance import Guidance
from amp_rewrite.settings.keywords import checked, takes
from amp_rewrite.settings.request import KEYWORDS, Options

Sources = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


@takes(KEYWORDS)
@checked
def convert_many(
    sources: Sources,
    *,
    out: str | Path,
    name: str = SAME,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    jobs: int | None = None,
    executor: Executor | None = None,
    data: str | Path | None = None,
    ranges: str | Path | None = None,
    tolerance: float | None = None,
    overwrite: bool = False,
    resume: bool = False,
    external_data: bool | None = None,
    shard_size: str | int | None = None,
    summary: str | Path | None = None,
    **options: Unpack[Options],
) -> Iterator[Outcome]:
    """Convert the models of folders, globs and files into a folder, and copy what is not a model.

    The tree is mirrored. A model that fails gives an outcome with an error and leaves the others alone; files appear
    whole or not at all. External data that several models of a folder share is converted and written once. Mistakes
    that concern all models are raised before anything is written: two models of one name, results that exist, results
    that would replace a source.

    Several jobs run in processes of their own, which share the cores; a script then needs `if __name__ == "__main__":`.
    With `resume` and a summary, models that are done and have not changed since are not converted again. In `data` and
    `ranges`, {stem} stands for the name of each model without .onnx, {folder} for its folder in the source. The summary
    gets one line for each outcome, also if the run is interrupted.

    Args:
        sources: a folder, a glob or a file, or several; globs know `**`. With fsspec also URLs, such as "hf://…".
        out: the folder to write to, or its URL.
        name: the rule for names of results, such as "{stem}_fp16.onnx"; external data gets "_data" after it.
        include: globs of files to take, by name or, with a "/", by path in the source.
        exclude: globs of files to leave out.
        jobs: conversions at a time; by default 1, and with an `executor` one per core of this machine.
        executor: any of `concurrent.futures`, or Dask's; it reads the sources and writes the results where it runs.
        data: input data, as a path.
        ranges: a file that `Ranges.save` wrote.
        tolerance: verify each model on its data and repair it, as `repair` does.
        overwrite: replace existing files.
        resume: leave finished results of an earlier run alone.
        external_data: as `save` takes it.
        shard_size: as `save` takes it.
        summary: the .jsonl file to write.
        **options: see docs/reference/options.md.

    Returns:
        An iterator of outcomes, each as soon as it is known. To go on is to convert; closing it stops.

    Raises:
        ModelError: a source does not exist, or a result cannot be where it would be.
        PatternError: a pattern of `keep`, `lower` or `io` is malformed; at the end, if it matches in no model.
        PolicyError: an option has an unknown value, or two models would get one name.
        ReportError: the summary exists, or cannot be read or written.

    Example:
        >>> import amp_rewrite
        >>> for outcome in amp_rewrite.convert_many(["model.onnx"], out="results", name="{stem}_fp16.onnx"):
        ...     print(outcome.rc, outcome.target)
        0 results/model_fp16.onnx
    """
    if jobs is not None and jobs < 1:
        raise PolicyError(f"{spelled('jobs', jobs)} is not a number of conversions; use 1 or more")
    if tolerance is not None and data is None:
        raise PolicyError(f"{spelled('tolerance')} compares outputs and needs {spelled('data')}")
    criterion = {} if tolerance is None else {"tolerance": tolerance}
    guidance = Guidance(os.fspath(data or ""), ranges=os.fspath(ranges or ""), criterion=criterion)
    asked = BatchSettings(
        out=Path(local(out)),
        name=name,
        choice=FileGlobs(as_names(include), as_names(exclude)),
        saving=SaveOptions(overwrite, external_data, shard_size),
        resume=resume,
        guidance=guidance,
        summary=None if summary is None else Path(local(summary)),
    )
    named = [sources] if isinstance(sources, (str, os.PathLike)) else sources
    batch = Batch.of(named, asked, options)
    return batch.run(executor, jobs or (cores() if executor is not None else 1))
