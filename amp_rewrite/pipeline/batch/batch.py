"""A batch of models to convert and files to copy, checked as a whole before anything is written."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from amp_rewrite.errors import ModelError, PatternError, PolicyError, ReportError, command_line_options, count, spelled
from amp_rewrite.files.disk import name_of, url_of
from amp_rewrite.files.foreign import foreign
from amp_rewrite.pipeline.batch.job import FAILED, BatchSettings, Job, Outcome, Summary, key_of, run
from amp_rewrite.pipeline.batch.places import SUFFIX, canonical, copy, data_of, files_of, list_store
from amp_rewrite.pipeline.batch.processes import Processes, cores, run_jobs
from amp_rewrite.settings.io_rules import parse_io
from amp_rewrite.settings.option import Options, checked, takes
from amp_rewrite.settings.request import KEYWORDS, Request
from amp_rewrite.settings.selectors import parse_pattern

Sources = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


@takes(KEYWORDS)
@checked
def convert_many(
    sources: Sources,
    *,
    out: str | Path,
    jobs: int | None = None,
    executor: Executor | None = None,
    overwrite: bool = False,
    resume: bool = False,
    external_data: bool | None = None,
    summary: str | Path | None = None,
    **options: Unpack[Options],
) -> Iterator[Outcome]:
    """Convert all models in folders, globs and files into a folder, and copy the other files.

    The folder structure is mirrored. A model that fails yields an outcome with an error and does not affect the others;
    files are written atomically. Errors that concern the whole batch are raised before anything is written: for
    example, two results with the same name, or a result that exists or would replace a source.

    With several jobs, each runs in a separate process, so a script needs `if __name__ == "__main__":`. With `resume`,
    models are skipped if the summary lists them as done and they have not changed since. The summary gets a line for
    each outcome, even if the run is interrupted.

    Args:
        sources: a folder, a glob or a file, or several; globs support `**`. With fsspec, URLs such as "hf://…" are also
            accepted.
        out: the folder to write to, or its URL.
        jobs: the maximum number of simultaneous conversions; by default 1, or one per core with an `executor`.
        executor: one from `concurrent.futures` or Dask; its workers read the sources and write the results.
        overwrite: True to replace existing files.
        resume: True to continue from the summary of an earlier run; existing files from elsewhere are an error.
        external_data: see `save`.
        summary: the .jsonl file to write.
        **options: see docs/reference/options.md.

    Returns:
        An iterator that yields each outcome as soon as it is known. Models are converted while it is iterated; closing
        it stops the batch.

    Raises:
        ModelError: a source does not exist, or a result cannot be written.
        PatternError: a pattern of `keep`, `lower` or `io` is malformed, or turns out to match nothing in any model.
        PolicyError: an option has an unknown value, or two models would get the same name.
        ReportError: the summary exists, cannot be read or written, or is missing for `resume`.

    Example:
        >>> import amp_rewrite
        >>> for outcome in amp_rewrite.convert_many(["model.onnx"], out="results"):
        ...     print(outcome.rc, outcome.target)
        0 results/model.onnx
    """
    if jobs is not None and jobs < 1:
        raise PolicyError(f"{spelled('jobs', jobs)} allows no conversions; use 1 or more")
    settings = BatchSettings(
        request=replace(Request.of(**options), overwrite=overwrite, external_data=external_data),
        out=Path(out),
        resume=resume,
        summary=None if summary is None else Path(summary),
    )
    named = [sources] if isinstance(sources, (str, os.PathLike)) else sources
    batch = Batch.of(named, settings)
    return batch.run(executor, jobs or (cores() if executor is not None else 1))


@dataclass(frozen=True, slots=True)
class Batch:
    """The jobs and copies of a batch. `patterns`: the patterns that must match in at least one model."""

    settings: BatchSettings
    jobs: list[Job]
    copies: list[tuple[Path, Path]]
    patterns: tuple[str, ...]

    @classmethod
    def of(cls, sources: Iterable[str | os.PathLike[str]], settings: BatchSettings) -> Batch:
        """Return the batch for some sources, without writing files; errors of the whole batch are raised now."""
        request = Request.of(**settings.request.keywords)
        patterns = (*request.keep, *request.lower)
        for pattern in patterns:
            parse_pattern(pattern)
        strict = tuple(rule.text for rule in parse_io(request.io) if rule.strict)
        arguments = [os.fspath(source) for source in sources]
        if not arguments:
            raise PolicyError("there is nothing to convert; name a folder, a glob or files")
        files = files_of(arguments, settings.out)
        models = {path: relative for path, relative in files.items() if path.suffix.lower() == SUFFIX}
        if not models:
            raise ModelError(_no_models(arguments, len(files)))
        data = {path: data_of(path) for path in models}
        inputs = {*map(canonical, files)}.union(*data.values())
        summary = {canonical(file) for file in (settings.summary,) if file}
        not_copied = {file for names in data.values() for file in names} | summary
        others = [path for path in files if path not in models and canonical(path) not in not_copied]
        copies = [(path, to) for path in others if canonical(path) != canonical(to := settings.out / files[path])]
        earlier = _earlier_outcomes(settings)
        key, named = key_of(settings.request, request), command_line_options()
        paths = {"data": settings.request.data, "ranges": settings.request.ranges}
        places: dict[str, Any] = {name: canonical(path) for name, path in paths.items() if path}
        lists = _absolute(settings.request.lists)
        settings = replace(settings, request=replace(settings.request, lists=lists, **places))
        jobs = [
            Job(path, target, settings, key, named, data[path], earlier.get(name_of(path)))
            for path, target in _targets(models, settings.out)
        ]
        _check_targets([(job.source, job.target) for job in jobs], copies, inputs, settings)
        return cls(settings, jobs, copies, (*patterns, *strict))

    def run(self, executor: Executor | None, jobs: int) -> Iterator[Outcome]:
        """Copy and convert; yield the outcomes of models and of failed copies, each as soon as it is known.

        Raises PatternError at the end if a pattern matches nothing in any model.
        """
        summary = Summary(self.settings.summary) if self.settings.summary and self.settings.write else None
        latest = {name_of(job.source): job.earlier for job in self.jobs}
        if summary is not None:
            summary.complete(filter(None, latest.values()))
        model_outcomes: list[Outcome] = []
        with closing(self._outcomes(executor, jobs)) as outcomes:
            for outcome in outcomes:
                if outcome.source in latest:
                    model_outcomes.append(replace(outcome, findings=(), trace=""))  # to save memory
                latest[outcome.source] = outcome
                if summary is not None:
                    summary.add(outcome)
                yield outcome
            if summary is not None:
                summary.complete(filter(None, latest.values()))
        self._check_patterns(model_outcomes)

    def _outcomes(self, executor: Executor | None, jobs: int) -> Generator[Outcome, None, None]:
        for source, target in self.copies if self.settings.write else ():
            try:
                copy(source, target, overwrite=self.settings.request.overwrite, resume=self.settings.resume)
            except ModelError as error:
                yield Outcome(name_of(source), name_of(target), rc=FAILED, error=str(error))
        folder = os.fspath(Path.cwd()) if executor is not None else ""
        planned = (replace(job, folder=folder) for job in self.jobs)
        jobs = min(jobs, len(self.jobs))
        with Processes(jobs) if executor is None and jobs > 1 else nullcontext(executor) as pool:
            if pool is None:
                yield from map(run, planned)
            else:
                with closing(run_jobs(planned, run, pool, jobs, _failed)) as results:
                    yield from results

    def _check_patterns(self, outcomes: Sequence[Outcome]) -> None:
        if any(outcome.rc == FAILED for outcome in outcomes):
            return
        for pattern in self.patterns:
            if all(pattern in outcome.unmatched for outcome in outcomes):
                first = outcomes[0]
                where = f"{pattern!r} matches nothing in {count(len(outcomes), 'model')}; in {first.source}: "
                raise PatternError((where if len(outcomes) > 1 else f"{first.source}: ") + first.unmatched[pattern])


def _failed(job: Job, reason: str) -> Outcome:
    return Outcome(name_of(job.source), name_of(job.target), rc=FAILED, error=reason)


def _no_models(arguments: Sequence[str], others: int) -> str:
    hints = [hint for argument in arguments if Path(argument).is_dir() and (hint := foreign(Path(argument)))]
    what = f"{others} other files" if others else "no files"
    return hints[0] if hints else f"no {SUFFIX} model in {', '.join(arguments[:3])} ({what}); name another folder"


def _absolute(option: Any) -> Any:
    """Make the paths in an option absolute, since workers may run in another folder."""
    if isinstance(option, (str, Path)):
        return str(Path(option).resolve()) if Path(option).is_file() else option
    return [_absolute(part) for part in option] if isinstance(option, (list, tuple)) else option


def _earlier_outcomes(settings: BatchSettings) -> Mapping[str, Outcome]:
    """Return the outcomes of earlier runs by source; ReportError if the summary cannot be used."""
    if settings.summary is None:
        if settings.resume:
            way = spelled("summary", "FILE.jsonl", option="report FILE.jsonl")
            raise ReportError(f"there is nothing to resume from; name the report of the first run: {way}")
        return {}
    summary = Summary(settings.summary)
    if settings.write:
        summary.check(overwrite=settings.request.overwrite, resume=settings.resume)
    return summary.read() if settings.resume else {}


def _targets(models: Mapping[Path, Path], out: Path) -> Iterator[tuple[Path, Path]]:
    taken: dict[Path, Path] = {}
    for path, relative in models.items():
        target = out / relative.with_suffix(SUFFIX)
        if (other := taken.setdefault(target, path)) is not path:
            way = "leave one out, or convert them one by one"
            raise PolicyError(f"{name_of(other)} and {name_of(path)} would both be written to {name_of(target)}; {way}")
        yield path, target


def _check_targets(
    models: Sequence[tuple[Path, Path]], copies: Sequence[tuple[Path, Path]], inputs: set[str], settings: BatchSettings
) -> None:
    """Raise ModelError if a result would replace an input or an existing file to be kept."""
    for source, target in (*models, *copies):
        if canonical(target) in inputs and not target.is_symlink():
            loses = "itself" if canonical(source) == canonical(target) else "which is being read"
            fact = f"{name_of(source)} would be written over {name_of(target)}, {loses}"
            raise ModelError(f"{fact}; name another folder")
    if settings.out.exists() and not settings.out.is_dir():
        raise ModelError(f"cannot write to {settings.out}: it is a file; name a folder for several models")
    if settings.write and not (settings.request.overwrite or settings.resume):
        out = settings.out
        exists = {path for path, _ in list_store(out)[1]}.__contains__ if url_of(out) else os.path.lexists
        existing = [name_of(target) for _, target in (*models, *copies) if exists(target)]
        if existing:
            more = f" and {count(len(existing) - 1, 'more file')}" if len(existing) > 1 else ""
            ways = f"name another folder, continue with {spelled('resume', True)}, or use {spelled('overwrite', True)}"
            raise ModelError(f"{existing[0]}{more} already exist{'' if more else 's'}; {ways}")
