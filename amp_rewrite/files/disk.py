"""Open regular files without blocking, and replace files atomically with scratch files in the same folder.

A scratch file that has not been written to for an hour is assumed to belong to a dead process and is removed. If a
folder cannot be locked (on Windows and some network file systems), processes do not wait for each other.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from glob import has_magic
from pathlib import Path
from typing import BinaryIO

from amp_rewrite.errors import AmpRewriteError, ModelError

_BUFFER = 1 << 16  # bytes; weights are written in larger pieces, which bypass it
_SCRATCH_GLOB = ".amp-rewrite.*.tmp"
_UNSUPPORTED_ERRORS = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
_MAX_IDLE = 3600  # seconds since the last write
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)


def open_regular(path: str | Path, *, follow: bool = True, buffering: int = -1) -> BinaryIO:
    """Open a regular file for reading; OSError for a pipe, device or folder and, unless `follow`, for a link."""
    descriptor = os.open(path, _OPEN_FLAGS | (0 if follow else getattr(os, "O_NOFOLLOW", 0)))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(descriptor, "rb", buffering=buffering)  # noqa: PTH123


def read_regular(path: str | Path, limit: int) -> bytes:
    """Return at most `limit` + 1 bytes of a regular file; OSError as in `open_regular`."""
    with open_regular(path) as file:
        return file.read(limit + 1)


def read_text(path: Path, limit: int, kind: str, error: type[AmpRewriteError]) -> str:
    """Return the text of a UTF-8 file of at most `limit` bytes, or raise `error`. `kind`: a noun for the message."""
    try:
        content = read_regular(path, limit)
        if len(content) > limit:
            raise error(f"{path}: it is larger than {limit >> 10} KiB, so it is not {kind}; name another file")
        return content.decode("utf-8-sig")
    except OSError as cause:
        raise error(f"cannot read {path}: {cause.strerror}; pass the path of {kind}") from cause
    except UnicodeDecodeError as cause:
        raise error(f"{path} is not UTF-8; save it as UTF-8") from cause


def scratch(target: Path, undo: ExitStack) -> tuple[Path, BinaryIO]:
    """Create a scratch file next to a target, with the target's permissions; closing `undo` removes it."""
    path = target.parent / f".amp-rewrite.{secrets.token_hex(8)}.tmp"
    mode = None
    with suppress(OSError):
        status = target.lstat()
        mode = stat.S_IMODE(status.st_mode) & 0o777 if stat.S_ISREG(status.st_mode) else None
    undo.callback(path.unlink, missing_ok=True)  # before the file exists, since an interrupt may follow
    file = open(path, "xb", buffering=_BUFFER, opener=lambda name, flags: os.open(name, flags, mode or 0o666))  # noqa: SIM115
    undo.callback(_close, file)
    if mode is not None and hasattr(os, "fchmod"):
        with suppress(OSError):  # not every file system has permissions
            os.fchmod(file.fileno(), mode)
    return path, file


def sweep(folder: Path) -> None:
    """Remove the scratch files of killed processes in a folder."""
    for path in folder.glob(_SCRATCH_GLOB):
        with suppress(OSError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and time.time() - status.st_mtime > _MAX_IDLE:
                path.unlink()


def check_output_path(path: Path, error: type[AmpRewriteError]) -> None:
    """Raise `error` if the path is a folder or its folder does not exist."""
    if path.is_dir():
        raise error(f"cannot write {path}: it is a folder; name a file")
    if not path.parent.is_dir():
        raise error(f"cannot write {path}: the folder {path.parent} does not exist; create it first")


def make_parent_folder(path: Path) -> None:
    """Create the parent folder of a file, and its parents; ModelError on failure."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        reason = cause.strerror or cause
        raise ModelError(f"cannot create the folder {path.parent}: {reason}; name another output") from cause


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a scratch file, and replace the file at `path` with it if the body succeeds; OSError on failure."""
    sweep(path.parent)
    with ExitStack() as undo:
        temporary, file = scratch(path, undo)
        yield file
        file.flush()
        sync(file.fileno())
        temporary.replace(path)


def write_whole(path: Path, content: bytes) -> None:
    """Replace the content of a file atomically and keep its permissions; OSError on failure."""
    with replacing(path) as file:
        file.write(content)


def sync(descriptor: int) -> None:
    """Flush a file to disk if the file system supports it; OSError if a write fails."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED_ERRORS:
            raise


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder against other processes while the body runs, if folders can be locked."""
    with ExitStack() as stack:
        if sys.platform != "win32":
            import fcntl

            with suppress(OSError):
                descriptor = os.open(folder, os.O_RDONLY)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _close(file: BinaryIO) -> None:
    with suppress(OSError):  # on a full disk, this fails again after the first error
        file.close()


# -- paths and URLs --------------------------------------------------------------------------------------


_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/{1,3}([^/].*)", re.DOTALL)


def url_of(place: str | os.PathLike[str]) -> str:
    """Return a place as a URL; "" for a local path."""
    match = _URL.fullmatch(os.fspath(place))
    if match is None or os.path.lexists(place):
        return ""
    return f"{match[1]}://{match[2]}"


def name_of(place: str | os.PathLike[str]) -> str:
    """Return the display name of a file: its URL or its path."""
    return url_of(place) or os.fspath(place)


def is_collection(place: str | Path) -> bool:
    """True for a place that may contain several models: a folder, a URL, or a glob that is not the name of a file."""
    text = str(place)
    return bool(url_of(text)) or Path(text).is_dir() or (has_magic(text) and not os.path.lexists(text))
