"""Scratch files beside a target: made, held while their process lives, swept up when it was killed.

A scratch file is locked by the process that writes it, so whoever finds one that is old and not locked knows that its
process is gone. Where files cannot be locked (Windows, some network file systems) nothing is swept and no one waits.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_BUFFER = 1 << 16  # bytes; weights come in larger pieces, and are written without a copy
_PATTERN = ".amp-rewrite.*.tmp"
_UNKNOWN = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)  # what is said of a call that is not supported there
_YOUNG = 60  # seconds; between being made and being locked a file is younger than that


def scratch(folder: Path, undo: ExitStack) -> tuple[Path, BinaryIO]:
    """A new file in the folder, with the permissions of any new file, and gone when `undo` closes."""
    path = folder / f".amp-rewrite.{secrets.token_hex(8)}.tmp"
    file = path.open("xb", buffering=_BUFFER)
    undo.callback(path.unlink, missing_ok=True)
    undo.callback(_close, file)
    _lock(file.fileno(), wait=False)
    return path, file


def sweep(folder: Path) -> None:
    """Remove the scratch files in the folder whose process was killed."""
    for path in folder.glob(_PATTERN):
        with suppress(OSError):
            if path.is_symlink() or time.time() - path.stat().st_mtime < _YOUNG:
                continue
            with path.open("rb") as file:
                if _lock(file.fileno(), wait=False):
                    path.unlink()


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to be written, which takes the place of the one at `path` once all of it is on disk; OSError where that
    fails."""
    sweep(path.parent)
    with ExitStack() as undo:
        made, file = scratch(path.parent, undo)
        yield file
        file.flush()
        sync(file.fileno())
        made.replace(path)


def write_whole(path: Path, content: bytes) -> None:
    """Put the content into a file, which stays as it was until all of it is on disk, with the permissions that it had;
    OSError where that fails."""
    with replacing(path) as file:
        with suppress(FileNotFoundError):
            Path(file.name).chmod(stat.S_IMODE(path.stat().st_mode))
        file.write(content)


def sync(descriptor: int) -> None:
    """Have a file on disk, where its file system knows how; OSError for what could not be written."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNKNOWN:
            raise


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """While the body runs, no other process is in this place for the same folder."""
    with ExitStack() as stack:
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            _lock(descriptor, wait=True)
        yield


def _lock(descriptor: int, *, wait: bool) -> bool:
    """Whether the file could be locked; the lock ends when it is closed, or its process dies."""
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _close(file: BinaryIO) -> None:
    with suppress(OSError):  # on a full disk this fails once more, and that is known by now
        file.close()
