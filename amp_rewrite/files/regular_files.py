"""Regular files, opened without ever waiting: neither for the writer of a pipe, nor for a device."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_FLAGS = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)


def open_regular(path: str | Path, *, follow: bool = True, buffering: int = -1) -> BinaryIO:
    """Open a regular file to read; OSError for a pipe, a device or a folder, and without `follow` also for a link."""
    descriptor = os.open(path, _FLAGS | (0 if follow else getattr(os, "O_NOFOLLOW", 0)))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(descriptor, "rb", buffering=buffering)  # noqa: PTH123


def read_regular(path: str | Path, most: int) -> bytes:
    """Return the content of a regular file, at most one byte more than `most`; OSError as `open_regular`."""
    with open_regular(path) as file:
        return file.read(most + 1)
