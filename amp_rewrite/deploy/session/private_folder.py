"""Folders of this user alone."""

from __future__ import annotations

import os
from pathlib import Path

from amp_rewrite.errors import ModelError


def private(folder: Path) -> bool:
    """True if a folder belongs to this user and only this user may write in it; on Windows, if it is a folder."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    ours = not hasattr(os, "geteuid") or (status.st_uid == os.geteuid() and not status.st_mode & 0o022)
    return ours and folder.is_dir()


def make_private(folder: Path) -> None:
    """Make a folder for this user alone. ModelError if it exists, and another user may write in it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not private(folder):
        raise ModelError(
            f"{folder} belongs to another user, or others may write in it, and what they write would run here; name"
            " another folder, or remove this one"
        )
