"""Arrays in .npy and .npz files of unknown origin: sizes are checked before memory is taken; no pickle is read."""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Self

import numpy as np
from numpy.lib import format as npy

from amp_rewrite.errors import FeedError, one_line
from amp_rewrite.files.casting import Array

_LONGEST_HEADER = 10_000  # characters; numpy's own bound
_READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
# Exceptions of numpy and zipfile on damaged or hostile files.
_DAMAGE = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    zlib.error,
    EOFError,
    ValueError,
    TypeError,
    KeyError,
    SyntaxError,
    tokenize.TokenError,
    NotImplementedError,
    RuntimeError,
    OverflowError,
)


def of_npy(path: Path, limit: int) -> Array:
    """Read the array of a .npy file. Raise FeedError if it is damaged or needs more than `limit` bytes."""
    with _checked(path), path.open("rb") as file:
        return _array(file, path.stat().st_size, limit, str(path))


class Npz:
    """A .npz file; names are read at once, arrays on request."""

    def __init__(self, path: Path) -> None:
        """Raise FeedError if the file is not a .npz file of arrays."""
        self.path = path
        with _checked(path):
            self._archive = zipfile.ZipFile(path)  # stays open: opening takes a time linear in the members
        self._members: dict[str, zipfile.ZipInfo] = {}
        for member in self._archive.infolist():
            name = member.filename.removesuffix(".npy")
            if name == member.filename:
                raise FeedError(f"{path} holds {short(name)}, which is not an array; write it with numpy.savez")
            if name in self._members:
                raise FeedError(f"{path} holds {short(name)} twice; write it again with numpy.savez")
            self._members[name] = member

    def __reduce__(self) -> tuple[type[Self], tuple[Path]]:
        return type(self), (self.path,)  # another process opens the file for itself

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._members)

    def read(self, keys: Mapping[str, str], limit: int) -> dict[str, Array]:
        """Return arrays by the keys of `keys`. Raise FeedError if they exceed `limit` bytes."""
        total = sum(self._members[name].file_size for name in keys.values())
        if total > limit:
            raise FeedError(f"{self.path} needs {total} bytes for one batch, more than the {limit} allowed; {_SMALLER}")
        arrays = {}
        for key, name in keys.items():
            with _checked(self.path), self._archive.open(self._members[name]) as stream:
                size = self._members[name].file_size
                arrays[key] = _array(stream, size, limit, f"{self.path}: {short(name)}")
        return arrays


_SMALLER = "give smaller batches"


def short(name: str) -> str:
    """Return a name from a file, quoted, cut to 80 characters."""
    return repr(name if len(name) <= 80 else f"{name[:80]} …")


@contextmanager
def _checked(path: Path) -> Iterator[None]:
    """Raise FeedError for a path other than a regular file, and for errors of reading it in the body."""
    try:
        if not path.is_file():  # opening a pipe would wait for its writer
            why = "it is not a regular file" if path.exists() else "there is no such file"
            raise FeedError(f"cannot read {path}: {why}; name a .npz file, a .npy file or a folder of them")
        yield
    except OSError as cause:
        raise FeedError(f"cannot read {path}: {cause.strerror or cause}") from cause
    except _DAMAGE as cause:
        why = one_line(cause)[:200] or type(cause).__name__
        raise FeedError(f"{path} is damaged: {why}; write it again with numpy.save or numpy.savez") from cause


def _array(stream: IO[bytes], size: int, limit: int, where: str) -> Array:
    version = npy.read_magic(stream)
    if version not in _READERS:
        raise FeedError(f"{where} is of .npy version {version[0]}.{version[1]}; save a plain array of numbers")
    shape, fortran, dtype = _READERS[version](stream, max_header_size=_LONGEST_HEADER)
    if dtype.hasobject:
        raise FeedError(f"{where} holds pickled Python objects, which are not read; save an array of numbers or text")
    if dtype.names is not None or dtype.subdtype is not None:
        raise FeedError(f"{where} holds records; save one plain array for each input")
    if any(dim < 0 for dim in shape):
        raise FeedError(f"{where} has the negative shape {list(shape)}; save it again")
    needed = math.prod(shape) * max(dtype.itemsize, 1)
    if needed > limit:
        raise FeedError(f"{where} declares {list(shape)} of {dtype}, more than the {limit} bytes allowed; {_SMALLER}")
    if needed != (held := size - stream.tell()):
        raise FeedError(f"{where} declares {list(shape)} of {dtype}, {needed} bytes, but has {held}; save it again")
    flat = np.empty(math.prod(shape), dtype)
    target, done = flat.view(np.uint8).data if flat.nbytes else memoryview(b""), 0
    while done < len(target):
        read = stream.readinto(target[done:])  # type: ignore[attr-defined]
        if not read:
            raise FeedError(f"{where} ends {len(target) - done} bytes early; save it again")
        done += read
    return flat.reshape(shape, order="F" if fortran else "C")
