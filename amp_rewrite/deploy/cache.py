"""The cache of converted models: a folder of limited size, keyed by model and options."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from amp_rewrite.errors import ConfigError, ModelError
from amp_rewrite.files.disk import alone, read_regular, write_whole
from amp_rewrite.files.fingerprint import digest
from amp_rewrite.files.model import Model
from amp_rewrite.reports.report import MAX_CHARACTERS

LIMIT = 20 << 30
"""Default limit of a cache in bytes."""

_FORM = 1  # version of the layout and of the keys
_MODEL, _REPORT, _SCRATCH = "model.onnx", "report.json", "scratch-"
_IN_USE = 600.0  # seconds after its last use in which an entry stays, since a process may be opening it
_ABANDONED = 24 * 3600.0  # seconds after which a scratch folder is abandoned


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A converted model, with its weights in the cache's files, and its report as JSON."""

    model: Model
    report: str


@dataclass(frozen=True, slots=True)
class Cache:
    """A folder of converted models; the least recently used entries are evicted first.

    Any number of processes of one user may use it at once. An entry appears atomically. A folder in which others may
    write is not used. Entries used in the last ten minutes are not evicted, so the limit may be exceeded for that long.

    Args:
        folder: the folder; it is made when needed.
        limit: the largest size in bytes.
    """

    folder: Path
    limit: int = LIMIT

    @classmethod
    def usual(cls, environ: Mapping[str, str]) -> Cache:
        """Return the user's cache: `amp-rewrite` in XDG_CACHE_HOME, by default ~/.cache.

        Raises:
            ConfigError: the user has no home folder, such as an unnamed user in a container.
        """
        stated = environ.get("XDG_CACHE_HOME", "")
        # XDG Base Directory Specification 0.8: a path that is not absolute is to be ignored.
        if Path(stated).is_absolute():
            return cls(Path(stated) / "amp-rewrite")
        try:
            return cls(Path.home() / ".cache" / "amp-rewrite")
        except RuntimeError as cause:
            raise ConfigError(
                "this user has no home folder for a cache; set XDG_CACHE_HOME, or pass cache='folder' or cache=None"
            ) from cause

    @staticmethod
    def key(model: Model, settings: str) -> str:
        """Return the key of a conversion: 64 hexadecimal digits of the model and its settings.

        Every byte of the model counts, independent of how it was loaded. Weights are streamed, O(bytes).
        """
        return hashlib.sha256(f"{settings}{digest(model)}".encode()).hexdigest()

    def load(self, key: str) -> CacheEntry | None:
        """Return the entry of a key; None if it is missing or damaged. A damaged entry is removed."""
        entry = self._root / key
        if not _private(self._home):
            return None
        try:
            kept = CacheEntry(Model.load(entry / _MODEL), _text(entry / _REPORT, MAX_CHARACTERS))
        except (ModelError, UnicodeDecodeError, FileNotFoundError, NotADirectoryError):
            self._remove(entry)
            return None
        except OSError as cause:
            if cause.errno == errno.EINVAL:  # not a regular file
                self._remove(entry)
            return None
        with suppress(OSError):  # the cache may be read-only
            os.utime(entry / _REPORT)
        return kept

    def store(self, key: str, model: Model, report: str) -> None:
        """Store a model and its report; existing entries stay.

        Raises:
            ModelError: the entry cannot be written.
        """
        if model.nbytes > self.limit:
            raise ModelError(
                f"it has {model.nbytes} bytes of weights, more than the {self.limit} of the cache; give a cache with"
                " a higher limit"
            )
        entry, scratch = self._root / key, self._scratch()
        try:
            _make_private(self._home)
            self._root.mkdir(mode=0o700, exist_ok=True)
            scratch.mkdir(mode=0o700)
            model.save(scratch / _MODEL)
            write_whole(scratch / _REPORT, report.encode())
            with suppress(OSError):  # another process stored the same entry first
                scratch.rename(entry)
        except OSError as cause:
            where = cause.filename or self.folder
            raise ModelError(f"{where}: {cause.strerror or cause}; name a folder that can be written") from cause
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        with suppress(OSError), alone(self._root):  # another process may be clearing the cache
            self._evict(entry)

    def _evict(self, newest: Path) -> None:
        now = time.time()
        for scratch in self._root.glob(f"{_SCRATCH}*"):
            if now - _used(scratch) > _ABANDONED:
                _delete(scratch)
        entries = {entry: _nbytes(entry) for entry in self._root.iterdir() if not entry.name.startswith(_SCRATCH)}
        total = sum(entries.values())
        for entry in sorted(entries, key=lambda entry: (_used(entry / _REPORT), entry.name)):
            if total <= self.limit:
                return
            if entry != newest and now - _used(entry / _REPORT) > _IN_USE:
                self._remove(entry)
                total -= entries[entry]

    @property
    def _root(self) -> Path:
        return self._home / "models"

    @property
    def _home(self) -> Path:
        return self.folder / f"v{_FORM}"

    def _scratch(self) -> Path:
        return self._root / f"{_SCRATCH}{secrets.token_hex(8)}"

    def _remove(self, entry: Path) -> None:
        """Rename an entry, then delete it: no process reads part of it."""
        gone = self._scratch()
        with suppress(OSError):
            entry.rename(gone)
            _delete(gone)


def _private(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    ours = not hasattr(os, "geteuid") or (status.st_uid == os.geteuid() and not status.st_mode & 0o022)
    return ours and folder.is_dir()


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _private(folder):
        raise ModelError(
            f"{folder} belongs to another user, or others may write in it, and what they write would run here; name"
            " another folder, or remove this one"
        )


def _text(file: Path, most: int) -> str:
    content = read_regular(file, most)
    if len(content) > most:
        raise ModelError(f"{file} is larger than {most} bytes")
    return content.decode()


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        path.unlink()


def _used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _nbytes(entry: Path) -> int:
    total = 0
    with suppress(OSError):
        for file in entry.iterdir():
            total += file.stat().st_size
    return total
