"""Sources of batches: files, folders, mappings, iterables and functions, each as a factory of iterators."""

from __future__ import annotations

import math
import os
import re
import sys
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import call
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
from numpy.lib import format as npy

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import FeedError, one_line
from amp_rewrite.files.casting import Array
from amp_rewrite.reports.render import count
from amp_rewrite.runtime.ports import Port

Raw = Mapping[str, Any]
"""A batch by input name, before any other check."""
Source = Callable[[], Iterator[object]]


class FileBatch(dict[str, Any]):
    """A batch from a file of a folder."""

    def __init__(self, arrays: Raw, file: str) -> None:
        super().__init__(arrays)
        self.file = file


_Reader = Callable[[], Raw]
_NUMBERED = re.compile(r"([0-9]{1,9})/(.+)", re.DOTALL)


def source_of(data: object, ports: tuple[Port, ...], limit: int) -> tuple[str, Source, int | None]:
    """Return the origin of batches, a factory of iterators over them, and their number if known."""
    if isinstance(data, (str, os.PathLike)):
        path = Path(data)
        readers = _files(path, ports, limit)
        return path.name or str(path), partial(map, call, readers), len(readers)
    one = isinstance(data, tuple) and bool(data) and all(map(is_array, data))  # a list of arrays is one of batches
    if isinstance(data, Mapping) or is_array(data) or one:
        return "the arrays given", partial(iter, [data]), 1
    if isinstance(data, Iterator):
        return "the batches given", partial(iter, _BufferedBatches(data)), None
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


class _BufferedBatches(Iterable[object]):
    """Batches of an iterator, kept in memory as they are read."""

    def __init__(self, batches: Iterator[object]) -> None:
        self._rest, self._kept, self._bytes = batches, list[object](), 0

    def __iter__(self) -> Iterator[object]:
        number = 0
        while number < len(self._kept) or self._read():
            yield self._kept[number]
            number += 1

    def _read(self) -> bool:
        """Read one more batch. FeedError if all together take more than LIMIT bytes, as of an iterator without end."""
        for batch in self._rest:
            self._bytes += nbytes(batch)
            if self._bytes > LIMIT:
                raise FeedError(
                    f"the batches of a {type(self._rest).__name__} take more than {LIMIT} bytes, and are kept in"
                    " memory; give the function that makes them, or fewer batches (itertools.islice)"
                )
            self._kept.append(kept(batch))
            return True
        return False


LIMIT = 1 << 32
"""Default limit on the bytes of one batch from a file, and on those of all batches of an iterator."""


def _called(data: Callable[[], object]) -> Iterator[object]:
    batches = data()
    if not isinstance(batches, Iterable) or isinstance(batches, Mapping) or is_array(batches):
        raise FeedError(f"the function for batches gave {type(batches).__qualname__}; let it yield batches")
    return iter(batches)


def _files(path: Path, ports: tuple[Port, ...], limit: int) -> list[_Reader]:
    if path.is_dir():
        return _of_folder(path, ports, limit)
    if path.suffix.lower() == ".npz":
        return _of_npz(path, ports, limit)
    if path.suffix.lower() == ".npy":
        return [partial(_of_single, path, ports, limit)]
    if not path.exists():
        raise FeedError(f"cannot read {path}: there is no such file; name a .npz file, a .npy file or a folder of them")
    raise FeedError(f"cannot read {path}: it is neither .npz nor .npy nor a folder; write arrays with numpy.savez")


def _of_single(path: Path, ports: tuple[Port, ...], limit: int) -> Raw:
    needed = [port.name for port in ports if port.required]
    if len(needed) != 1:
        raise FeedError(f"{path} is one array, and the model has the inputs {', '.join(needed)}; write a .npz of them")
    return {needed[0]: of_npy(path, limit)}


def _of_npz(path: Path, ports: tuple[Port, ...], limit: int) -> list[_Reader]:
    archive = Npz(path)
    known = {port.name for port in ports}
    numbered = [_NUMBERED.fullmatch(name) for name in archive.names]
    if known.issuperset(archive.names) or not all(numbered):
        for match in numbered:
            if match and match[0] not in known:
                raise FeedError(
                    f"{path} mixes numbered names such as {short(match[0])} with others; number all or none"
                )
        everything = partial(_of_archive, archive, {name: name for name in archive.names}, known, limit)
        return [everything] if archive.names else []
    batches: dict[int, dict[str, str]] = {}
    for match in filter(None, numbered):
        batch = batches.setdefault(int(match[1]), {})
        if match[2] in batch:
            raise FeedError(f"{path} holds {short(match[2])} of batch {int(match[1])} twice; write it again")
        batch[match[2]] = match[0]
    return [partial(_of_archive, archive, batches[number], known, limit) for number in sorted(batches)]


