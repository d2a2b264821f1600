"""Copying what is not a model: whole or not at all, never over a file that differs."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path

from amp_rewrite.errors import ModelError, spelled
from amp_rewrite.files.regular_files import open_regular
from amp_rewrite.files.scratch import replacing
from amp_rewrite.files.tensors import stamp

_PIECE = 1 << 20  # bytes


def make_folder(path: Path) -> None:
    """Make the folder of a file. ModelError if it cannot be made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        reason = cause.strerror or cause
        raise ModelError(f"cannot make the folder {path.parent}: {reason}; name another output") from cause


def copy(source: Path, target: Path, *, overwrite: bool, resume: bool, content: bytes | None = None) -> bool:
    """Copy a file with its time of change, and return True; with `resume` return False for one that is there already.

    `content`: what the copy holds in place of the source's bytes. ModelError if it cannot be copied, if another file
    has its name, or if it is written to meanwhile.
    """
    if source.exists() and target.exists() and source.samefile(target):
        return False  # the tree is converted into itself
    try:
        if os.path.lexists(target) and not overwrite:
            if resume and target.is_file() and _equal(source, target, content):
                return False
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
    return True


def _equal(source: Path, target: Path, content: bytes | None) -> bool:
    """True if a copy has the bytes of its source, or `content`; files of equal size and time are not read."""
    if content is not None:
        return target.stat().st_size == len(content) and target.read_bytes() == content
    with open_regular(source, buffering=0) as first, open_regular(target, buffering=0) as second:
        ours, theirs = os.fstat(first.fileno()), os.fstat(second.fileno())
        if ours.st_size != theirs.st_size:
            return False
        if ours.st_mtime_ns == theirs.st_mtime_ns:
            return True
        while piece := first.read(_PIECE):
            if piece != second.read(len(piece)):
                return False
        return True
