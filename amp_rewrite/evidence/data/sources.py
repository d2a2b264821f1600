"""Sources of batches: files, folders, mappings, iterables, functions and random numbers."""

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
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import tee
from operator import call, length_hint
from pathlib import Path
from typing import Any

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import FeedError, advice, one_line, spelled
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.dims import MAX_AXES
from amp_rewrite.ir.schema import TENSOR
from amp_rewrite.reports.render import count
from amp_rewrite.runtime.ports import Port

Raw = Mapping[str, Any]
"""An unchecked batch: values by input name."""
Source = Callable[[], Iterator[object]]

_Reader = Callable[[], Raw]
_NUMBERED = re.compile(r"([0-9]{1,9})/(.+)", re.DOTALL)


def source_of(data: object, inputs: Collection[str]) -> tuple[str, Source, int | None]:
    """Return the origin of batches, a factory of iterators over them, and their number if known.

    `inputs`: names of the inputs; only their arrays are read from files.
    """
    if isinstance(data, (str, os.PathLike)):
        path = Path(data)
        readers = _files(path, inputs)
        return path.name or str(path), partial(map, call, readers), len(readers)
    one = isinstance(data, tuple) and bool(data) and all(map(is_array, data))  # a list is a list of batches
    if isinstance(data, Mapping) or is_array(data) or one:
        return "the arrays given", partial(iter, [data]), 1
    if isinstance(data, Iterator):
        return "the batches given", partial(copy, tee(data, 1)[0]), None  # each copy starts at the first batch
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Iterable):
        return "the batches given", lambda: map(data.__getitem__, range(len(data))), len(data)
    if isinstance(data, Iterable) and not isinstance(data, bytes):
        length = length_hint(data, -1)  # a DataLoader of an iterable data set raises TypeError
        return "the batches given", partial(iter, data), length if length >= 0 else None
    if callable(data):
        return f"{getattr(data, '__name__', type(data).__name__)}()", partial(_call, data), None
    raise FeedError(f"cannot feed {type(data).__qualname__}; give {FORMS}")


FORMS = (
    "a path, an array, a mapping from input names to arrays, a tuple of arrays in the order of the inputs, a list, a"
    " generator or a DataLoader of these, or a function that yields them"
)
"""Accepted forms of data, for error messages."""


def _call(data: Callable[[], object]) -> Iterator[object]:
    batches = data()
    if not isinstance(batches, Iterable) or isinstance(batches, Mapping) or is_array(batches):
        raise FeedError(f"the function for batches returned {type(batches).__qualname__}; make it yield batches")
    return iter(batches)


# -- files ---------------------------------------------------------------------------------------------------

LIMIT = 1 << 32
"""Maximum size of one batch in a file, in bytes."""
_KINDS = "name a .npz file, or a folder of .npz files"
_DAMAGE_ERRORS = (
    *(zipfile.BadZipFile, zlib.error, tokenize.TokenError, EOFError, LookupError, ArithmeticError, MemoryError),
    *(ValueError, TypeError, SyntaxError, RuntimeError),
)
"""Exceptions raised by numpy and zipfile for damaged files."""


def _files(path: Path, inputs: Collection[str]) -> list[_Reader]:
    if not path.is_dir():
        return _npz_readers(path, inputs)
    archives = sorted(path.glob("*.npz"), key=_natural_key)
    if not archives:
        raise FeedError(f"{path} contains no .npz files; write them with numpy.savez")
    return [reader for archive in archives for reader in _npz_readers(archive, inputs)]


def _natural_key(path: Path) -> list[tuple[int, str]]:
    parts = re.split(r"([0-9]+)", path.name)
    return [(int(part) if part.isascii() and part.isdigit() else 0, part) for part in parts]


