"""Files as they are in a commit of git."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import IO

from amp_rewrite.errors import MachineError, ReportError, one_line
from amp_rewrite.files.targets import data_files


def commit_of(ref: str, beside: Path) -> str | None:
    """Return the commit that a ref names in the repository of a file, if there is one. ReportError outside of one."""
    _git(beside, "rev-parse", "--git-dir")
    done = _asked(beside, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    return done.stdout.decode().strip() if done.returncode == 0 else None


def committed(file: Path, ref: str, folder: Path) -> Path | None:
    """Write the committed version of a file, with its external data, to a folder; None if the commit lacks it.

    Filters run, so that a file of git-lfs is the model and not its pointer. External data that is not in the commit is
    left out.
    """
    copy = _copied(file, ref, folder)
    if copy is None or copy.suffix == ".json":
        return copy
    for data in data_files(copy):
        inside = Path(os.path.normpath(data))  # a model may name any place
        if inside.is_relative_to(folder) and inside != copy:
            _copied(file.parent / inside.relative_to(folder), ref, folder, inside)
    return copy


def _copied(file: Path, ref: str, folder: Path, to: Path | None = None) -> Path | None:
    to = to or folder / file.name
    top = file.parent if file.parent.is_dir() else Path()
    inside = _git(top, "rev-parse", "--show-prefix").strip()
    name = f"{ref}:{inside}{file.name}"
    if _asked(top, "cat-file", "-e", name).returncode != 0:
        return None
    to.parent.mkdir(parents=True, exist_ok=True)
    with to.open("wb") as stream:
        _git(top, "cat-file", "--filters", name, into=stream)
    return to


def _asked(where: Path, *words: str, into: IO[bytes] | None = None) -> subprocess.CompletedProcess[bytes]:
    program = shutil.which("git")
    if program is None:
        raise MachineError("git is not installed, and the base of a comparison is a commit; install git")
    folder = where if where.is_dir() else where.parent
    command = [program, "-C", str(folder), *words]
    return subprocess.run(command, stdout=into or subprocess.PIPE, stderr=subprocess.PIPE, check=False)


def _git(where: Path, *words: str, into: IO[bytes] | None = None) -> str:
    """Return the output of git. ReportError with git's message if it fails."""
    done = _asked(where, *words, into=into)
    if done.returncode != 0:
        said = one_line(done.stderr.decode(errors="replace"))
        raise ReportError(f"{where}: git {words[0]} failed: {said}; run this in a repository that holds the file")
    return (done.stdout or b"").decode(errors="surrogateescape")
