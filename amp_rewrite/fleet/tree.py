"""Files of a batch: models and others, in folders, by globs and by name; and the names of results."""

from __future__ import annotations

import fnmatch
import glob
import os
import stat
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError, PolicyError, advice, spelled
from amp_rewrite.files.foreign import foreign
from amp_rewrite.files.loading import format_of
from amp_rewrite.files.targets import data_files
from amp_rewrite.fleet.stores import SUFFIX, listed, local, real, url_of
from amp_rewrite.fleet.stores import data_files as stored_data_files


@dataclass(frozen=True, slots=True)
class Item:
    """A file: its path, and its place below the folder, the glob or the files that were named."""

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


@dataclass(frozen=True, slots=True)
class FileGlobs:
    """Files to take: those that one of `include` matches, or all without one, but none that `exclude` matches.

    A glob without "/" is one for names of files and folders, another one for paths below the source.
    """

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()

    def leaves(self, relative: PurePath) -> bool:
        """True if a file or folder is to be left out."""
        return any(_matches(relative, glob) for glob in self.exclude)

    def takes(self, relative: PurePath) -> bool:
        """True if a file is to be taken."""
        if self.leaves(relative):
            return False
        return not self.include or any(_matches(relative, glob) for glob in self.include)


def _matches(relative: PurePath, pattern: str) -> bool:
    """True if a glob matches a file, or a folder that it is in."""
    pattern = pattern.removeprefix("./").rstrip("/")
    places = [relative, *relative.parents[:-1]]
    return any(fnmatch.fnmatchcase(place.as_posix() if "/" in pattern else place.name, pattern) for place in places)


def is_batch(word: str | Path) -> bool:
    """True if a word stands for any number of models: a folder, a URL, or a glob that is not the name of a file."""
    text = str(word)
    return bool(url_of(text)) or Path(text).is_dir() or (glob.has_magic(text) and not os.path.lexists(text))


def find(sources: Iterable[str | os.PathLike[str]], choice: FileGlobs, out: Path) -> Listing:
    """Return the files that sources stand for, in order, but none in the folder `out`.

    The files of one folder keep their places below it; of several, those below the folder above. Folders whose name
    begins with a dot, and links to folders, are left out.

    ModelError for a source that does not exist or matches nothing, and if none of the files is a model.
    """
    words = [local(source) for source in sources]
    listing = Listing()
    own = real(out)
    items: dict[Path, Item] = {}
    named = [Path(word) for word in words if not is_batch(word)]
    base = _base(named)
    several = sum(Path(word).is_dir() for word in words) > 1
    for word in words:
        if not is_batch(word):
            path = Path(word)
            if not os.path.lexists(path):
                raise ModelError(f"cannot read {path}: No such file or directory")
            more: Iterable[Item] = [Item(path, _below(path, base))]
        elif url_of(word):
            more = list(_in_store(Path(word), own))
        elif Path(word).is_dir():
            begin = Path(Path(word).resolve().name) if several else Path()
            more = [Item(item.path, begin / item.relative) for item in _walk(Path(word), own, choice, listing.remarks)]
        else:
            more = list(_globbed(word, own))
            if not more:
                raise ModelError(f"no file matches {word!r}; see that it is spelled as the files are")
        for item in more:
            if choice.takes(item.relative):
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
    """Yield the files below a URL, but none below `out`."""
    for path, relative in listed(place):
        if not Path(real(path)).is_relative_to(out) or real(place) == out:
            yield Item(path, relative)


def _no_models(words: Sequence[str], others: int) -> str:
    hints = [hint for word in words if Path(word).is_dir() and (hint := foreign(Path(word)))]
    if hints:
        return hints[0]
    what = f"{others} other files" if others else "no file that is taken"
    way = f"name another folder, or widen {spelled('include')} and {spelled('exclude')}"
    return f"no {SUFFIX} model in {', '.join(words[:3])} ({what}); {way}"


def _base(named: Sequence[Path]) -> Path:
    folders = {str(path.parent.resolve()) for path in named}
    try:
        return Path(os.path.commonpath(folders)) if folders else Path()
    except ValueError:  # several drives
        return Path()


def _below(path: Path, base: Path) -> Path:
    folder = path.parent.resolve()
    return folder.relative_to(base) / path.name if folder.is_relative_to(base) else Path(path.name)


def _walk(folder: Path, out: str, choice: FileGlobs, remarks: list[str]) -> Iterator[Item]:
    """Yield the files of a folder and those below it, sorted; without recursion, since folders may be deep.

    Folders that are excluded are not looked into: they may be large, or not readable.
    """
    pending = [(folder, Path())]
    while pending:
        place, relative = pending.pop()
        try:
            with os.scandir(place) as entries:
                listed = sorted(entries, key=lambda entry: entry.name)
        except OSError as cause:
            reason = cause.strerror or cause
            raise ModelError(f"cannot read the folder {place}: {reason}; exclude it, or allow it") from cause
        folders = []
        for entry in listed:
            path, below = place / entry.name, relative / entry.name
            if choice.leaves(below):
                continue
            if entry.is_dir(follow_symlinks=False):
                if entry.name.startswith("."):
                    remarks.append(f"{path} is left out: a hidden folder")
                elif os.path.realpath(path) != out:
                    folders.append((path, below))
            elif entry.is_dir():
                remarks.append(f"{path} is left out: a link to a folder; name that folder too, if it has models")
            elif _special(path):
                remarks.append(f"{path} is left out: neither a file nor a folder")
            elif not _scratch(entry.name):
                yield Item(path, below)
        pending.extend(reversed(folders))


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


# -- names -------------------------------------------------------------------------------------------

SAME = "{stem}.onnx"
"""The rule by which models keep their names."""
_WORDS = ("stem", "type", "folder")


@dataclass(frozen=True, slots=True)
class NamingRule:
    """A rule such as "{stem}_fp16.onnx"; {stem} is the source's name without .onnx, {type} the low type."""

    text: str
    to: DType

    @classmethod
    def of(cls, text: str, to: DType) -> NamingRule:
        """Return the rule in a text. PolicyError for one that names no .onnx file in the same folder."""
        words = fields_of(text, "name", _WORDS[:2])
        if not text.endswith(".onnx") or "stem" not in words or {*text} & {"/", "\\", "\0"}:
            way = "write {stem} once and .onnx at its end, without a folder, as in '{stem}_fp16.onnx'"
            raise PolicyError(f"{spelled('name', text)} is not a rule for names; {way}")
        return cls(text, to)

    def model(self, source: Path) -> str:
        """Return the name of the model that is made of a file."""
        return self.text.format(stem=source.stem, type=self.to.spelling)


def fields_of(text: str, keyword: str, known: tuple[str, ...] = _WORDS) -> set[str]:
    """Return the words in braces in a rule. PolicyError for an unknown one, or braces that do not match."""
    try:
        parts = [part for part in string.Formatter().parse(text) if part[1] is not None]
    except ValueError as error:
        raise PolicyError(f"{spelled(keyword, text)}: {error}; double a brace that is part of a name") from error
    for _, name, form, conversion in parts:
        if name not in known or form or conversion:
            words = ", ".join(f"{{{word}}}" for word in known)
            raise PolicyError(
                f"{spelled(keyword, text)}: unknown word {{{name}}}; {advice(name, known, f'use one of {words}')}"
            )
    return {str(part[1]) for part in parts}


def placed(rule: str, source: Path, relative: Path) -> str:
    """Return a path that belongs to a model: a rule with {stem}, and {folder} for its folder below the source's."""
    return rule.format(stem=source.stem, folder=relative.parent.as_posix()) if "{" in rule else rule
