"""Files of a batch, of this machine and of stores: names, folders and globs; stores through fsspec.

A URL is held as a Path, from whose text `url_of` makes it again. An object store cannot rename, but an object appears
whole: of a result, data files are put first, then the model that reads them.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import has_magic
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from amp_rewrite.errors import AmpRewriteError, MachineError, ModelError, one_line, spelled
from amp_rewrite.files.disk import is_several, make_folder, name_of, open_regular, replacing, undoing, url_of
from amp_rewrite.files.targets import data_files_in

SUFFIX = ".onnx"
_INSTALL = "install the extra, from a checkout: pip install '.[remote]', and the package of the store, such as s3fs"
_PIECE = 1 << 20  # bytes


def real(place: str | os.PathLike[str]) -> str:
    """Return the same text for all names of one file."""
    return os.path.normpath(Path(place)) if url_of(place) else os.path.realpath(place)


# -- stores ------------------------------------------------------------------------------------------


def _store_of(place: Path) -> tuple[Any, str]:
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
    try:
        yield
    except AmpRewriteError:
        raise
    except FileNotFoundError as cause:
        raise ModelError(f"cannot {verb} {url_of(place)}: there is no such file; name another") from cause
    except Exception as cause:  # the border to packages of stores, each with classes of its own
        reason = one_line(cause) or type(cause).__name__
        raise ModelError(f"cannot {verb} {url_of(place)}: {reason}; see that the store may be reached") from cause


def listed(place: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the files below a URL, or the matches of a glob, sorted: path, and path below the URL.

    Folders whose name begins with a dot are left out. ModelError if the store cannot be read.
    """
    store, root = _store_of(place)
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


def stored_data_files(place: Path) -> list[Path]:
    """Return the data files of a model in a store; only its graph is read if the store reads in parts."""
    store, path = _store_of(place)
    with _named_error(place, "read"), store.open(path, "rb") as file:
        return data_files_in(file, int(store.size(path)), place)


def size_of(place: Path) -> int | None:
    """Return the bytes of a file; None if it is not there."""
    if not url_of(place):
        return place.stat().st_size if os.path.lexists(place) else None
    store, path = _store_of(place)
    with _named_error(place, "read"):
        return int(store.size(path) or 0) if store.exists(path) else None


def state_of(place: Path) -> str:
    """Return a text for the state of a file: another state, another text."""
    if not url_of(place):
        status = place.stat()
        return f"{status.st_size}:{status.st_mtime_ns}"
    store, path = _store_of(place)
    with _named_error(place, "read"):
        return str(store.ukey(path))


def _fetched(source: Path, here: Path) -> Path:
    if not url_of(source):
        return source
    store, path = _store_of(source)
    here.parent.mkdir(parents=True, exist_ok=True)
    with _named_error(source, "fetch"):
        store.get_file(path, str(here))
    return here


def _put(here: Path, target: Path) -> None:
    store, path = _store_of(target)
    with _named_error(target, "write"):
        store.makedirs(store._parent(path), exist_ok=True)
        store.put_file(str(here), path)


@contextmanager
def staged(source: Path, target: Path, files: tuple[str, ...]) -> Iterator[tuple[Path, Path]]:
    """Yield local paths to read a model and to write it; files of stores go by a temporary folder.

    `files`: the external data of a source in a store.
    """
    if not (url_of(source) or url_of(target)):
        yield source, target
        return
    with undoing() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="amp-rewrite-")))
        read, written = folder / "read", folder / "written"
        try:
            here = _fetched(source, read / source)
            for file in files if url_of(source) else ():
                _fetched(Path(file), read / file)
            yield here, written / target if url_of(target) else target
        except AmpRewriteError as error:  # whose text names places that the user does not know
            text = str(error).replace(f"{read}{os.sep}", "").replace(f"{written}{os.sep}", "")
            raise type(error)(text) from error
        made = [path for path in written.rglob("*") if path.is_file()]
        for path in sorted(made, key=lambda path: (path.suffix == SUFFIX, path)):
            _put(path, path.relative_to(written))


