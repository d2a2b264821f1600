"""A batch: models to convert and files to copy, checked as a whole before anything is written, and then run."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

from amp_rewrite.errors import ModelError, PatternError, PolicyError, count, spelled, spelled_options
from amp_rewrite.files.disk import name_of, url_of
from amp_rewrite.files.foreign import foreign
from amp_rewrite.files.store import SaveOptions
from amp_rewrite.files.targets import data_files
from amp_rewrite.pipeline.batch.job import Job, key_of, run
from amp_rewrite.pipeline.batch.outcome import FAILED, Outcome, Summary
from amp_rewrite.pipeline.batch.places import (
    SUFFIX,
    Item,
    copy,
    items_of,
    listed,
    real,
    stored_data_files,
)
from amp_rewrite.pipeline.batch.processes import Processes, cores, through
from amp_rewrite.pipeline.convert import Guidance
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

    Several jobs run in processes of their own, which share the cores; a script then needs `if __name__ == "__main__":`.
    With `resume` and a summary, models that are done and have not changed since are not converted again. The summary
    gets one line for each outcome, also if the run is interrupted.

    Args:
        sources: a folder, a glob or a file, or several; globs know `**`. With fsspec also URLs, such as "hf://…".
        out: the folder to write to, or its URL.
        jobs: conversions at a time; by default 1, and with an `executor` one per core of this machine.
        executor: any of `concurrent.futures`, or Dask's; it reads the sources and writes the results where it runs.
        overwrite: replace existing files.
        resume: leave finished results of an earlier run alone.
        external_data: as `save` takes it.
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
        >>> for outcome in amp_rewrite.convert_many(["model.onnx"], out="results"):
        ...     print(outcome.rc, outcome.target)
        0 results/model.onnx
    """
    if jobs is not None and jobs < 1:
        raise PolicyError(f"{spelled('jobs', jobs)} is not a number of conversions; use 1 or more")
    asked = BatchSettings(
        out=Path(out),
        saving=SaveOptions(overwrite, external_data),
        resume=resume,
        summary=None if summary is None else Path(summary),
    )
    named = [sources] if isinstance(sources, (str, os.PathLike)) else sources
    batch = Batch.of(named, asked, options)
    return batch.run(executor, jobs or (cores() if executor is not None else 1))


@dataclass(slots=True)
class Listing:
    """Models, other files, and remarks on those left out.

    `data`: the external data of each model that has some.
    """

    models: list[Item] = field(default_factory=list)
    others: list[Item] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    data: dict[Path, tuple[str, ...]] = field(default_factory=dict)


def find(sources: Iterable[str | os.PathLike[str]], out: Path) -> Listing:
    """Return the models and other files of sources, but none in the folder `out`.

    ModelError for a source that does not exist or matches nothing, and if none of the files is a model.
    """
    words = [os.fspath(source) for source in sources]
    listing = Listing()
    for item in items_of(words, out, listing.remarks).values():
        (listing.models if item.path.suffix.lower() == SUFFIX else listing.others).append(item)
    if not listing.models:
        raise ModelError(_no_models(words, len(listing.others)))
    weights: set[str] = set()
    for item in listing.models:
        named_by = stored_data_files(item.path) if url_of(item.path) else data_files(item.path)
        if files := tuple(map(real, named_by)):
            listing.data[item.path] = files
            weights.update(files)
    listing.others = [item for item in listing.others if real(item.path) not in weights]
    return listing


