"""Files of a batch: models and others, in folders, by globs and by name."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from amp_rewrite.errors import ModelError
from amp_rewrite.files.disk import is_several, url_of
from amp_rewrite.files.foreign import foreign
from amp_rewrite.files.loading import format_of
from amp_rewrite.files.targets import data_files
from amp_rewrite.fleet.stores import SUFFIX, listed, real
from amp_rewrite.fleet.stores import data_files as stored_data_files


@dataclass(frozen=True, slots=True)
class Item:
    """A file: its path, and its place below the folder or the glob that was named."""

    path: Path
    relative: Path


@dataclass(slots=True)
class Listing:
    """Models, other files, and remarks on what was left out.

    `data`: the external data of each model that has some.
    """

    models: list[Item] = field(default_factory=list)
    others: list[Item] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    data: dict[Path, tuple[str, ...]] = field(default_factory=dict)


def find(sources: Iterable[str | os.PathLike[str]], out: Path) -> Listing:
    """Return the files that sources stand for, in order, but none in the folder `out`.

    The files of a folder keep their places below it; of several folders, also the names of these. Folders whose name
    begins with a dot, and links to folders, are left out.

    ModelError for a source that does not exist or matches nothing, and if none of the files is a model.
    """
    words = [os.fspath(source) for source in sources]
    listing = Listing()
    own = real(out)
    items: dict[Path, Item] = {}
    named = [Path(word) for word in words if not is_several(word)]
    several = sum(Path(word).is_dir() for word in words) > 1
    for word in words:
        if not is_several(word):
            path = Path(word)
            if not os.path.lexists(path):
                raise ModelError(f"cannot read {path}: No such file or directory")
            more: Iterable[Item] = [Item(path, Path(path.name))]
        elif url_of(word):
            more = list(_in_store(Path(word), own))
        elif Path(word).is_dir():
            begin = Path(Path(word).resolve().name) if several else Path()
            more = [Item(item.path, begin / item.relative) for item in _walk(Path(word), own, listing.remarks)]
        else:
            more = list(_globbed(word, own))
            if not more:
                raise ModelError(f"no file matches {word!r}; see that it is spelled as the files are")
        for item in more:
            items.setdefault(item.path, item)
    single = {path for path in named if format_of(path) is not None and path.suffix.lower() != ".json"}
    for item in items.values():
        kind = listing.models if item.path.suffix.lower() == SUFFIX or item.path in single else listing.others
        kind.append(item)
    if not listing.models:
        raise ModelError(_no_models(words, len(listing.others)))
    weights: set[str] = set()
    for item in listing.models:
        named_by = stored_data_files(item.path) if url_of(item.path) else data_files(item.path)
        if files := tuple(map(real, named_by)):
            listing.data[item.path] = files
            weights.update(files)
    listing.others = [item for item in listing.others if real(item.path) not in weights]
    return listing


def _in_store(place: Path, out: str) -> Iterator[Item]:
    for path, relative in listed(place):
        if not Path(real(path)).is_relative_to(out) or real(place) == out:
            yield Item(path, relative)


def _no_models(words: Sequence[str], others: int) -> str:
    hints = [hint for word in words if Path(word).is_dir() and (hint := foreign(Path(word)))]
    if hints:
        return hints[0]
    what = f"{others} other files" if others else "no files"
    return f"no {SUFFIX} model in {', '.join(words[:3])} ({what}); name another folder"


def _walk(folder: Path, out: str, remarks: list[str]) -> Iterator[Item]:
    """Yield the files of a folder and those below it, sorted. ModelError for a folder that cannot be read."""
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
    plain = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    base = Path(*parts[:plain]) if plain else Path()
    for path in sorted(base.glob(str(Path(*parts[plain:])))):
        relative = path.relative_to(base) if plain else path
        hidden = any(part.startswith(".") for part in relative.parts[:-1])
        inside = Path(os.path.realpath(path)).is_relative_to(out)
        if not (hidden or inside or path.is_dir() or _special(path) or _scratch(path.name)):
            yield Item(path, relative)


def _scratch(name: str) -> bool:
    """True for what an interrupted run of this package left behind."""
    return name.startswith(".amp-rewrite.")


def _special(path: Path) -> bool:
    """True for pipes, devices and sockets, which must not be opened; a broken link is not special."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False
