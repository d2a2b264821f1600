"""A job: one model, or several that share external data, read, converted and written by one worker.

Jobs and outcomes are plain data, so that any executor can carry them to another process or machine: a job names files,
and the weights go from file to file where it runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amp_rewrite.errors import AmpRewriteError, ModelError, one_line, options_spelled, spelled
from amp_rewrite.files.fingerprint import digest
from amp_rewrite.files.model import Model
from amp_rewrite.files.scratch import make_folder
from amp_rewrite.files.store import SaveOptions, Saving, prefetching, save_together
from amp_rewrite.files.targets import check_target
from amp_rewrite.fleet.outcome import FAILED, MISSED, OK, Outcome
from amp_rewrite.pipeline.guidance import Guidance
from amp_rewrite.settings.request import KEYWORDS, Request
from amp_rewrite.settings.selectors import one_of_many
from amp_rewrite.version import VERSION

if TYPE_CHECKING:
    from amp_rewrite.pipeline.convert import Converted


@dataclass(frozen=True, slots=True)
class Task:
    """A model to convert. `data`: the name of its weights beside it, if they need a file; `guidance`: its own data.

    `files`: the external data of a source in a store.
    """

    source: Path
    target: Path
    data: str
    guidance: Guidance = field(default_factory=Guidance)
    known: Outcome | None = None
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """Tasks that are done together, for they share weights, and how.

    `options`: keywords of `convert`, which `key` stands for. `write`: False for a dry run. `threads`: cores for this
    job. `named`: the options of the command line that errors name. `folder`: where relative paths begin; `version`:
    that of the package that planned the job.
    """

    tasks: tuple[Task, ...]
    options: Mapping[str, Any]
    saving: SaveOptions
    key: str
    write: bool = True
    threads: int = 1
    named: Collection[str] | None = None
    folder: str = ""
    version: str = VERSION


def key_of(request: Request, options: Mapping[str, Any], guidance: Guidance) -> str:
    """Return a hash of all that decides what a model becomes: version, options, op lists and data."""
    own = {name: repr(options.get(name)) for name in KEYWORDS if name != "lists"}
    stated = {"lists": request.op_lists.fingerprint, **request.settings, "to": request.to.spelling}
    content = [VERSION, own, stated, asdict(guidance)]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=repr).encode()).hexdigest()[:16]


def _with_data(key: str, guidance: Guidance) -> str:
    """Return the key of a task: that of its job, and the states of the files that its data and ranges are in."""
    if not (guidance.data or guidance.ranges):
        return key
    content = hashlib.sha256(key.encode())
    for place in filter(None, (guidance.data, guidance.ranges)):
        path = Path(place)
        with suppress(OSError):  # the conversion says why it cannot be read
            for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                status = file.stat()
                state = f"{file.name}:{status.st_size}:{status.st_mtime_ns}\n"
                content.update(state.encode("utf-8", "surrogateescape"))
    return content.hexdigest()[:16]


def run(job: Job) -> list[Outcome]:
    """Do a job and return the outcome of each task. A failure is an outcome, too; only an interrupt gets out."""
    with ExitStack() as stack:
        if job.named is not None:
            stack.enter_context(options_spelled(job.named))
        stack.enter_context(prefetching(job.threads > 1))
        works = [_Work(job, task) for task in job.tasks]
        for work in works:
            work.attempt(work.convert)
        if len(works) > 1:
            _write_shared(job, works)
        else:
            works[0].attempt(works[0].write)
        return [work.outcome for work in works]


def _write_shared(job: Job, works: Sequence[_Work]) -> None:
    """Write models that share weights, those that could be converted, with one set of data files."""
    ready = [work for work in works if work.pending]
    if not ready:
        return
    if all(work.written_before() for work in ready):
        for work in ready:
            work.note(finished=True)
        return
    start, first = time.perf_counter(), ready[0]

    def write() -> None:
        make_folder(first.task.target)
        # some may be there without the others, after an interrupt; all are written again, as one
        renewed = job.saving.overwrite or any(work.written_before() for work in ready)
        for work in ready:
            if work.task.target.exists() and not (job.saving.overwrite or work.written_before()):
                check_target(work.task.target, False)
        asked = replace(job.saving, overwrite=renewed, external_data=first.task.data)
        pairs = [(work.task.target, work.converted.result) for work in ready if work.converted is not None]
        models = [(Saving.of(target, model.path, model.nbytes, asked), model.proto) for target, model in pairs]
        try:
            save_together(models, None)
        except ModelError:
            if not all(work.written_before() for work in ready):  # by another run, in the meantime
                raise

    first.attempt(write)
    failure = first.outcome
    spent = (time.perf_counter() - start) / len(ready)
    for work in ready:
        work.note(seconds=work.outcome.seconds + (0 if work is first else spent))
        if failure.error:
            work.note(rc=failure.rc, error=failure.error, made="", trace=failure.trace)


class _Work:
    """A task on its way, and the outcome so far."""

    def __init__(self, job: Job, task: Task) -> None:
        key = _with_data(job.key, task.guidance)
        self.outcome = Outcome(os.fspath(task.source), os.fspath(task.target), options=key)
        here = {"source": Path(job.folder, task.source), "target": Path(job.folder, task.target)}
        self.job, self.task = job, replace(task, **here)  # type: ignore[arg-type]
        self.converted: Converted | None = None
        self.pending = False

    def note(self, **facts: Any) -> None:
        """Add facts to the outcome."""
        self.outcome = replace(self.outcome, **facts)

    def attempt(self, step: Callable[[], None]) -> None:
        """Take a step, add its time, and turn errors into an outcome."""
        if self.outcome.error:
            return
        start, error, trace = time.perf_counter(), "", ""
        try:
            step()
        except (AmpRewriteError, OSError) as cause:
            where = f"{cause.filename}: " if isinstance(cause, OSError) and cause.filename else ""
            error = where + one_line(cause.strerror or cause if isinstance(cause, OSError) else cause)
        except RecursionError:
            error = "an expression, a file or a model is nested too deeply; make it flatter"
        except MemoryError:
            error = "out of memory; give the process more, or run fewer at a time"
        except Exception as cause:  # noqa: BLE001 a bug of ours, which must not cost the other models
            trace = traceback.format_exc()
            error = one_line(f"amp-rewrite failed inside ({type(cause).__name__}: {cause}); please report it")
        self.note(seconds=self.outcome.seconds + time.perf_counter() - start)
        if error:
            self.pending = False
            self.note(rc=FAILED, error=error, trace=trace, made="")

    def convert(self) -> None:
        """Load and convert the model, and verify it if the task has data; skip a model that is known to be done."""
        if self.job.version != VERSION:
            fact = f"the worker has amp-rewrite {VERSION}, and the job is from {self.job.version}"
            raise ModelError(f"{fact}; install the same version everywhere")
        try:
            os.fspath(self.task.source).encode()
        except UnicodeEncodeError as cause:
            name = os.fspath(self.task.source)
            raise ModelError(f"cannot read {name!r}: its name is not Unicode; rename it") from cause
        source = Model.load(self.task.source)
        self.note(digest=digest(source))
        known = self.task.known
        if known is not None and self._done(known):
            self.outcome = replace(known, source=self.outcome.source, target=self.outcome.target, finished=True)
            return
        with one_of_many() as unmatched:
            guidance = self.task.guidance
            self.converted, repaired = guidance.convert(source, self.job.options, guidance.feed(source))
        report = self.converted.report
        evidence = {name: value for name, value in asdict(report.evidence).items() if value}
        self.note(evidence=evidence, totals=asdict(report.totals), findings=tuple(report.findings))
        self.note(unmatched=dict(unmatched))
        if repaired is not None and not repaired.solved:
            self.note(rc=MISSED, error="not written: the tolerance is not met")
            return
        self.note(rc=OK, made=digest(self.converted.result))
        self.pending = self.job.write

    def _done(self, known: Outcome) -> bool:
        """True if an outcome of an earlier run is that of this model and its target is unchanged."""
        if known.rc != OK or (known.digest, known.options) != (self.outcome.digest, self.outcome.options):
            return False
        return bool(known.made) and self.task.target.is_file() and digest(Model.load(self.task.target)) == known.made

    def written_before(self) -> bool:
        """True if the target exists and equals the result of this conversion."""
        if not self.task.target.is_file():
            return False
        try:
            return digest(Model.load(self.task.target)) == self.outcome.made
        except ModelError:
            return False

    def write(self) -> None:
        """Write the model, unless it is there: this may be the second attempt, after a worker died."""
        if not self.pending or self.converted is None:
            return
        make_folder(self.task.target)
        overwrite = self.job.saving.overwrite
        if os.path.lexists(self.task.target) and not overwrite:
            if self.written_before():
                self.note(finished=True)
                return
            way = f"name another folder, or replace it with {spelled('overwrite', True)}"
            raise ModelError(f"{self.task.target} exists, and is not what this conversion makes; {way}")
        result = self.converted.result
        saving = Saving.of(self.task.target, result.path, result.nbytes, self.job.saving)
        if saving.external and not saving.name:
            saving = replace(saving, name=self.task.data)
        try:
            saving.save(result.proto, None)
        except ModelError:
            if not self.written_before():  # by another run, in the meantime
                raise
