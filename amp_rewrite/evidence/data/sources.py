"""Sources of batches: files, folders, mappings, iterables and functions, each as a factory of iterators."""

from __future__ import annotations

import os
import re
import sys
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import partial
from itertools import tee
from operator import call
from pathlib import Path
from typing import Any

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import FeedError, one_line
from amp_rewrite.files.casting import Array
from amp_rewrite.reports.render import count
from amp_rewrite.runtime.ports import Port

Raw = Mapping[str, Any]
"""A batch by input name, before any other check."""
Source = Callable[[], Iterator[object]]

_Reader = Callable[[], Raw]
_NUMBERED = re.compile(r"([0-9]{1,9})/(.+)", re.DOTALL)


def source_of(data: object, known: Collection[str]) -> tuple[str, Source, int | None]:
    """Return the origin of batches, a factory of iterators over them, and their number if known.

    `known`: names of inputs; files are asked for no other arrays.
    """
    if isinstance(data, (str, os.PathLike)):
        path = Path(data)
        readers = _files(path, known)
        return path.name or str(path), partial(map, call, readers), len(readers)
    one = isinstance(data, tuple) and bool(data) and all(map(is_array, data))  # a list of arrays is one of batches
    if isinstance(data, Mapping) or is_array(data) or one:
        return "the arrays given", partial(iter, [data]), 1
    if isinstance(data, Iterator):
        return "the batches given", partial(copy, tee(data, 1)[0]), None  # each copy begins with the first batch
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Iterable):
        return "the batches given", lambda: map(data.__getitem__, range(len(data))), len(data)
    if isinstance(data, Iterable) and not isinstance(data, bytes):
        return "the batches given", partial(iter, data), _length(data)
    if callable(data):
        return f"{getattr(data, '__name__', type(data).__name__)}()", partial(_called, data), None
    raise FeedError(f"cannot feed {type(data).__qualname__}; give {FORMS}")


FORMS = (
    "a path, an array, a mapping from input names to arrays, a tuple of arrays in the order of the inputs, a list, a"
    " generator or a DataLoader of these, or a function that yields them"
)
"""Forms of data, for errors."""


def _length(data: Iterable[object]) -> int | None:
    try:
        return len(data)  # type: ignore[arg-type]
    except TypeError:
        return None


def _called(data: Callable[[], object]) -> Iterator[object]:
    batches = data()
    if not isinstance(batches, Iterable) or isinstance(batches, Mapping) or is_array(batches):
        raise FeedError(f"the function for batches gave {type(batches).__qualname__}; let it yield batches")
    return iter(batches)


# -- files ---------------------------------------------------------------------------------------------------

LIMIT = 1 << 32
"""Limit on the bytes of one batch in a file."""
_KINDS = "name a .npz file, or a folder of .npz files"
_DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, tokenize.TokenError, EOFError, LookupError, ArithmeticError, MemoryError),
    *(ValueError, TypeError, SyntaxError, RuntimeError),
)
"""Exceptions of numpy and zipfile on damaged files."""


def _files(path: Path, known: Collection[str]) -> list[_Reader]:
    if not path.is_dir():
        return _of_npz(path, known)
    archives = sorted(path.glob("*.npz"), key=_natural)
    if not archives:
        raise FeedError(f"{path} holds no .npz file; write some with numpy.savez")
    return [reader for archive in archives for reader in _of_npz(archive, known)]


def _natural(path: Path) -> list[tuple[int, str]]:
    parts = re.split(r"([0-9]+)", path.name)
    return [(int(part) if part.isascii() and part.isdigit() else 0, part) for part in parts]


def _of_npz(path: Path, known: Collection[str]) -> list[_Reader]:
    """Return readers of the batches in a file: one, or several with names such as "0/x"."""
    archive = Npz(path)
    numbered = [_NUMBERED.fullmatch(name) for name in archive.names]
    if not all(numbered) or {*known}.issuperset(archive.names):
        return [partial(_read, archive, {name: name for name in archive.names}, known)] if archive.names else []
    batches: dict[int, dict[str, str]] = {}
    for match in filter(None, numbered):
        batches.setdefault(int(match[1]), {})[match[2]] = match[0]
    return [partial(_read, archive, names, known) for _, names in sorted(batches.items())]


def _read(archive: Npz, names: Mapping[str, str], known: Collection[str]) -> Raw:
    return {**dict.fromkeys(names), **archive.read({own: name for own, name in names.items() if own in known}, LIMIT)}


