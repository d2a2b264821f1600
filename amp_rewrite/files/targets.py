"""Targets: the path of a model to write, its data files, and the place of each tensor in them."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import ModelProto, TensorProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError, PolicyError, spelled
from amp_rewrite.files import wire
from amp_rewrite.files.disk import check_place, open_regular
from amp_rewrite.files.foreign import TEXT
from amp_rewrite.files.tensors import Source, Sources, is_stub, nbytes, payload, source, without_values

LARGEST_SHAPE = 1 << 14
"""Bytes of a list of integers that may be a shape, which runtimes read before they open data files."""

_SMALLEST_MOVED = 1 << 10
_PAGE, _PAGED_FROM, _ALIGN = 4096, 1 << 20, 64
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKmMgGtT]?)(i?)[bB]?\s*")
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def shard_bytes(size: str | int) -> int:
    """Return the bytes of "5GB" or "512 MiB", powers of 1000 or of 1024, or of a number. PolicyError for other text."""
    match = _SIZE.fullmatch(str(size))
    count = 0.0 if match is None else float(match[1]) * (1024 if match[3] else 1000) ** _UNITS[match[2].lower()]
    if not count:
        raise PolicyError(f"{size!r} is not a size of shards; write it as 5GB or as 512MiB")
    return max(1, int(count))


class Layout:
    """The pieces of each data file, filled in the order of placement. Tied tensors share bytes.

    `shard`: the bytes from which another file begins, or None for one file.
    """

    def __init__(self, sources: Sources, shard: int | None = None) -> None:
        self.files: list[list[wire.Piece]] = []
        self._sources, self._shard, self._end = sources, shard, 0
        self._tied: dict[tuple[Source, int], tuple[int, int]] = {}

    def place(self, tensor: TensorProto) -> tuple[int, int]:
        """Return the number of the data file of a tensor, and its offset there."""
        key = (source(tensor), tensor.data_type) if is_stub(tensor) else None
        if key is not None and key in self._tied:
            return self._tied[key]
        count = nbytes(tensor)
        if not self.files or (self._shard is not None and self._end + count > self._shard):
            self.files.append([])
            self._end = 0
        step = _PAGE if count >= _PAGED_FROM else _ALIGN
        offset = -(-self._end // step) * step
        self.files[-1] += [bytes(offset - self._end), _streamed(tensor, self._sources)]
        self._end = offset + count
        place = len(self.files) - 1, offset
        if key is not None:
            self._tied[key] = place
        return place


def _streamed(tensor: TensorProto, sources: Sources) -> wire.StreamedPiece:
    return wire.StreamedPiece(nbytes(tensor), partial(payload, tensor, sources), tensor.name)


class Destinations:
    """Destination of each tensor of a model: streamed into the model file, placed in a `layout`, or kept."""

    def __init__(self, sources: Sources, layout: Layout | None) -> None:
        self.sources, self.layout = sources, layout

    def __call__(self, tensor: TensorProto) -> list[wire.Piece] | None:
        if self.layout is not None and _movable(tensor):
            return [_entry(tensor, *self.layout.place(tensor))]
        if is_stub(tensor):
            bare = without_values(tensor)
            if source(tensor).explicit:
                bare.data_location = TensorProto.DEFAULT
            values = _streamed(tensor, self.sources)
            return [bare.SerializeToString(deterministic=True), wire.head(wire.RAW_DATA, values.nbytes), values]
        if tensor.ByteSize() > LARGEST_SHAPE:
            whole = partial(tensor.SerializeToString, deterministic=True)
            return [wire.StreamedPiece(tensor.ByteSize(), lambda: [whole()], tensor.name)]
        return None


def _entry(tensor: TensorProto, number: int, offset: int) -> bytes:
    """Return the entry of a placed tensor in the model file, with the number of its data file in place of a name."""
    bare = without_values(tensor)
    bare.data_location = TensorProto.EXTERNAL
    for name, value in (("location", str(number)), ("offset", str(offset)), ("length", str(nbytes(tensor)))):
        bare.external_data.add(key=name, value=value)
    return bytes(bare.SerializeToString(deterministic=True))


def _movable(tensor: TensorProto) -> bool:
    """True if the tensor may be in a data file. Short integer lists may not, since they hold shapes."""
    kind = DType.of(tensor.data_type)
    if kind in (None, DType.STRING) or tensor.HasField("segment"):
        return False
    count = nbytes(tensor)
    if count < _SMALLEST_MOVED:
        return False
    if kind in (DType.INT64, DType.INT32) and len(tensor.dims) <= 1 and count <= LARGEST_SHAPE:
        return False
    return is_stub(tensor) or tensor.HasField("raw_data") or kind.bits >= 8


def located(body: list[wire.Piece], names: list[str]) -> list[wire.Piece]:
    """Return a model file with the names of data files in its tensors; `names` has them by number."""
    # other streamed pieces are already in memory (strings, typed fields of packed types)
    pieces = (piece if isinstance(piece, bytes) else b"".join(map(bytes, piece.chunks())) for piece in body)
    light = ModelProto.FromString(b"".join(pieces))
    for tensor in wire.tensors(light):
        if is_stub(tensor):
            tensor.external_data[0].value = names[int(tensor.external_data[0].value)]
    return [light.SerializeToString(deterministic=True)]


_LARGE = 50_000_000  # bytes


def check_target(path: Path, overwrite: bool, *, read: Path | None = None) -> None:
    """Raise ModelError if a model cannot be written to `path`, and say why. `read`: a model with data files to keep."""
    if "\0" in str(path):
        raise ModelError(f"cannot write {str(path)!r}: a name cannot hold a zero byte; name another")
    if path.suffix.lower() in TEXT:
        raise ModelError(f"cannot write {path}: only the binary format is written; use the suffix .onnx")
    check_place(path, ModelError)
    open_file = path.is_symlink() and str(path.readlink()).startswith("/proc/")  # of a process, such as /dev/stdout
    if (path.exists() and not path.is_file()) or open_file:
        raise ModelError(f"cannot write {path}: it is not a regular file; name another")
    if not overwrite and (path.exists() or path.is_symlink()):
        raise ModelError(f"{path} exists; name another output, or replace it with {spelled('overwrite', True)}")
    try:
        path.name.encode()
    except UnicodeEncodeError as cause:
        raise ModelError(f"cannot write {str(path)!r}: its name is not Unicode; name another") from cause
    if read is not None and any(replaces(path, data) for data in data_files(read)):
        raise ModelError(f"cannot write {path}: it holds the weights of {read}, which is being read; name another")


def replaces(path: Path, file: Path) -> bool:
    """True if writing to `path` replaces `file`. Writing to a link replaces only the link."""
    return not path.is_symlink() and path.exists() and os.path.realpath(path) == os.path.realpath(file)


def outdated(path: Path, kept: Collection[str]) -> list[Path]:
    """Data files left unused by a replacement of the model at `path`.

    They were written by `save`, and no link to the model, no other model in the folder and no entry of `kept` refers to
    them.
    """
    if path.is_symlink() or not path.is_file() or path.stat().st_nlink > 1:
        return []
    own = [file for file in data_files(path) if _own(path).fullmatch(file.name) and os.path.realpath(file) not in kept]
    if not own:
        return []
    shared = {file for other in models_beside(path) for file in data_files(other)}
    return [file for file in own if file not in shared]


def models_beside(path: Path) -> list[Path]:
    """Return the other models in the folder of a model."""
    near = (other for other in path.parent.iterdir() if other.suffix.lower() == ".onnx" and other.name != path.name)
    return [other for other in near if other.is_file()]


def foreign_data(path: Path) -> list[Path]:
    """Return data files of the model at `path` not written by `save`; other models may read them."""
    return [file for file in data_files(path) if not _own(path).fullmatch(file.name) and file.is_file()]


def _own(path: Path) -> re.Pattern[str]:
    return re.compile(re.escape(path.stem) + r"\.[0-9a-f]{16}\.data")


def data_files(path: Path) -> list[Path]:
    """Return the data files named by the model at `path`; none for other files."""
    try:
        with open_regular(path) as file:
            return data_files_in(file, os.fstat(file.fileno()).st_size, path)
    except OSError:
        return []


def is_large(path: Path) -> bool:
    """True if a model takes more than a moment to convert and check."""
    with suppress(OSError):
        return path.stat().st_size >= _LARGE or any(file.stat().st_size >= _LARGE for file in data_files(path))
    return False


def data_files_in(file: BinaryIO, size: int, path: Path) -> list[Path]:
    """Return the data files named by a model at `path`; none for other files."""
    names: set[str] = set()
    try:
        light = wire.lightened(file, size, LARGEST_SHAPE, lambda *_: True, str(path))
        if b"location" not in light:
            return []
        proto = ModelProto.FromString(light)
    except (ModelError, DecodeError):
        return []
    for tensor in wire.tensors(proto):
        locations = [entry.value for entry in tensor.external_data if entry.key == "location"]
        # protobuf returns bytes for text that is not UTF-8
        names |= {name for name in locations if isinstance(name, str) and "\0" not in name}
    return [path.parent / name for name in sorted(names)]
