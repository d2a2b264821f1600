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
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from amp_rewrite.errors import AmpRewriteError, ModelError, one_line, options_spelled, spelled
from amp_rewrite.files.disk import make_folder, name_of, url_of
from amp_rewrite.files.model import Model
from amp_rewrite.files.store import LARGEST_INLINE
from amp_rewrite.pipeline.batch.outcome import FAILED, MISSED, OK, Outcome
from amp_rewrite.pipeline.batch.places import data_of, staged, state_of
from amp_rewrite.pipeline.guidance import Guidance
from amp_rewrite.reports.evidence import FAILED as WRONG
from amp_rewrite.settings.request import KEYWORDS, Request
from amp_rewrite.settings.selectors import one_of_many
from amp_rewrite.version import VERSION


@dataclass(frozen=True, slots=True)
class Job:
    """A model to convert, and the settings for it.

    `options`: keywords of `convert`, which `key` stands for. `files`: the external data of the source. `known`: the
    outcome of an earlier run. `overwrite`: replace also files that no run wrote. `write`: False for a dry run. `named`:
    the options of the command line that errors name. `folder`: the start of relative paths.
    """

    source: Path
    target: Path
    options: Mapping[str, Any]
    key: str
    overwrite: bool = False
    external_data: bool | None = None
    guidance: Guidance = field(default_factory=Guidance)
    files: tuple[str, ...] = ()
    known: Outcome | None = None
    write: bool = True
    named: Collection[str] | None = None
    folder: str = ""

    def place(self, path: str | Path) -> Path:
        """Return a URL as it is, and a path from the start of relative ones."""
        return Path(path) if url_of(path) else Path(self.folder, path)


def key_of(request: Request, options: Mapping[str, Any], guidance: Guidance) -> str:
    """Return a hash of all settings behind a decision: version, options, op lists and data."""
    own = {name: repr(options.get(name)) for name in KEYWORDS if name != "lists"}
    stated = {"lists": request.op_lists.fingerprint, **request.settings, "to": request.to.spelling}
    content = [VERSION, own, stated, asdict(guidance)]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=repr).encode()).hexdigest()[:16]


def _key(job: Job) -> str:
    """Return the key of a job with the states of all files that it reads."""
    files = [job.place(job.source), *map(job.place, job.files)]
    for place in map(Path, filter(None, (job.guidance.data, job.guidance.ranges))):
        files += sorted(place.rglob("*")) if place.is_dir() else [place]
    content = [job.key, *(f"{file.name}:{state_of(file)}" for file in files)]
    return hashlib.sha256("\n".join(content).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _made(target: Path) -> str:
    """Return the states of a written model and of its data; empty if a file is missing."""
    if not state_of(target):
        return ""
    states = [state_of(file) for file in (target, *map(Path, data_of(target)))]
    return " ".join(states) if all(states) else ""


def _check_own(target: Path, known: Outcome | None) -> None:
    """Raise ModelError for a file that neither an earlier run nor an attempt of a lost worker wrote."""
    if not os.path.lexists(target):
        return
    own = known is not None and known.made.split()[:1] == [state_of(target)]
    if known is None or not known.made:
        with suppress(ModelError):
            own = bool(Model.load(target).stated("version"))
    if not own:
        way = f"name another folder, or replace it with {spelled('overwrite', True)}"
        raise ModelError(f"{target} exists, and is not what an earlier run wrote; {way}")


def run(job: Job) -> Outcome:
    """Do a job and return the outcome. A failure is an outcome, too; only an interrupt gets out."""
    start, trace = time.perf_counter(), ""
    outcome = Outcome(name_of(job.source), name_of(job.target))
    try:
        with nullcontext() if job.named is None else options_spelled(job.named):
            done = _done(job, outcome)
            return done if done.finished else replace(done, seconds=time.perf_counter() - start)
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
    return replace(outcome, rc=FAILED, error=error, trace=trace, seconds=time.perf_counter() - start)


def _done(job: Job, outcome: Outcome) -> Outcome:
    """Return the outcome of a job, from what is known but for it."""
    key, known, target = _key(job), job.known, job.place(job.target)
    if known is not None and (known.rc, known.key) == (OK, key) and known.made and known.made == _made(target):
        return replace(known, target=outcome.target, finished=True)
    with staged(job.place(job.source), target, job.files) as (source, path):
        model = Model.load(source)
        with one_of_many() as unmatched:
            converted, _ = job.guidance.convert(model, job.options, job.guidance.feed(model))
        report = converted.report
        outcome = replace(
            outcome,
            key=key,
            evidence={name: value for name, value in asdict(report.evidence).items() if value},
            totals=asdict(report.totals),
            findings=tuple(report.findings),
            unmatched=dict(unmatched),
        )
        if report.evidence.level == WRONG:
            missed = "the tolerance is not met" if report.evidence.criterion else report.evidence.objection
            return replace(outcome, rc=MISSED, error=f"not written: {missed}")
        if not job.write:
            return outcome
        make_folder(path)
        if not job.overwrite:
            _check_own(path, known)
        result = converted.result
        external = result.nbytes > LARGEST_INLINE if job.external_data is None else job.external_data
        weights = f"{job.target.name}_data"  # as optimum and transformers.js name them
        result.save(path, overwrite=True, external_data=external and weights)
    return replace(outcome, made=_made(target))