def copy(source: Path, target: Path, *, overwrite: bool, resume: bool) -> None:
    """Copy a file, also from or to a store; with `resume`, leave an equal copy alone.

    In a store, a file of the same size counts as equal. ModelError if another file has the name, or if it cannot be
    copied.
    """
    try:
        if not overwrite and (size_of(target) is not None if url_of(target) else os.path.lexists(target)):
            if resume and _equal(source, target):
                return
            other = f" and differs from {name_of(source)}" if resume else ""
            way = f"name another folder, or replace it with {spelled('overwrite', True)}"
            raise ModelError(f"{name_of(target)} exists{other}; {way}")
        with staged(source, target, ()) as (here, there):
            make_folder(there)
            with open_regular(here, buffering=0) as file, replacing(there) as out:
                shutil.copyfileobj(file, out, _PIECE)
    except OSError as cause:
        raise ModelError(
            f"cannot copy {name_of(source)} to {name_of(target)}: {cause.strerror or cause}; allow it, or leave it out"
        ) from cause


def _equal(source: Path, target: Path) -> bool:
    if url_of(source) or url_of(target):
        return size_of(source) == size_of(target)
    return target.is_file() and filecmp.cmp(source, target, shallow=False)


# -- what sources stand for ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Item:
    """A file: its path, and its place below the named folder or glob."""

    path: Path
    relative: Path


def items_of(words: Sequence[str], out: Path, remarks: list[str]) -> dict[Path, Item]:
    """Return the files of folders, globs, URLs and names, in order, but none in the folder `out`.

    The files of a folder keep their places below it; of several folders, also the names of these. Folders whose name
    begins with a dot, and links to folders, are left out, with a remark. ModelError for a word that does not exist or
    matches nothing.
    """
    own = real(out)
    items: dict[Path, Item] = {}
    several = sum(Path(word).is_dir() for word in words) > 1
    for word in words:
        if url_of(word):
            more = list(_in_store(Path(word), own))
        elif Path(word).is_dir():
            begin = Path(Path(word).resolve().name) if several else Path()
            more = [Item(item.path, begin / item.relative) for item in _walk(Path(word), own, remarks)]
        elif is_several(word):
            more = list(_globbed(word, own))
            if not more:
                raise ModelError(f"no file matches {word!r}; see that it is spelled as the files are")
        elif os.path.lexists(word):
            more = [Item(Path(word), Path(Path(word).name))]
        else:
            raise ModelError(f"cannot read {word}: No such file or directory")
        for item in more:
            items.setdefault(item.path, item)
    return items


def _in_store(place: Path, out: str) -> Iterator[Item]:
    for path, relative in listed(place):
        if not Path(real(path)).is_relative_to(out) or real(place) == out:
            yield Item(path, relative)


def _walk(folder: Path, out: str, remarks: list[str]) -> Iterator[Item]:
    for place, folders, names in os.walk(folder, onerror=_unreadable):
        entered = []
        for name in sorted(folders):
            path = Path(place, name)
            if path.is_symlink():
                remarks.append(f"{path} is left out: a link to a folder; name that folder too, if it has models")
            elif name.startswith("."):
                remarks.append(f"{path} is left out: a hidden folder")
            elif os.path.realpath(path) != out:
                entered.append(name)
        folders[:] = entered
        for name in sorted(names):
            path = Path(place, name)
            if _special(path):
                remarks.append(f"{path} is left out: neither a file nor a folder")
            elif not _scratch(name):
                yield Item(path, path.relative_to(folder))


def _unreadable(cause: OSError) -> NoReturn:
    reason = cause.strerror or cause
    raise ModelError(f"cannot read the folder {cause.filename}: {reason}; allow it, or name other folders") from cause


def _globbed(pattern: str, out: str) -> Iterator[Item]:
    """Yield the files that a glob matches, sorted, each by its path below the part of the glob without wildcards."""
    parts = Path(pattern).parts
    plain = next(i for i, part in enumerate(parts) if has_magic(part))
    base = Path(*parts[:plain]) if plain else Path()
    for path in sorted(base.glob(str(Path(*parts[plain:])))):
        relative = path.relative_to(base) if plain else path
        hidden = any(part.startswith(".") for part in relative.parts[:-1])
        inside = Path(os.path.realpath(path)).is_relative_to(out)
        if not (hidden or inside or path.is_dir() or _special(path) or _scratch(path.name)):
            yield Item(path, relative)


def _scratch(name: str) -> bool:
    return name.startswith(".amp-rewrite.")


def _special(path: Path) -> bool:
    """True for pipes, devices and sockets, which must not be opened; a broken link is not special."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False
