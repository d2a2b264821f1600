"""The files of a batch, local or in stores read by fsspec: names, folders and globs.

URLs are Paths in this module, and `url_of` restores them. An object store cannot rename files, but uploads are atomic:
data files are uploaded first, then the model that refers to them.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from glob import has_magic
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from amp_rewrite.errors import AmpRewriteError, MachineError, ModelError, one_line, spelled
from amp_rewrite.files.disk import is_collection, make_parent_folder, name_of, open_regular, replacing, url_of
from amp_rewrite.files.store import data_files, data_files_in

SUFFIX = ".onnx"
_INSTALL = "install the store's package, such as s3fs, and the `remote` extra from a checkout: pip install '.[remote]'"
_CHUNK = 1 << 20  # bytes


def canonical(place: str | os.PathLike[str]) -> str:
    return os.path.normpath(Path(place)) if url_of(place) else os.path.realpath(place)


def _store_of(place: Path) -> tuple[Any, str]:
    url = url_of(place)
    try:
        from fsspec.core import url_to_fs

        store, path = url_to_fs(url)
    except ImportError as cause:
        raise MachineError(f"{url} requires the `fsspec` package: {one_line(cause)}; {_INSTALL}") from cause
    except ValueError as cause:
        way = "name a store that fsspec knows, such as s3:// or hf://"
        raise MachineError(f"{url}: {one_line(cause)}; {way}") from cause
    return store, str(path)


@contextmanager
def _store_errors(place: Path, verb: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as cause:
        raise ModelError(f"cannot {verb} {name_of(place)}: there is no such file; name another") from cause
    except Exception as cause:  # packages for stores have their own error classes
        reason = one_line(cause) or type(cause).__name__
        raise ModelError(f"cannot {verb} {name_of(place)}: {reason}; check that it can be reached") from cause


# -- single files ------------------------------------------------------------------------------------


def data_of(place: Path) -> tuple[str, ...]:
    """Return the data files of a model. From a store with partial reads, only the graph is read."""
    if not url_of(place):
        return tuple(map(canonical, data_files(place)))
    store, path = _store_of(place)
    with _store_errors(place, "read"), store.open(path, "rb") as file:
        return tuple(map(canonical, data_files_in(file, int(store.size(path)), place)))


def size_of(place: Path) -> int | None:
    if not url_of(place):
        return place.stat().st_size if os.path.lexists(place) else None
    store, path = _store_of(place)
    with _store_errors(place, "read"):
        return int(store.size(path) or 0) if store.exists(path) else None


def state_of(place: Path) -> str:
    """Return an identifier of the state of a file; it differs after each change, and is empty for a missing file."""
    if not url_of(place):
        try:
            status = place.stat()
        except OSError:
            return ""
        return f"{status.st_size}:{status.st_mtime_ns}"
    store, path = _store_of(place)
    with _store_errors(place, "read"):
        return str(store.ukey(path)) if store.exists(path) else ""


def _fetch(source: Path, local: Path) -> Path:
    if not url_of(source):
        return source
    store, path = _store_of(source)
    local.parent.mkdir(parents=True, exist_ok=True)
    with _store_errors(source, "fetch"):
        store.get_file(path, str(local))
    return local


@contextmanager
def staged(source: Path, target: Path, files: Iterable[str]) -> Iterator[tuple[Path, Path]]:
    """Yield local paths for reading and writing a model; files in stores go through a temporary folder.

    `files`: the external data of the source.
    """
    if not (url_of(source) or url_of(target)):
        yield source, target
        return
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-") as folder:
        read, written = Path(folder, "read"), Path(folder, "written")
        try:
            local = _fetch(source, read / source)
            for file in files:
                _fetch(Path(file), read / file)
            yield local, written / target if url_of(target) else target
        except AmpRewriteError as error:  # its message names the temporary folder
            text = str(error).replace(f"{read}{os.sep}", "").replace(f"{written}{os.sep}", "")
            raise type(error)(text) from error
        results = [path for path in written.rglob("*") if path.is_file()]
        for path in sorted(results, key=lambda path: (path.suffix == SUFFIX, path)):
            place = path.relative_to(written)
            store, name = _store_of(place)
            with _store_errors(place, "write"):
                store.makedirs(store._parent(name), exist_ok=True)
                store.put_file(str(path), name)


def copy(source: Path, target: Path, *, overwrite: bool, resume: bool) -> None:
    """Copy a file, possibly from or to a store; with `resume`, skip it if the target has the same size.

    Raises ModelError if the target is another file and `overwrite` is False, or if the copy fails.
    """
    try:
        existing = size_of(target)
        if resume and existing == size_of(source):
            return
        if existing is not None and not overwrite:
            way = f"name another folder, or use {spelled('overwrite', True)}"
            raise ModelError(f"{name_of(target)} already exists and differs from {name_of(source)}; {way}")
        with staged(source, target, ()) as (local, path):
            make_parent_folder(path)
            with open_regular(local, buffering=0) as file, replacing(path) as out:
                shutil.copyfileobj(file, out, _CHUNK)
    except OSError as cause:
        raise ModelError(
            f"cannot copy {name_of(source)} to {name_of(target)}: {cause.strerror or cause}; allow it, or leave it out"
        ) from cause


# -- files of folders and globs ------------------------------------------------------------------------


def files_of(arguments: Iterable[str], out: Path) -> dict[Path, Path]:
    """Return the files in folders, globs, URLs and names, in order, with their paths relative to the folder or glob.

    With several folders, the relative paths start with the name of the folder. Files in the folder `out`, in hidden
    folders and in links to folders are left out, as are pipes and devices. ModelError for an argument without files.
    """
    arguments = list(arguments)
    several = sum(Path(argument).is_dir() for argument in arguments) > 1
    files: dict[Path, Path] = {}
    for argument in arguments:
        base, pairs = list_store(Path(argument)) if url_of(argument) else _list_local(argument)
        root = Path(Path(argument).resolve().name) if several and Path(argument).is_dir() else Path()
        inside = Path(canonical(base)).is_relative_to(canonical(out))
        for path, relative in pairs:
            hidden = any(part.startswith(".") for part in relative.parts[:-1])
            scratch = relative.name.startswith(".amp-rewrite.")
            if not (hidden or scratch) and (inside or not Path(canonical(path.parent)).is_relative_to(canonical(out))):
                files.setdefault(path, root / relative)
    return files


def list_store(place: Path) -> tuple[Path, list[tuple[Path, Path]]]:
    """Return the folder of a URL or a glob in a store, and each file below it, with its path relative to the folder.

    Raises ModelError if the store cannot be read.
    """
    store, root = _store_of(place)
    with _store_errors(place, "list"):
        if has_magic(root):
            entries = store.glob(root, detail=True)
            parts = PurePosixPath(root).parts
            base = PurePosixPath(*parts[: next(i for i, part in enumerate(parts) if has_magic(part))])
            place = Path(*place.parts[: len(place.parts) - (len(parts) - len(base.parts))])
        else:
            entries, base = store.find(root, detail=True), PurePosixPath(root)
        if set(entries) == {root}:  # a file
            base, place = base.parent, place.parent
    below = [PurePosixPath(path).relative_to(base) for path in sorted(entries) if entries[path]["type"] == "file"]
    return place, [(place / relative, Path(relative)) for relative in below]


def _list_local(argument: str) -> tuple[Path, list[tuple[Path, Path]]]:
    path = Path(argument)
    if not is_collection(path):
        if not os.path.lexists(argument):
            raise ModelError(f"cannot read {argument}: No such file or directory")
        return path.parent, [(path, Path(path.name))]
    if path.is_dir():
        base, files = path, _below(path)
    else:
        plain = next(i for i, part in enumerate(path.parts) if has_magic(part))
        base = Path(*path.parts[:plain])
        files = [file for file in base.glob(str(Path(*path.parts[plain:]))) if not _is_special(file)]
        if not files:
            raise ModelError(f"no file matches {argument!r}; check its spelling")
    return base, [(file, file.relative_to(base)) for file in sorted(files)]


def _below(folder: Path) -> list[Path]:
    """Return the files below a folder, except in hidden folders; ModelError if a folder cannot be read."""
    files = list[Path]()
    for place, folders, names in os.walk(folder, onerror=_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [file for file in (Path(place, name) for name in names) if not _is_special(file)]
    return files


def _unreadable(cause: OSError) -> NoReturn:
    reason = cause.strerror or cause
    raise ModelError(f"cannot read the folder {cause.filename}: {reason}; make it readable, or name another") from cause


def _is_special(path: Path) -> bool:
    """True for folders, pipes, devices and sockets: they must not be opened; False for a broken link."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False
