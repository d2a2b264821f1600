"""A store of digests of models, which avoids computing them again."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from amp_rewrite.deploy.session.private_folder import make_private, private
from amp_rewrite.errors import ModelError
from amp_rewrite.files import wire
from amp_rewrite.files.fingerprint import full_digest
from amp_rewrite.files.model import Model
from amp_rewrite.files.regular_files import read_regular
from amp_rewrite.files.tensors import is_stub, source

_RACY = 2_000_000_000  # nanoseconds: the coarsest resolution of times on file systems in use (FAT)
_MOST = 1000  # digests that are remembered
_DIGITS = 64


@dataclass(frozen=True, slots=True)
class Digests:
    """A folder of digests of models with weights in files, valid until these files change.

    A file is identified by path, device, inode, size, and times of writing and of change in nanoseconds. As in git's
    index, a file changed so recently that another change could have the same time is hashed again. Any number of
    processes may use the folder; it has up to a thousand digests, and the oldest are removed first. A folder in which
    others may write is not used.
    """

    folder: Path

    def of(self, model: Model) -> str:
        """Return `full_digest(model)`, from the folder if the model has not changed."""
        identity = _identity(model)
        if identity is None:
            return full_digest(model)
        known = self._known(identity)
        if known is None:
            known = full_digest(model)
            self._remember(identity, known)
        return known

    def _known(self, identity: str) -> str | None:
        if not private(self.folder):
            return None
        try:
            text = read_regular(self.folder / identity, _DIGITS).decode("ascii")
        except (OSError, UnicodeDecodeError):
            return None
        return text if re.fullmatch(f"[0-9a-f]{{{_DIGITS}}}", text) else None

    def _remember(self, identity: str, digest: str) -> None:
        """Store a digest, ignoring errors, since a cache may be read-only."""
        with suppress(OSError, ModelError):
            make_private(self.folder)
            scratch = self.folder / f"scratch-{secrets.token_hex(8)}"
            scratch.write_text(digest, encoding="ascii")
            scratch.replace(self.folder / identity)
            every = sorted(self.folder.iterdir(), key=lambda path: path.stat().st_mtime)
            for path in every[:-_MOST]:
                path.unlink(missing_ok=True)


def _identity(model: Model) -> str | None:
    """Return a sha256 of everything but the weights in files, and of the states of these files; None without such
    weights, with some of a program in memory, or if a file is missing or was changed a moment ago."""
    stubs = [tensor for tensor in wire.tensors(model.proto) if is_stub(tensor)]
    # a stub is serialized with its source, which includes the stamp of the loaded file
    light = wire.pieces(model.proto, lambda t: [t.SerializeToString(deterministic=True)] if is_stub(t) else None)
    if not stubs or light is None or any(source(stub).in_memory for stub in stubs):
        return None
    digest = hashlib.sha256()
    for piece in light:
        if not isinstance(piece, bytes):
            return None
        digest.update(piece)
    now = time.time_ns()
    for path in sorted({source(stub).path for stub in stubs}):
        try:
            status = os.stat(path)  # noqa: PTH116 a path of a stub is text
        except OSError:
            return None
        if max(status.st_mtime_ns, status.st_ctime_ns) > now - _RACY:
            return None
        state = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        digest.update(f"{path}\0{state}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()
