"""Jobs and copies whose files may be in stores: fetched first, and put to their place afterwards.

An object store renames nothing, but an object appears whole: data files are put first, then the models that read them.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from amp_rewrite.errors import AmpRewriteError, ModelError, one_line, spelled
from amp_rewrite.fleet import copying
from amp_rewrite.fleet.copying import make_folder
from amp_rewrite.fleet.job import Job
from amp_rewrite.fleet.job import run as job_here
from amp_rewrite.fleet.outcome import FAILED, OK, Outcome
from amp_rewrite.fleet.remote import fetched, put, size_of, state_of
from amp_rewrite.fleet.tree import SUFFIX
from amp_rewrite.fleet.urls import name_of, url_of

Progress = Callable[[str, int, int], None]


def copy(source: Path, target: Path, *, overwrite: bool, resume: bool, content: bytes | None = None) -> None:
    """Copy a file as `copying.copy` does, also from or to a store; there, one of the same size counts as the same."""
    if not (url_of(source) or url_of(target)):
        make_folder(target)
        copying.copy(source, target, overwrite=overwrite, resume=resume, content=content)
        return
    size = len(content) if content is not None else size_of(source)
    known = size_of(target)
    if known is not None and not overwrite:
        if resume and known == size:
            return
        way = f"name another folder, or replace it with {spelled('overwrite', True)}"
        raise ModelError(f"{name_of(target)} exists; {way}")
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-") as folder:
        here = Path(folder, "file")
        if content is not None:
            here.write_bytes(content)
        else:
            here = fetched(source, here)
        if url_of(target):
            put(here, target)
        else:
            make_folder(target)
            copying.copy(here, target, overwrite=overwrite, resume=resume)


def run(job: Job, progress: Progress | None = None) -> list[Outcome]:
    """Do a job as `job.run` does, also one whose models come from a store or go to one.

    Those go by way of a temporary folder of the machine that does the job.
    """
    if not any(url_of(place) for task in job.tasks for place in (task.source, task.target)):
        return job_here(job, progress)
    names = [(name_of(task.source), name_of(task.target)) for task in job.tasks]
    try:
        key = _with_states(job)
        known = [task.known for task in job.tasks]
        there = (size_of(_place(job, task.target)) is not None for task in job.tasks)
        if all(k is not None and (k.rc, k.options) == (OK, key) for k in known) and all(there):
            return [replace(k, finished=True) for k in known if k is not None]
        with tempfile.TemporaryDirectory(prefix="amp-rewrite-") as name:
            outcomes = _run_in(Path(name), replace(job, key=key), progress)
    except (AmpRewriteError, OSError) as cause:
        return [Outcome(*pair, rc=FAILED, error=one_line(cause)) for pair in names]
    return [
        replace(outcome, source=source, target=target, options=key)
        for outcome, (source, target) in zip(outcomes, names, strict=True)
    ]


def _run_in(folder: Path, job: Job, progress: Progress | None) -> list[Outcome]:
    """Fetch the inputs of a job, run it, and upload its outputs: data files first, models last."""
    tasks = []
    for task in job.tasks:
        source = fetched(_place(job, task.source), folder / "read" / task.source)
        for file in task.files if url_of(task.source) else ():
            fetched(Path(file), folder / "read" / file)
        target = folder / "written" / task.target if url_of(task.target) else Path(job.folder, task.target)
        tasks.append(replace(task, source=source, target=target, known=None, files=()))
    outcomes = job_here(replace(job, tasks=tuple(tasks)), progress)
    written = folder / "written"
    files = [path for path in written.rglob("*") if path.is_file()]
    for path in sorted(files, key=lambda path: (path.suffix == SUFFIX, path)):
        put(path, path.relative_to(written))
    for place in (folder / "read", written):  # errors name what the user knows
        outcomes = [replace(o, error=o.error.replace(f"{place}{os.sep}", "")) if o.error else o for o in outcomes]
    return outcomes


def _with_states(job: Job) -> str:
    """Return the key of a job with the states of the files that it reads, as stores tell them."""
    content = hashlib.sha256(job.key.encode())
    for file in (file for task in job.tasks for file in (str(task.source), *task.files)):
        content.update(f"{file}:{state_of(_place(job, file))}\n".encode("utf-8", "surrogateescape"))
    return content.hexdigest()[:16]


def _place(job: Job, path: str | Path) -> Path:
    """Return a URL as it is, and a path from where relative ones begin."""
    return Path(path) if url_of(path) else Path(job.folder, path)
