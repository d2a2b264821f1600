"""Files of stores by URL, through fsspec: listed, read, written, fetched and put."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from glob import has_magic
from pathlib import Path, PurePosixPath
from typing import Any

from amp_rewrite.errors import AmpRewriteError, MachineError, ModelError, one_line
from amp_rewrite.files.targets import data_files_in
from amp_rewrite.fleet.urls import url_of

_INSTALL = "install the extra, from a checkout: pip install '.[remote]', and the package of the store, such as s3fs"


def store_of(place: Path) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it. MachineError if it is not installed or not known."""
    url = url_of(place)
    try:
        from fsspec.core import url_to_fs

        store, path = url_to_fs(url)
    except ImportError as cause:
        raise MachineError(f"{url} needs fsspec: {one_line(cause)}; {_INSTALL}") from cause
    except ValueError as cause:
        way = "name a store that fsspec knows, such as s3:// or hf://"
        raise MachineError(f"{url}: {one_line(cause)}; {way}") from cause
    return store, str(path)


@contextmanager
def _named_error(place: Path, verb: str) -> Iterator[None]:
    """Turn what a store raises into a ModelError that names the file."""
    try:
        yield
    except AmpRewriteError:
        raise
    except FileNotFoundError as cause:
        raise ModelError(f"cannot {verb} {url_of(place)}: there is no such file; name another") from cause
    except Exception as cause:  # each store has errors of its own
        reason = one_line(cause) or type(cause).__name__
        raise ModelError(f"cannot {verb} {url_of(place)}: {reason}; see that the store may be reached") from cause


def listed(place: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the files below a URL, or those that it matches as a glob, sorted: path, and path below the URL.

    Folders whose name begins with a dot are left out. ModelError if the store cannot be read.
    """
    store, root = store_of(place)
    with _named_error(place, "list"):
        if has_magic(root):
            entries = store.glob(root, detail=True)
            parts = PurePosixPath(root).parts
            base = PurePosixPath(*parts[: next(i for i, part in enumerate(parts) if has_magic(part))])
            place = Path(*place.parts[: len(place.parts) - (len(parts) - len(base.parts))])
        else:
            entries, base = store.find(root, detail=True), PurePosixPath(root)
        if set(entries) == {root}:  # a file
            base, place = base.parent, place.parent
    for path in sorted(entries):
        relative = PurePosixPath(path).relative_to(base)
        if entries[path]["type"] == "file" and not any(part.startswith(".") for part in relative.parts[:-1]):
            yield place / relative, Path(relative)


def present(out: Path) -> set[Path]:
    """Return the files that are below a URL."""
    return {path for path, _ in listed(out)}


def data_files(place: Path) -> list[Path]:
    """Return the data files that a model in a store names; only its graph is read where the store reads in parts."""
    store, path = store_of(place)
    with _named_error(place, "read"), store.open(path, "rb") as file:
        return data_files_in(file, int(store.size(path)), place)


def read(place: Path, most: int) -> bytes:
    """Return at most so many bytes of a file in a store."""
    store, path = store_of(place)
    with _named_error(place, "read"), store.open(path, "rb") as file:
        return bytes(file.read(most))


def size_of(place: Path) -> int | None:
    """Return the bytes of a file; None if it is not there."""
    if not url_of(place):
        return place.stat().st_size if os.path.lexists(place) else None
    store, path = store_of(place)
    with _named_error(place, "read"):
        return int(store.size(path) or 0) if store.exists(path) else None


def fetched(source: Path, here: Path) -> Path:
    """Fetch a file and return its local path; a local file stays in place."""
    if not url_of(source):
        return source
    store, path = store_of(source)
    here.parent.mkdir(parents=True, exist_ok=True)
    with _named_error(source, "fetch"):
        store.get_file(path, str(here))
    return here


def put(here: Path, target: Path) -> None:
    """Put a file of this machine to a store. ModelError if that fails."""
    store, path = store_of(target)
    with _named_error(target, "write"):
        store.makedirs(store._parent(path), exist_ok=True)
        store.put_file(str(here), path)


def state_of(place: Path) -> str:
    """Return what changes when a file does, as its store tells it."""
    if not url_of(place):
        status = place.stat()
        return f"{status.st_size}:{status.st_mtime_ns}"
    store, path = store_of(place)
    with _named_error(place, "read"):
        return str(store.ukey(path))