def _no_models(words: Sequence[str], others: int) -> str:
    hints = [hint for word in words if Path(word).is_dir() and (hint := foreign(Path(word)))]
    if hints:
        return hints[0]
    what = f"{others} other files" if others else "no files"
    return f"no {SUFFIX} model in {', '.join(words[:3])} ({what}); name another folder"


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Settings of a batch beside those of a conversion. `guidance`: data for all models. `write`: not a dry run."""

    out: Path
    saving: SaveOptions = field(default_factory=SaveOptions)
    resume: bool = False
    write: bool = True
    guidance: Guidance = field(default_factory=Guidance)
    summary: Path | None = None


@dataclass(slots=True)
class Batch:
    """Jobs and copies of a batch. `remarks`: what is left out, and why. `order`: places of sources by name."""

    asked: BatchSettings
    jobs: list[Job]
    copies: list[tuple[Path, Path]]
    remarks: Sequence[str]
    order: Mapping[str, int]
    patterns: tuple[str, ...]
    earlier: Mapping[str, Outcome] = field(default_factory=dict)

    @property
    def models(self) -> int:
        """Number of models."""
        return len(self.order)

    @classmethod
    def of(cls, sources: Iterable[str | os.PathLike[str]], asked: BatchSettings, options: Mapping[str, Any]) -> Batch:
        """Return the batch of some sources without writing a file; errors of the batch as a whole are raised now."""
        options = {**options, **{name: _absolute(options[name]) for name in ("lists", "target") if name in options}}
        request = Request.of(**options)
        patterns = (*request.keep, *request.lower)
        for pattern in patterns:
            parse_pattern(pattern)
        strict = tuple(rule.text for rule in parse_io(request.io) if rule.strict)
        words = list(sources)
        if not words:
            raise PolicyError("there is nothing to convert; name a folder, a glob or files")
        listing = find(words, asked.out)
        targets = _targets(listing, asked.out)
        copies = [(item.path, asked.out / item.relative) for item in listing.others]
        summary = Summary(asked.summary) if asked.summary else None
        stay = [asked.summary] if asked.summary else []
        copies = [(path, to) for path, to in copies if not any(_same(path, other) for other in (to, *stay))]
        if summary is not None and asked.write:
            summary.check(overwrite=asked.saving.overwrite, resume=asked.resume)
        _check_targets(targets, copies, listing, asked)
        known = summary.read() if summary is not None and asked.resume else {}
        data, ranges = (os.path.realpath(path) if path else "" for path in (asked.guidance.data, asked.guidance.ranges))
        base = Job(
            source=Path(),
            target=Path(),
            options=dict(options),
            saving=asked.saving,
            key=key_of(request, options, asked.guidance),
            guidance=replace(asked.guidance, data=data, ranges=ranges),
            write=asked.write,
            named=spelled_options(),
        )
        jobs = [
            replace(
                base,
                source=item.path,
                target=target,
                known=known.get(name_of(item.path)),
                files=listing.data.get(item.path, ()) if url_of(item.path) else (),
            )
            for target, item in targets.items()
        ]
        order = {name_of(job.source): number for number, job in enumerate(jobs)}
        earlier = {source: outcome for source, outcome in known.items() if source in order}
        return cls(asked, jobs, copies, listing.remarks, order, (*patterns, *strict), earlier)

    def run(self, executor: Executor | None, jobs: int) -> Iterator[Outcome]:
        """Copy and convert; yield the outcome of each model as soon as it is known, and of copies that fail.

        PatternError at the end for a pattern that matches in none of the models.
        """
        asked = self.asked
        summary = Summary(asked.summary) if asked.summary and asked.write else None
        known: dict[str, Outcome] = dict(self.earlier)
        if summary is not None:
            summary.complete(self._sorted(known))
        seen: list[Outcome] = []
        with closing(self._outcomes(executor, jobs)) as outcomes:
            for outcome in outcomes:
                seen.append(replace(outcome, findings=(), trace=""))  # without what takes memory: there may be many
                known[outcome.source] = outcome
                if summary is not None:
                    summary.add(outcome)
                yield outcome
            if summary is not None:
                summary.complete(self._sorted(known))
        self._check_patterns(seen)

    def _outcomes(self, executor: Executor | None, jobs: int) -> Generator[Outcome, None, None]:
        if self.asked.write:
            yield from self._copied()
        threads = max(1, cores() // jobs) if executor is None else 1
        folder = os.fspath(Path.cwd()) if executor is not None else ""
        planned = (replace(job, threads=threads, folder=folder) for job in self.jobs)
        jobs = min(jobs, len(self.jobs))
        with Processes(jobs) if executor is None and jobs > 1 else nullcontext(executor) as pool:
            if pool is None:
                yield from map(run, planned)
            else:
                with closing(through(planned, run, pool, jobs, _failed)) as results:
                    yield from results

    def _copied(self) -> Iterator[Outcome]:
        asked = self.asked
        for source, target in self.copies:
            try:
                copy(source, target, overwrite=asked.saving.overwrite, resume=asked.resume)
            except ModelError as error:
                yield Outcome(name_of(source), name_of(target), rc=FAILED, error=str(error))

    def _sorted(self, outcomes: Mapping[str, Outcome]) -> list[Outcome]:
        return sorted(outcomes.values(), key=lambda outcome: self.order.get(outcome.source, len(self.order)))

    def _check_patterns(self, outcomes: Sequence[Outcome]) -> None:
        models = [outcome for outcome in outcomes if outcome.source in self.order]
        if len(models) < self.models or any(outcome.rc == FAILED for outcome in models):
            return
        for pattern in self.patterns:
            if all(pattern in outcome.unmatched for outcome in models):
                first = models[0]
                where = f"{pattern!r} matches in none of {count(len(models), 'model')}; in {first.source}: "
                raise PatternError((where if len(models) > 1 else f"{first.source}: ") + first.unmatched[pattern])


def _failed(job: Job, reason: str) -> Outcome:
    return Outcome(name_of(job.source), name_of(job.target), rc=FAILED, error=reason)


def _absolute(option: Any) -> Any:
    """Return an option with absolute paths in place of relative ones, for workers may run elsewhere."""
    if isinstance(option, (str, Path)):
        return str(Path(option).resolve()) if Path(option).is_file() else option
    return [_absolute(part) for part in option] if isinstance(option, (list, tuple)) else option


def _same(a: Path, b: Path) -> bool:
    return real(a) == real(b)


def _targets(listing: Listing, out: Path) -> dict[Path, Item]:
    targets: dict[Path, Item] = {}
    for item in listing.models:
        target = out / item.relative.with_suffix(SUFFIX)
        if target in targets:
            both = f"{name_of(targets[target].path)} and {name_of(item.path)}"
            way = "leave one out, or convert them one by one"
            raise PolicyError(f"{both} would both be written to {name_of(target)}; {way}")
        targets[target] = item
    return targets


def _check_targets(
    targets: Mapping[Path, Item], copies: Sequence[tuple[Path, Path]], listing: Listing, asked: BatchSettings
) -> None:
    read = {real(item.path) for item in (*listing.models, *listing.others)}
    read |= {file for files in listing.data.values() for file in files}
    rule = "name another folder"
    for target, item in targets.items():
        if real(target) in read and not target.is_symlink():
            loses = "which is being read" if real(item.path) != real(target) else "itself"
            raise ModelError(f"{name_of(item.path)} would be written over {name_of(target)}, {loses}; {rule}")
    copied = {target: source for source, target in copies}
    for target in targets.keys() & copied.keys():
        raise ModelError(f"{name_of(target)} would be both a result and the copy of {name_of(copied[target])}; {rule}")
    for source, target in copies:
        if real(target) in read:
            fact = f"{name_of(source)} would be copied over {name_of(target)}, which is being read"
            raise ModelError(f"{fact}; name another folder")
    if asked.out.exists() and not asked.out.is_dir():
        raise ModelError(f"cannot write to {asked.out}: it is a file; several models need a folder")
    if asked.write and not (asked.saving.overwrite or asked.resume):
        exists = {path for path, _ in listed(asked.out)}.__contains__ if url_of(asked.out) else os.path.lexists
        there = [name_of(path) for path in (*targets, *copied) if exists(path)]
        if there:
            more = f" and {count(len(there) - 1, 'more file')}" if len(there) > 1 else ""
            ways = f"{spelled('resume', True)} goes on where a run stopped, {spelled('overwrite', True)} replaces all"
            raise ModelError(f"{there[0]}{more} exist{'' if more else 's'}; name another folder, or: {ways}")
