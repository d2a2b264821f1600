"""A job: one model, read, converted and written by one worker.

Jobs and outcomes are plain data, so that any executor can carry them to another process or machine: a job names files,
and the weights go from file to file where it runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import traceback
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from amp_rewrite.errors import AmpRewriteError, ModelError, one_line, options_spelled, spelled
from amp_rewrite.files.disk import make_folder, name_of, url_of
from amp_rewrite.files.fingerprint import digest
from amp_rewrite.files.model import Model
from amp_rewrite.files.store import SaveOptions, Saving, prefetching
from amp_rewrite.pipeline.batch.outcome import FAILED, MISSED, OK, Outcome
from amp_rewrite.pipeline.batch.places import size_of, staged, state_of
from amp_rewrite.pipeline.convert import Guidance
from amp_rewrite.reports.evidence import FAILED as WRONG
from amp_rewrite.settings.request import KEYWORDS, Request
from amp_rewrite.settings.selectors import one_of_many
from amp_rewrite.version import VERSION


@dataclass(frozen=True, slots=True)
class Job:
    """A model to convert, and the settings for it.

    `options`: keywords of `convert`, which `key` stands for. `known`: the outcome of an earlier run. `files`: the
    external data of a source in a store. `write`: False for a dry run. `threads`: cores for this job. `named`: the
    options of the command line that errors name. `folder`: the start of relative paths. `version`: that of the package
    that planned the job.
    """

    source: Path
    target: Path
    options: Mapping[str, Any]
    saving: SaveOptions
    key: str
    guidance: Guidance = field(default_factory=Guidance)
    known: Outcome | None = None
    files: tuple[str, ...] = ()
    write: bool = True
    threads: int = 1
    named: Collection[str] | None = None
    folder: str = ""
    version: str = VERSION

    @property
    def remote(self) -> bool:
        """True if the source or the target is in a store."""
        return bool(url_of(self.source) or url_of(self.target))

    def place(self, path: str | Path) -> Path:
        """Return a URL as it is, and a path from the start of relative ones."""
        return Path(path) if url_of(path) else Path(self.folder, path)


def key_of(request: Request, options: Mapping[str, Any], guidance: Guidance) -> str:
    """Return a hash of all inputs of a decision: version, options, op lists and data."""
    own = {name: repr(options.get(name)) for name in KEYWORDS if name != "lists"}
    stated = {"lists": request.op_lists.fingerprint, **request.settings, "to": request.to.spelling}
    content = [VERSION, own, stated, asdict(guidance)]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=repr).encode()).hexdigest()[:16]


def _own_key(job: Job) -> str:
    """Return the key of a job with the states of its data and ranges, and of files in stores."""
    states = []
    for place in map(Path, filter(None, (job.guidance.data, job.guidance.ranges))):
        with suppress(OSError):  # the conversion says why it cannot be read
            files = sorted(place.rglob("*")) if place.is_dir() else [place]
            states += [f"{file.name}:{state_of(file)}" for file in files]
    if job.remote:
        states += [f"{file}:{state_of(job.place(file))}" for file in (str(job.source), *job.files)]
    if not states:
        return job.key
    text = "\n".join((job.key, *states))
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def run(job: Job) -> Outcome:
    """Do a job and return the outcome. A failure is an outcome, too; only an interrupt gets out."""
    facts: dict[str, Any] = {"source": name_of(job.source), "target": name_of(job.target)}
    start, error, trace = time.perf_counter(), "", ""
    try:
        with ExitStack() as stack:
            if job.named is not None:
                stack.enter_context(options_spelled(job.named))
            stack.enter_context(prefetching(job.threads > 1))
            _do(job, facts)
    except (AmpRewriteError, OSError) as cause:
        where = f"{cause.filename}: " if isinstance(cause, OSError) and cause.filename else ""
        error = where + one_line(cause.strerror or cause if isinstance(cause, OSError) else cause)
    except RecursionError:
        error = "an expression, a file or a model is nested too deeply; flatten it"
    except MemoryError:
        error = "out of memory; give the process more, or run fewer at a time"
    except Exception as cause:  # noqa: BLE001 the border of a worker: a bug must not cost the other models
        trace = traceback.format_exc()
        error = one_line(f"internal error in amp-rewrite ({type(cause).__name__}: {cause}); please report it")
    if error:
        facts |= {"rc": FAILED, "error": error, "trace": trace, "made": ""}
    if not facts.get("finished") or "seconds" not in facts:
        facts["seconds"] = time.perf_counter() - start
    return Outcome(**facts)


def _do(job: Job, facts: dict[str, Any]) -> None:
    if job.version != VERSION:
        fact = f"the worker has amp-rewrite {VERSION}, and the job is from {job.version}"
        raise ModelError(f"{fact}; install the same version everywhere")
    try:
        os.fspath(job.source).encode()
    except UnicodeEncodeError as cause:
        name = os.fspath(job.source)
        raise ModelError(f"cannot read {name!r}: its name is not Unicode; rename it") from cause
    facts["options"] = key = _own_key(job)
    known = job.known if job.known is not None and (job.known.rc, job.known.options) == (OK, key) else None
    if job.remote and known is not None and size_of(job.place(job.target)) is not None:
        facts |= _finished(known)
        return
    with staged(job.place(job.source), job.place(job.target), job.files) as (source, target):
        model = Model.load(source)
        facts["digest"] = digest(model)
        if known is not None and known.digest == facts["digest"] and known.made and _written(target, known.made):
            facts |= _finished(known)
            return
        with one_of_many() as unmatched:
            converted, _ = job.guidance.convert(model, job.options, job.guidance.feed(model))
        report = converted.report
        evidence = {name: value for name, value in asdict(report.evidence).items() if value}
        facts |= {"evidence": evidence, "totals": asdict(report.totals), "findings": tuple(report.findings)}
        facts["unmatched"] = dict(unmatched)
        if report.evidence.level == WRONG:
            missed = "the tolerance is not met" if report.evidence.criterion else report.evidence.objection
            facts |= {"rc": MISSED, "error": f"not written: {missed}"}
            return
        facts |= {"rc": OK, "made": digest(converted.result)}
        if job.write:
            facts["finished"] = _write(job, converted.result, target, facts["made"])


def _finished(known: Outcome) -> dict[str, Any]:
    kept = {
        name: getattr(known, name) for name in ("rc", "digest", "made", "evidence", "totals", "findings", "seconds")
    }
    return {**kept, "unmatched": known.unmatched, "finished": True}


def _written(target: Path, made: str) -> bool:
    if not target.is_file():
        return False
    try:
        return digest(Model.load(target)) == made
    except ModelError:
        return False


def _write(job: Job, model: Model, target: Path, made: str) -> bool:
    """Write a model, unless it is there: this may be the second attempt, after a worker died. True if it was there."""
    make_folder(target)
    if os.path.lexists(target) and not job.saving.overwrite:
        if _written(target, made):
            return True
        way = f"name another folder, or replace it with {spelled('overwrite', True)}"
        raise ModelError(f"{target} exists, and is not what this conversion makes; {way}")
    saving = Saving.of(target, model.path, model.nbytes, job.saving)
    if saving.external and not saving.name:
        saving = replace(saving, name=f"{job.target.name}_data")  # as optimum and transformers.js name weights
    try:
        saving.save(model.proto, None)
    except ModelError:
        if not _written(target, made):  # by another run, in the meantime
            raise
    return False