def _npz_readers(path: Path, inputs: Collection[str]) -> list[_Reader]:
    """Return one reader per batch in a file; a file with names such as "0/x" has several batches."""
    archive = Npz(path)
    numbered = [_NUMBERED.fullmatch(name) for name in archive.names]
    if not all(numbered) or {*inputs}.issuperset(archive.names):
        return [partial(_read, archive, {name: name for name in archive.names}, inputs)] if archive.names else []
    batches: dict[int, dict[str, str]] = {}
    for match in filter(None, numbered):
        batches.setdefault(int(match[1]), {})[match[2]] = match[0]
    return [partial(_read, archive, names, inputs) for _, names in sorted(batches.items())]


def _read(archive: Npz, names: Mapping[str, str], inputs: Collection[str]) -> Raw:
    return {**dict.fromkeys(names), **archive.read({key: name for key, name in names.items() if key in inputs}, LIMIT)}


class Npz:
    """A .npz file. The constructor reads only the sizes of its arrays, and pickles are never loaded."""

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
        """Return the arrays with the names in `keys`, under their keys.

        Raise FeedError if they exceed `limit` bytes, or are not arrays.
        """
        total = sum(self._sizes.get(f"{name}.npy", 0) for name in keys.values())
        if total > limit:
            raise FeedError(f"{self.path}: a batch has {total} bytes, but at most {limit} are allowed; split it")
        with _readable(self.path), np.load(self.path) as file:
            arrays = {key: file[name] for key, name in keys.items()}
        for key, array in arrays.items():
            if not isinstance(array, np.ndarray):
                raise FeedError(f"{self.path}: {short(key)} is not an array; write arrays with numpy.savez")
        return arrays


