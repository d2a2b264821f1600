"""The cache of converted models: a folder of limited size, keyed by model and options."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from amp_rewrite.errors import ModelError
from amp_rewrite.files.disk import read_regular, write_whole
from amp_rewrite.files.fingerprint import digest
from amp_rewrite.files.model import Model
from amp_rewrite.reports.report import MAX_CHARACTERS

LIMIT = 20 << 30
"""Default limit of a cache in bytes."""

_FORM = 1  # version of the layout and of the keys
_MODEL, _REPORT = "model.onnx", "report.json"
_IN_USE = 600.0  # seconds after its last use in which an entry stays, since a process may be opening it


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
    def usual(cls, environ: Mapping[str, str]) -> Cache | None:
        """Return the cache of the user, in XDG_CACHE_HOME or ~/.cache; None for one without a home."""
        stated = Path(environ.get("XDG_CACHE_HOME", ""))
        # XDG Base Directory Specification 0.8: a path that is not absolute is to be ignored.
        try:
            folder = stated if stated.is_absolute() else Path.home() / ".cache"
        except RuntimeError:
            return None
        return cls(folder / "amp-rewrite")

    @staticmethod
    def key(model: Model, settings: str) -> str:
        """Return the key of a conversion: 64 hexadecimal digits of the model and its settings.

        Every byte of the model counts, independent of how it was loaded. Weights are streamed, O(bytes).
        """
        return hashlib.sha256(f"{settings}{digest(model)}".encode()).hexdigest()

    def load(self, key: str) -> CacheEntry | None:
        """Return the entry of a key; None if it is missing or damaged. A damaged entry is removed."""
        entry = self._home / key
        if not _private(self._home):
            return None
        try:
            kept = CacheEntry(Model.load(entry / _MODEL), read_regular(entry / _REPORT, MAX_CHARACTERS).decode())
        except (ModelError, OSError, UnicodeDecodeError):
            shutil.rmtree(entry, ignore_errors=True)
            return None
        with suppress(OSError):  # the cache may be read-only
            os.utime(entry)
        return kept

    def store(self, key: str, model: Model, report: str) -> None:
        """Store a model and its report; existing entries stay.

        Raises:
            ModelError: the entry cannot be written.
        """
        try:
            self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _private(self._home):
                raise ModelError(
                    f"{self._home} belongs to another user, or others may write in it, and what they write would run"
                    " here; name another folder, or remove this one"
                )
            with tempfile.TemporaryDirectory(dir=self._home, ignore_cleanup_errors=True) as scratch:
                made = Path(scratch) / key
                made.mkdir()
                model.save(made / _MODEL)
                write_whole(made / _REPORT, report.encode())
                with suppress(OSError):  # another process stored the same entry first
                    made.rename(self._home / key)
        except OSError as cause:
            where = cause.filename or self.folder
            raise ModelError(f"{where}: {cause.strerror or cause}; name a folder that can be written") from cause
        with suppress(OSError):  # another process may be clearing the cache
            self._evict()

    def _evict(self) -> None:
        """Remove the least recently used entries, leftovers of killed processes included, down to the limit."""
        sizes = {entry: _nbytes(entry) for entry in self._home.iterdir()}
        used = {entry: entry.stat().st_mtime for entry in sizes}
        total = sum(sizes.values())
        for entry in sorted(sizes, key=lambda entry: (used[entry], entry.name)):
            if total <= self.limit or time.time() - used[entry] < _IN_USE:
                return
            shutil.rmtree(entry, ignore_errors=True)
            total -= sizes[entry]

    @property
    def _home(self) -> Path:
        return self.folder / f"v{_FORM}"


def _private(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    ours = not hasattr(os, "geteuid") or (status.st_uid == os.geteuid() and not status.st_mode & 0o022)
    return ours and folder.is_dir()


def _nbytes(entry: Path) -> int:
    return sum(file.stat().st_size for file in entry.rglob("*") if file.is_file())
