"""A batch: models to convert and files to copy, checked as a whole before anything is written, and then run."""

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
from amp_rewrite.pipeline.batch.places import SUFFIX, copy, data_of, files_of, list_store, real
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
    """Convert the models of folders, globs and files into a folder, and copy the other files.

    The tree is mirrored. A model that fails gives an outcome with an error and leaves the others alone; files appear
    whole or not at all. Mistakes that concern all models are raised before anything is written: two models of one name,
    results that exist, results that would replace a source.

    Several jobs run in processes of their own; a script then needs `if __name__ == "__main__":`. With `resume`, models
    that are done by the summary and have not changed since are not converted again. The summary gets one line for each
    outcome, also if the run is interrupted.

    Args:
        sources: a folder, a glob or a file, or several; globs know `**`. With fsspec also URLs, such as "hf://…".
        out: the folder to write to, or its URL.
        jobs: conversions at a time; by default 1, and with an `executor` one per core of this machine.
        executor: any of `concurrent.futures`, or Dask's; it reads the sources and writes the results where it runs.
        overwrite: replace existing files.
        resume: go on from the summary of an earlier run; a file that no such run wrote stays, and is an error.
        external_data: as `save` takes it.
        summary: the .jsonl file to write.
        **options: see docs/reference/options.md.

    Returns:
        An iterator of outcomes, each as soon as it is known. To go on is to convert; closing it stops.

    Raises:
        ModelError: a source does not exist, or a result cannot be where it would be.
        PatternError: a pattern of `keep`, `lower` or `io` is malformed; at the end, if it matches in no model.
        PolicyError: an option has an unknown value, or two models would get one name.
        ReportError: the summary exists, cannot be read or written, or is not given to resume from.

    Example:
        >>> import amp_rewrite
        >>> for outcome in amp_rewrite.convert_many(["model.onnx"], out="results"):
        ...     print(outcome.rc, outcome.target)
        0 results/model.onnx
    """
    if jobs is not None and jobs < 1:
        raise PolicyError(f"{spelled('jobs', jobs)} is not a number of conversions; use 1 or more")
    asked = BatchSettings(
        request=replace(Request.of(**options), overwrite=overwrite, external_data=external_data),
        out=Path(out),
        resume=resume,
        summary=None if summary is None else Path(summary),
    )
    named = [sources] if isinstance(sources, (str, os.PathLike)) else sources
    batch = Batch.of(named, asked)
    return batch.run(executor, jobs or (cores() if executor is not None else 1))


@dataclass(frozen=True, slots=True)
class Batch:
    """Jobs and copies of a batch. `patterns`: those that must match in some model."""

    asked: BatchSettings
    jobs: list[Job]
    copies: list[tuple[Path, Path]]
    patterns: tuple[str, ...]

    @classmethod
    def of(cls, sources: Iterable[str | os.PathLike[str]], asked: BatchSettings) -> Batch:
        """Return the batch of some sources without writing a file; errors of the batch as a whole are raised now."""
        request = Request.of(**asked.request.keywords)
        patterns = (*request.keep, *request.lower)
        for pattern in patterns:
            parse_pattern(pattern)
        strict = tuple(rule.text for rule in parse_io(request.io) if rule.strict)
        words = [os.fspath(source) for source in sources]
        if not words:
            raise PolicyError("there is nothing to convert; name a folder, a glob or files")
        files = files_of(words, asked.out)
        models = {path: relative for path, relative in files.items() if path.suffix.lower() == SUFFIX}
        if not models:
            raise ModelError(_no_models(words, len(files)))
        data = {path: data_of(path) for path in models}
        read = {*map(real, files)}.union(*data.values())
        stay = {file for named in data.values() for file in named} | {real(file) for file in (asked.summary,) if file}
        copies = [(path, asked.out / files[path]) for path in files if path not in models and real(path) not in stay]
        copies = [(path, to) for path, to in copies if real(path) != real(to)]
        known = _known(asked)
        key, named = key_of(asked.request, request), command_line_options()
        given = {"data": asked.request.data, "ranges": asked.request.ranges}
        places: dict[str, Any] = {name: real(path) for name, path in given.items() if path}
        asked = replace(asked, request=replace(asked.request, lists=_absolute(asked.request.lists), **places))
        jobs = [
            Job(path, target, asked, key, named, data[path], known.get(name_of(path)))
            for path, target in _targets(models, asked.out)
        ]
        _check_targets([(job.source, job.target) for job in jobs], copies, read, asked)
        return cls(asked, jobs, copies, (*patterns, *strict))

    def run(self, executor: Executor | None, jobs: int) -> Iterator[Outcome]:
        """Copy and convert; yield the outcome of each model as soon as it is known, and of copies that fail.

        PatternError at the end for a pattern that matches in none of the models.
        """
        summary = Summary(self.asked.summary) if self.asked.summary and self.asked.write else None
        known = {name_of(job.source): job.known for job in self.jobs}
        if summary is not None:
            summary.complete(filter(None, known.values()))
        seen: list[Outcome] = []
        with closing(self._outcomes(executor, jobs)) as outcomes:
            for outcome in outcomes:
                if outcome.source in known:
                    seen.append(replace(outcome, findings=(), trace=""))  # without what takes memory
                known[outcome.source] = outcome
                if summary is not None:
                    summary.add(outcome)
                yield outcome
            if summary is not None:
                summary.complete(filter(None, known.values()))
        self._check_patterns(seen)

    def _outcomes(self, executor: Executor | None, jobs: int) -> Generator[Outcome, None, None]:
        for source, target in self.copies if self.asked.write else ():
            try:
                copy(source, target, overwrite=self.asked.request.overwrite, resume=self.asked.resume)
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
                where = f"{pattern!r} matches in none of {count(len(outcomes), 'model')}; in {first.source}: "
                raise PatternError((where if len(outcomes) > 1 else f"{first.source}: ") + first.unmatched[pattern])


