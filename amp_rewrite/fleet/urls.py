"""URLs of stores among names of files. A URL is held as a Path, from whose text `url_of` makes it again."""

from __future__ import annotations

import os
import re
from pathlib import Path

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/{1,3}([^/].*)", re.DOTALL)
_LOCAL = ("file", "local")


def url_of(place: str | os.PathLike[str]) -> str:
    """Return the URL that a word or a path stands for; empty for files of this machine, also for file:// ones."""
    match = _URL.fullmatch(os.fspath(place))
    if match is None or match[1].lower() in _LOCAL or os.path.lexists(place):
        return ""
    return f"{match[1]}://{match[2]}"


def local(place: str | os.PathLike[str]) -> str:
    """Return a word as it is, and a file:// URL as the path that it names."""
    match = _URL.fullmatch(os.fspath(place))
    if match is None or match[1].lower() not in _LOCAL or os.path.lexists(place):
        return os.fspath(place)
    return f"/{match[2]}"


def name_of(place: str | os.PathLike[str]) -> str:
    """Return the name of a file for people: its URL, or its path."""
    return url_of(place) or os.fspath(place)


def real(place: str | os.PathLike[str]) -> str:
    """Return what tells whether two names are those of one file."""
    return os.path.normpath(Path(place)) if url_of(place) else os.path.realpath(place)
