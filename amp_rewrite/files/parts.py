"""Finished data files of a save that was interrupted: kept under hidden names, and taken up by the next attempt."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from onnx import ModelProto


class Parts:
    """Finished data files of models to be, in the folder of the first, `path`.

    Their names hold what they depend on, a hash of the light models: values in memory, and the path, the place and the
    state of the file of each weight. Parts that belong to another state are never taken up, and removed at the end.
    """

    def __init__(self, path: Path, models: Sequence[tuple[object, ModelProto]], shard: int | str | None) -> None:
        content = hashlib.sha256(repr(shard).encode())
        for _, proto in models:
            content.update(proto.SerializeToString(deterministic=True))
        own = hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]
        self._folder = path.parent
        self._any = f".amp-rewrite.{own}."
        self._begin = f"{self._any}{content.hexdigest()[:16]}."

    def keep(self, temporary: Path, number: int, digest: str) -> Path:
        """Rename a finished data file, so that it stays whatever happens; return its path."""
        return temporary.replace(self._folder / f"{self._begin}{number}.{digest}.part")

    def finished(self, number: int, size: int) -> tuple[Path, str] | None:
        """Return the path and the digest of a data file that an earlier attempt finished; None without one."""
        name = re.compile(rf"{re.escape(self._begin)}{number}\.([0-9a-f]{{16}})\.part")
        for path in sorted(self._folder.glob(f"{self._begin}{number}.*.part")):
            match = name.fullmatch(path.name)
            if match is not None and not path.is_symlink() and path.stat().st_size == size:
                return path, match[1]
        return None

    def clear(self) -> None:
        """Remove what earlier attempts at these models left."""
        for path in self._folder.glob(f"{self._any}*.part"):
            with suppress(OSError):
                path.unlink()