def _failed(job: Job, reason: str) -> Outcome:
    return Outcome(name_of(job.source), name_of(job.target), rc=FAILED, error=reason)


def _no_models(words: Sequence[str], others: int) -> str:
    hints = [hint for word in words if Path(word).is_dir() and (hint := foreign(Path(word)))]
    what = f"{others} other files" if others else "no files"
    return hints[0] if hints else f"no {SUFFIX} model in {', '.join(words[:3])} ({what}); name another folder"


def _absolute(option: Any) -> Any:
    """Return an option with absolute paths in place of relative ones, for workers may run elsewhere."""
    if isinstance(option, (str, Path)):
        return str(Path(option).resolve()) if Path(option).is_file() else option
    return [_absolute(part) for part in option] if isinstance(option, (list, tuple)) else option


def _known(asked: BatchSettings) -> Mapping[str, Outcome]:
    """Return the outcomes of earlier runs by source. ReportError for a summary that cannot be."""
    if asked.summary is None:
        if asked.resume:
            way = spelled("summary", "FILE.jsonl", option="report FILE.jsonl")
            raise ReportError(f"there is nothing to resume from; name the report of the first run: {way}")
        return {}
    summary = Summary(asked.summary)
    if asked.write:
        summary.check(overwrite=asked.request.overwrite, resume=asked.resume)
    return summary.read() if asked.resume else {}


def _targets(models: Mapping[Path, Path], out: Path) -> Iterator[tuple[Path, Path]]:
    taken: dict[Path, Path] = {}
    for path, relative in models.items():
        target = out / relative.with_suffix(SUFFIX)
        if (other := taken.setdefault(target, path)) is not path:
            way = "leave one out, or convert them one by one"
            raise PolicyError(f"{name_of(other)} and {name_of(path)} would both be written to {name_of(target)}; {way}")
        yield path, target


def _check_targets(
    models: Sequence[tuple[Path, Path]], copies: Sequence[tuple[Path, Path]], read: set[str], asked: BatchSettings
) -> None:
    """Raise ModelError if a result would replace a file that is read, or one that is there and may not go."""
    for source, target in (*models, *copies):
        if real(target) in read and not target.is_symlink():
            loses = "itself" if real(source) == real(target) else "which is being read"
            fact = f"{name_of(source)} would be written over {name_of(target)}, {loses}"
            raise ModelError(f"{fact}; name another folder")
    if asked.out.exists() and not asked.out.is_dir():
        raise ModelError(f"cannot write to {asked.out}: it is a file; several models need a folder")
    if asked.write and not (asked.request.overwrite or asked.resume):
        exists = {path for path, _ in list_store(asked.out)[1]}.__contains__ if url_of(asked.out) else os.path.lexists
        there = [name_of(target) for _, target in (*models, *copies) if exists(target)]
        if there:
            more = f" and {count(len(there) - 1, 'more file')}" if len(there) > 1 else ""
            ways = f"{spelled('resume', True)} goes on from a report, {spelled('overwrite', True)} replaces all"
            raise ModelError(f"{there[0]}{more} exist{'' if more else 's'}; name another folder, or: {ways}")