def short(name: str) -> str:
    """Return a quoted name, cut to 80 characters."""
    return repr(name if len(name) <= 80 else f"{name[:80]} …")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise FeedError if the path is not a regular file, or if the body of the with statement cannot read it."""
    try:
        if not path.is_file():  # opening a pipe would wait for its writer
            why = "it is not a regular file" if path.exists() else "there is no such file"
            raise FeedError(f"cannot read {path}: {why}; {_KINDS}")
        yield
    except OSError as cause:
        raise FeedError(f"cannot read {path}: {cause.strerror or cause}; {_KINDS}") from cause
    except _DAMAGE_ERRORS as cause:
        why = one_line(cause)[:200] or type(cause).__name__
        raise FeedError(f"cannot read {path}: {why}; write arrays of numbers or text with numpy.savez") from cause


# -- one batch from the user --------------------------------------------------------------------------

_MAPPING = "a mapping from input names to arrays"


def is_array(value: object) -> bool:
    """True if a value is a numpy array or an array from another library, such as a tensor."""
    return hasattr(value, "__array__") and hasattr(value, "shape")


def as_array(value: object) -> Any:
    """Return a value as a numpy array of the same type; a torch tensor is detached and copied to the CPU."""
    if type(value).__module__.partition(".")[0] != "torch" or not is_array(value):
        return np.asarray(value)
    torch, tensor = sys.modules["torch"], value.detach().cpu()  # type: ignore[attr-defined]
    if tensor.dtype is not torch.bfloat16:
        return tensor.numpy()
    return tensor.contiguous().view(torch.int16).numpy().view(DType.BFLOAT16.numpy)  # numpy() rejects bfloat16


NOT_FED = "not fed: the model has no other input"
"""End of a note on ignored arrays."""


def named(batch: object, ports: tuple[Port, ...], where: str) -> tuple[Raw, str]:
    """Return a batch by input name, and a note on ignored arrays, or "".

    Arrays without names belong to the inputs without a default, in order. Additional arrays, such as labels, are
    ignored if the model has no other input. Raise FeedError for other batches; its message begins with `where`.
    """
    if isinstance(batch, Mapping):
        return batch, ""
    arrays = [batch] if is_array(batch) else list(batch) if isinstance(batch, (list, tuple)) else []
    if not arrays or not all(map(is_array, arrays)):
        raise FeedError(f"{where} must be {_MAPPING}, an array, or a tuple of arrays, not {type(batch).__qualname__}")
    needed = [port.name for port in ports if port.required]
    others = [port.name for port in ports if not port.required]
    fact, inputs = f"{where} is {count(len(arrays), 'array')}", ", ".join(map(repr, needed))
    if len(arrays) < len(needed):
        raise FeedError(
            f"{fact}, but the model has the inputs {inputs}; give a tuple of arrays in this order, or {_MAPPING}"
        )
    surplus = len(arrays) - len(needed)
    if surplus and others:
        raise FeedError(f"{fact}, and input {others[0]!r} has a default, so their order is ambiguous; give {_MAPPING}")
    note = f"{count(surplus, 'array')} after those for {inputs or 'no input'} {NOT_FED}"
    return dict(zip(needed, arrays, strict=False)), note if surplus else ""


# -- random batches ------------------------------------------------------------------------------------------

_DEFAULT_INTS = (0, 2)


@dataclass(frozen=True, slots=True)
class Drawing:
    """Options of random batches: the arguments of `Feed.randomly`, and three more.

    `scale`: the standard deviation of floats. `free`: the size of free dimensions without a known name; None means that
    `shapes` must contain it. `limit`: the maximum size of an array in bytes, counted as float64.
    """

    batches: int = 1
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    int_ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    seed: int = 0
    scale: float = 1.0
    free: int | None = None
    limit: int = LIMIT


def drawn(ports: Sequence[Port], options: Drawing) -> tuple[str, Source]:
    """Return the origin of random batches, and their source."""
    if options.batches < 1:
        raise FeedError(f"{options.batches} random batches requested; request at least one")
    if options.seed < 0:
        raise FeedError(f"the seed {options.seed} is negative; use 0 or more")
    assumed = dict[str, int]()
    shaped = _drawn_shapes(ports, options, assumed)
    _check_ranges(ports, options.int_ranges)

    def source() -> Iterator[Raw]:
        generator = np.random.default_rng(options.seed)
        for _ in range(options.batches):
            yield {port.name: _drawn(generator, port, shaped[port.name], options) for port in ports}

    facts = [f"random, seed {options.seed}", *([] if options.scale == 1 else [f"deviation {options.scale:g}"])]
    return ", ".join((*facts, *(f"{name} = {size}" for name, size in assumed.items()))), source


def _drawn_shapes(ports: Sequence[Port], options: Drawing, assumed: dict[str, int]) -> dict[str, tuple[int, ...]]:
    _check_known(options.shapes, ports, "shape")
    shapes = {}
    for port in ports:
        drawable = port.dtype not in (None, DType.STRING) and (port.dtype.floating or port.dtype.numpy.kind in "biu")
        if port.container != TENSOR or not drawable:
            type_ = f"{port.container}({port.dtype.spelling if port.dtype else 'unknown'})"
            raise FeedError(f"random data cannot fill input {port.name!r}, which is {type_}; give data for it")
        shape = options.shapes[port.name] if port.name in options.shapes else _assumed(port, assumed, options.free)
        declared = "no shape" if port.shape is None else f"the shape {port.dims}"
        sizes = tuple(dim for dim in shape or () if isinstance(dim, (int, np.integer)))
        if shape is None or len(sizes) != len(shape):
            example = tuple(dim if isinstance(dim, int) else 64 for dim in port.shape or (None, None))
            option = spelled("shapes", {port.name: example}, option=f"shape {port.name}={','.join(map(str, example))}")
            raise FeedError(f"input {port.name!r} has unknown sizes ({declared}); give all of them, as in {option}")
        if not port.admits(sizes) or any(size < 0 for size in sizes):
            raise FeedError(f"the shape {list(sizes)} does not fit input {port.name!r}, which has {declared}")
        if len(sizes) > MAX_AXES or math.prod(max(1, size) for size in sizes) * 8 > options.limit:
            limits = f"at most {MAX_AXES} axes and {options.limit} bytes"
            raise FeedError(f"the shape {list(sizes)} of input {port.name!r} is too large; use {limits}")
        shapes[port.name] = sizes
    return shapes


_DEFAULT_SIZES = {
    1: ("batch", "batch_size", "bs", "n", "b"),
    16: ("sequence", "sequence_length", "seq", "seq_len", "length", "len", "tokens", "time", "frames", "t", "s"),
    64: ("height", "width", "h", "w"),
}
"""Default sizes of free dimensions, each with the dimension names it applies to."""


def _assumed(port: Port, assumed: dict[str, int], free: int | None) -> tuple[int, ...] | None:
    """Return the shape of an input with default sizes for free dimensions, and add these to `assumed`.

    The first axis counts as the batch axis unless its name says otherwise. Return None if a size remains unknown.
    """
    sizes, added = [], dict[str, int]()
    for axis, dim in enumerate(port.shape or ()):
        if isinstance(dim, int):
            sizes.append(dim)
            continue
        word = (dim or "").lower()
        size = next((size for size, names in _DEFAULT_SIZES.items() if word in names), 1 if axis == 0 else free)
        if size is None:
            return None
        added[short(dim)[1:-1] if dim else f"axis {axis} of {short(port.name)[1:-1]}"] = size
        sizes.append(size)
    assumed.update(added)
    return tuple(sizes) if port.shape is not None else None


def _check_ranges(ports: Sequence[Port], ranges: Mapping[str, tuple[int, int]]) -> None:
    _check_known(ranges, ports, "range")
    kinds = {port.name: port.dtype.numpy for port in ports if port.dtype is not None}
    for name, (low, high) in ranges.items():
        if kinds[name].kind not in "iu":
            raise FeedError(f"a range of integers is given for input {name!r}, which is {kinds[name]}; omit the range")
        bounds = np.iinfo(kinds[name])
        if not bounds.min <= low < high <= bounds.max + 1:
            raise FeedError(f"the int range {low},{high} of input {name!r} is empty or does not fit {kinds[name]}")


def _check_known(names: Iterable[str], ports: Sequence[Port], what: str) -> None:
    known = [port.name for port in ports]
    for name in names:
        if name not in known:
            hint = advice(name, known, f"the inputs are {', '.join(map(repr, known))}" if known else "there are none")
            raise FeedError(f"a {what} is given for {short(name)}, which is not an input; {hint}")


def _drawn(generator: np.random.Generator, port: Port, shape: tuple[int, ...], options: Drawing) -> Array:
    assert port.dtype is not None
    dtype = port.dtype.numpy
    if port.dtype is DType.BOOL:
        return generator.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "iu":
        return generator.integers(*options.int_ranges.get(port.name, _DEFAULT_INTS), shape, dtype=dtype)
    return (generator.standard_normal(shape) * options.scale).astype(dtype)


def parse_shapes(texts: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Parse shapes by input name from texts such as "input=1,128"; "input=" is the shape of a scalar."""
    return {name: tuple(numbers) for name, numbers in (_parsed(text, "shape", "input=1,128") for text in texts)}


def parse_int_ranges(texts: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Parse ranges by input name from texts such as "input_ids=0,30522"."""
    ranges = {}
    for text in texts:
        name, numbers = _parsed(text, "int range", "input_ids=0,30522")
        if len(numbers) != 2:
            raise FeedError(f"the int range {text!r} is not of the form input_ids=0,30522")
        ranges[name] = (numbers[0], numbers[1])
    return ranges


def _parsed(text: str, kind: str, example: str) -> tuple[str, list[int]]:
    name, equals, written = text.rpartition("=")
    try:
        numbers = [int(part) for part in written.split(",")] if written.strip() else []
    except ValueError:
        numbers = None
    if not name or not equals or numbers is None:
        raise FeedError(f"the {kind} {text!r} is not of the form {example}")
    return name, numbers
