"""Who may have written a cache: folders of this user alone, and seals that only this user can make."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from amp_rewrite.errors import ModelError
from amp_rewrite.files.regular_files import open_regular
from amp_rewrite.files.scratch import alone

_KEY, _BYTES = "key", 32


def private(folder: Path) -> bool:
    """True if a folder belongs to this user and only this user may write in it; on Windows, if it is a folder."""
    try:
        return _private(folder.lstat()) and folder.is_dir()
    except OSError:
        return False


def _private(status: os.stat_result) -> bool:
    return not hasattr(os, "geteuid") or (status.st_uid == os.geteuid() and not status.st_mode & 0o022)


@dataclass(frozen=True)
class Seal:
    """A seal of texts with a secret key, made on first use in a folder that must be private."""

    folder: Path

    def of(self, *texts: str) -> str:
        """Return 64 hexadecimal digits that cannot be computed without the key (HMAC, RFC 2104, with SHA-256).

        OSError if the key cannot be made; ModelError if the folder is not private.
        """
        content = "".join(f"{len(text)}:{text}" for text in texts)
        return hmac.new(self._key, content.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()

    @cached_property
    def _key(self) -> bytes:
        make_private(self.folder)
        with alone(self.folder):
            known = self._known()
            if known is not None:
                return known
            key, scratch = secrets.token_bytes(_BYTES), self.folder / f"key-{secrets.token_hex(8)}"
            with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:  # noqa: PTH123
                file.write(key)
            scratch.replace(self.folder / _KEY)
        return key

    def _known(self) -> bytes | None:
        """Return the key; None without one, or if others may know it: it is a link, has two names, or can be read."""
        try:
            with open_regular(self.folder / _KEY, follow=False) as file:
                status, key = os.fstat(file.fileno()), file.read(_BYTES + 1)
        except OSError:
            return None
        secret = not hasattr(os, "geteuid") or (status.st_nlink == 1 and not status.st_mode & 0o077)
        return key if secret and _private(status) and len(key) == _BYTES else None


def make_private(folder: Path) -> None:
    """Make a folder that only this user may use. ModelError if it exists, and another user may write in it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not private(folder):
        raise ModelError(
            f"{folder} belongs to another user, or others may write in it, and what they write would run here; name"
            " another folder, or remove this one"
        )