class Npz:
    """A .npz file; sizes by name are read at once, arrays on request, pickles never."""

    def __init__(self, path: Path) -> None:
        """Raise FeedError if the file is not a .npz file."""
        self.path = path
        with _readable(path):
            file = np.load(path)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise FeedError(f"cannot read {path}: it is not a .npz file; write arrays with numpy.savez")
            with file, zipfile.ZipFile(path) as archive:
                self._sizes = {member.filename: member.file_size for member in archive.infolist()}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name.removesuffix(".npy") for name in self._sizes)

    def read(self, keys: Mapping[str, str], limit: int) -> dict[str, Array]:
        """Return arrays by the keys of `keys`. FeedError if they exceed `limit` bytes, or are not arrays of numbers."""
        total = sum(self._sizes.get(f"{name}.npy", 0) for name in keys.values())
        if total > limit:
            raise FeedError(f"{self.path} needs {total} bytes for one batch, more than the {limit} allowed")
        with _readable(self.path), np.load(self.path) as file:
            arrays = {key: file[name] for key, name in keys.items()}
        for key, array in arrays.items():
            if not isinstance(array, np.ndarray):
                raise FeedError(f"{self.path} holds {short(key)}, which is not an array; write it with numpy.savez")
        return arrays


def short(name: str) -> str:
    """Return a name from a file, quoted, cut to 80 characters."""
    return repr(name if len(name) <= 80 else f"{name[:80]} …")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise FeedError for a path other than a regular file, and for errors of reading it in the body."""
    try:
        if not path.is_file():  # opening a pipe would wait for its writer
            why = "it is not a regular file" if path.exists() else "there is no such file"
            raise FeedError(f"cannot read {path}: {why}; {_KINDS}")
        yield
    except OSError as cause:
        raise FeedError(f"cannot read {path}: {cause.strerror or cause}; {_KINDS}") from cause
    except _DAMAGE as cause:
        why = one_line(cause)[:200] or type(cause).__name__
        raise FeedError(f"cannot read {path}: {why}; write arrays of numbers or text with numpy.savez") from cause


# -- one batch as its user gives it --------------------------------------------------------------------------

_FORMS = "a mapping from input names to arrays"


def is_array(value: object) -> bool:
    """True for an array of numpy, or of another library, such as a tensor."""
    return hasattr(value, "__array__") and hasattr(value, "shape")


def as_array(value: object) -> Any:
    """Return a value as a numpy array; a tensor of torch from its device, without gradient, in its own type."""
    if type(value).__module__.partition(".")[0] != "torch" or not is_array(value):
        return np.asarray(value)
    torch, tensor = sys.modules["torch"], value.detach().cpu()  # type: ignore[attr-defined]
    if tensor.dtype is not torch.bfloat16:
        return tensor.numpy()
    return tensor.contiguous().view(torch.int16).numpy().view(DType.BFLOAT16.numpy)  # numpy itself has no bfloat16


NOT_FED = "not fed: the model has no other input"
"""The end of a note of arrays that are left out."""


def named(batch: object, ports: tuple[Port, ...], where: str) -> tuple[Raw, str]:
    """Return a batch by input name, and a note of arrays left out or "".

    Arrays without names are those of the inputs that have no default, in order. Arrays beyond them, such as labels, are
    left out if there is no other input. FeedError, beginning with `where`, for other batches.
    """
    if isinstance(batch, Mapping):
        return batch, ""
    arrays = [batch] if is_array(batch) else list(batch) if isinstance(batch, (list, tuple)) else []
    if not arrays or not all(map(is_array, arrays)):
        raise FeedError(f"{where} is {type(batch).__qualname__}; give {_FORMS}, an array, or a tuple of arrays")
    needed = [port.name for port in ports if port.required]
    spare = [port.name for port in ports if not port.required]
    fact, inputs = f"{where} is {count(len(arrays), 'array')}", ", ".join(map(repr, needed))
    if len(arrays) < len(needed):
        raise FeedError(
            f"{fact}, and the model has the inputs {inputs}; give a tuple of arrays in this order, or {_FORMS}"
        )
    left = len(arrays) - len(needed)
    if left and spare:
        raise FeedError(f"{fact}, and input {spare[0]!r} has a default: it or a label may be meant; give {_FORMS}")
    note = f"{count(left, 'array')} after those for {inputs or 'no input'} {NOT_FED}"
    return dict(zip(needed, arrays, strict=False)), note if left else ""