def _of_archive(archive: Npz, keys: Mapping[str, str], known: Collection[str], limit: int) -> Raw:
    read = {key: name for key, name in keys.items() if key in known}
    return {**dict.fromkeys(keys), **archive.read(read, limit)}


def _of_folder(folder: Path, ports: tuple[Port, ...], limit: int) -> list[_Reader]:
    paths = _listed(folder)
    archives, arrays = ([path for path in paths if path.suffix.lower() == suffix] for suffix in (".npz", ".npy"))
    if archives and arrays:
        raise FeedError(f"{folder} holds .npy files and .npz files; keep one kind, so that batches are clear")
    if not archives and not arrays:
        raise FeedError(f"{folder} holds no .npz file and no .npy file; write some with numpy.savez")
    if archives:
        return [partial(_filed, reader, path.name) for path in archives for reader in _of_npz(path, ports, limit)]
    known = {port.name for port in ports}
    return [partial(_of_arrays, arrays, known, limit)]


def _of_arrays(paths: Sequence[Path], known: Collection[str], limit: int) -> Raw:
    return {path.stem: of_npy(path, limit) if path.stem in known else None for path in paths}


def _filed(reader: _Reader, file: str) -> FileBatch:
    return FileBatch(reader(), file)


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted((path for path in folder.iterdir() if not path.name.startswith(".")), key=_natural)
    except OSError as cause:
        raise FeedError(f"cannot read {folder}: {cause.strerror or cause}") from cause


def _natural(path: Path) -> list[tuple[int, str]]:
    parts = re.split(r"([0-9]+)", path.name)
    return [(int(part) if part.isascii() and part.isdigit() else 0, part) for part in parts]


# -- files of unknown origin: sizes are checked before memory is taken; no pickle is read -------------

_LONGEST_HEADER = 10_000  # characters; numpy's own bound
_READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_DAMAGE = (zipfile.BadZipFile, zlib.error, tokenize.TokenError, EOFError, LookupError, ArithmeticError)
_DAMAGE_INSIDE = (ValueError, TypeError, SyntaxError, RuntimeError)
"""Exceptions of numpy and zipfile on damaged or hostile files."""


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
    except (*_DAMAGE, *_DAMAGE_INSIDE) as cause:
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
    data = stream.read(needed)
    if len(data) < needed:
        raise FeedError(f"{where} ends {needed - len(data)} bytes early; save it again")
    return np.ndarray(shape, dtype, bytearray(data), order="F" if fortran else "C")


# -- one batch as its user gives it ------------------------------------------------------------------

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


def nbytes(batch: object) -> int:
    """Return the bytes of the arrays and numbers in a batch, or in other mappings and sequences of those."""
    if isinstance(batch, (Mapping, list, tuple)):
        return sum(map(nbytes, batch.values() if isinstance(batch, Mapping) else batch))
    return int(getattr(batch, "nbytes", sys.getsizeof(batch)))


def kept(batch: object) -> object:
    """Return a batch with copies of its arrays: a generator may fill the same ones again."""
    if isinstance(batch, Mapping):
        return {name: kept(part) for name, part in batch.items()}
    if isinstance(batch, (list, tuple)):
        return tuple(map(kept, batch))
    return np.array(as_array(batch)) if is_array(batch) else batch


def named(batch: object, ports: tuple[Port, ...], where: str) -> tuple[Raw, str]:
    """Return a batch by input name, and a note of arrays left out or "".

    Arrays without names are those of the inputs that have no default, in order. Arrays beyond them, such as labels, are
    left out if there is no other input. FeedError, beginning with `where`, for other batches.
    """
    if isinstance(batch, Mapping):
        return batch, ""
    arrays = [batch] if is_array(batch) else list(batch) if isinstance(batch, (list, tuple)) else []
    if not arrays or not all(map(is_array, arrays)):
        inside = " and ".join(sorted({type(item).__name__ for item in arrays}))
        kind = f"{type(batch).__qualname__}{' of ' + inside if inside else ''}"
        raise FeedError(f"{where} is {kind}; give {_FORMS}, an array, or a tuple of arrays")
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
    note = f"{count(left, 'array')} after those for {inputs or 'no input'} not fed: the model has no other input"
    return dict(zip(needed, arrays, strict=False)), note if left else ""
