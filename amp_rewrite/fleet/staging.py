"""Jobs and copies whose files may be in stores: fetched first, and put to their place afterwards.

An object store cannot rename, but an object appears whole: data files are put first, then the models that read them.
"""

from __future__ import annotations

import filecmp
import hashlib
import io
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from amp_rewrite.errors import AmpRewriteError, ModelError, one_line, spelled
from amp_rewrite.files.regular_files import open_regular
from amp_rewrite.files.scratch import make_folder, replacing, undoing
from amp_rewrite.files.tensors import stamp
from amp_rewrite.fleet.job import Job
from amp_rewrite.fleet.job import run as job_here
from amp_rewrite.fleet.outcome import FAILED, OK, Outcome
from amp_rewrite.fleet.remote import fetched, put, size_of, state_of
from amp_rewrite.fleet.tree import SUFFIX
from amp_rewrite.fleet.urls import name_of, url_of

_PIECE = 1 << 20  # bytes


def copy(source: Path, target: Path, *, overwrite: bool, resume: bool, content: bytes | None = None) -> None:
    """Copy what is not a model, also from or to a store; with `resume`, leave a copy that is there already alone.

    `content`: what the copy holds in place of the source's bytes. In a store, a file of the same size counts as equal.
    ModelError if another file has the name, or if it cannot be copied.
    """
    if not (url_of(source) or url_of(target)):
        _copy_here(source, target, overwrite=overwrite, resume=resume, content=content)
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
            _copy_here(here, target, overwrite=overwrite, resume=resume)


def _copy_here(source: Path, target: Path, *, overwrite: bool, resume: bool, content: bytes | None = None) -> None:
    """Copy a file of this machine whole or not at all, with its time of change, but not over one that differs.

    ModelError if it cannot be copied, if another file has its name, or if it is written to meanwhile.
    """
    make_folder(target)
    if source.exists() and target.exists() and source.samefile(target):
        return  # the tree is converted into itself
    try:
        if os.path.lexists(target) and not overwrite:
            if resume and target.is_file() and _equal(source, target, content):
                return
            way = f"name another folder, or replace it with {spelled('overwrite', True)}"
            raise ModelError(f"{target} exists{' and differs from ' + str(source) if resume else ''}; {way}")
        with open_regular(source, buffering=0) as file:
            before = os.fstat(file.fileno())
            with replacing(target) as out:
                shutil.copyfileobj(file if content is None else io.BytesIO(content), out, _PIECE)
                out.flush()
                after = os.fstat(file.fileno())
                if stamp(before) != stamp(after):
                    raise ModelError(f"{source} was written to while it was copied; run again")
                if os.utime in os.supports_fd:
                    os.utime(out.fileno(), ns=(before.st_atime_ns, before.st_mtime_ns))
    except OSError as cause:
        raise ModelError(f"cannot copy {source} to {target}: {cause.strerror or cause}") from cause


def _equal(source: Path, target: Path, content: bytes | None) -> bool:
    """True if a copy has the bytes of its source, or `content`; files of equal size and time are not read."""
    return filecmp.cmp(source, target) if content is None else target.read_bytes() == content


def run(job: Job) -> list[Outcome]:
    """Do a job as `job.run` does, also one whose models come from a store or go to one.

    Those go by way of a temporary folder of the machine that does the job.
    """
    if not any(url_of(place) for task in job.tasks for place in (task.source, task.target)):
        return job_here(job)
    names = [(name_of(task.source), name_of(task.target)) for task in job.tasks]
    try:
        key = _with_states(job)
        known = [task.known for task in job.tasks]
        there = (size_of(_place(job, task.target)) is not None for task in job.tasks)
        if all(k is not None and (k.rc, k.options) == (OK, key) for k in known) and all(there):
            return [replace(k, finished=True) for k in known if k is not None]
        with undoing() as undo:
            folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="amp-rewrite-")))
            outcomes = _run_in(folder, replace(job, key=key))
    except (AmpRewriteError, OSError) as cause:
        return [Outcome(*pair, rc=FAILED, error=one_line(cause)) for pair in names]
    return [
        replace(outcome, source=source, target=target, options=key)
        for outcome, (source, target) in zip(outcomes, names, strict=True)
    ]


def _run_in(folder: Path, job: Job) -> list[Outcome]:
    """Fetch the inputs of a job, run it, and upload its outputs: data files first, models last."""
    tasks = []
    for task in job.tasks:
        source = fetched(_place(job, task.source), folder / "read" / task.source)
        for file in task.files if url_of(task.source) else ():
            fetched(Path(file), folder / "read" / file)
        target = folder / "written" / task.target if url_of(task.target) else Path(job.folder, task.target)
        tasks.append(replace(task, source=source, target=target, known=None, files=()))
    outcomes = job_here(replace(job, tasks=tuple(tasks)))
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
