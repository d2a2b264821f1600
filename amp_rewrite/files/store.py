"""Atomic writing of a model file and its data file.

Everything is first written to temporary files in the target folder. Then the data file gets a name with the hash of
its content, the model file is renamed, and the data file of the replaced model is removed. So at any moment a complete
old or a complete new model exists.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection, Generator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import ModelProto, TensorProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError, spelled
from amp_rewrite.files import wire
from amp_rewrite.files.prefetch import WORTH_IT, prefetch
from amp_rewrite.files.regular import open_regular
from amp_rewrite.files.scratch import alone, scratch, sweep, sync
from amp_rewrite.files.tensors import Source, Sources, is_stub, nbytes, payload, source, without_values

LARGEST_FILE = (1 << 31) - 1  # protobuf reads no larger message
LARGEST_INLINE = 1_500_000_000  # bytes of tensors from which external data is the default

_SMALLEST_MOVED = 1 << 10
_LARGEST_SHAPE = 1 << 14
_PAGE, _PAGED_FROM, _ALIGN = 4096, 1 << 20, 64
_BEGUN_AT = 1 << 24  # bytes

Progress = Callable[[int, int], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor of the data file: `nbytes` bytes at `offset`."""

    tensor: TensorProto
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Saving:
    """Where a model is written, and how. `read`: the file that it came from; `external`: large tensors go beside it."""

    path: Path
    read: Path | None
    overwrite: bool
    external: bool

    def save(self, proto: ModelProto, progress: Progress | None) -> None:
        """Write the model, as `Model.save` says."""
        try:
            check_target(self.path, self.overwrite)
            kept = _read_on(proto, self.path, self.read)
            if not self.path.is_symlink() and os.path.realpath(self.path) in kept:
                raise ModelError(f"cannot write {self.path}: weights of the model are still read from it; name another")
            sweep(self.path.parent)
            with Sources() as sources, ExitStack() as undo:
                self._write(proto, kept, sources, undo, progress or _silent)
        except OSError as cause:
            raise ModelError(f"cannot write {self.path}: {cause.strerror or cause}; nothing was changed") from cause

    def _write(
        self, proto: ModelProto, kept: Collection[str], sources: Sources, undo: ExitStack, progress: Progress
    ) -> None:
        layout: list[Placed] = []
        body = wire.pieces(proto, _Replace(sources, layout if self.external else None))
        if body is None:
            body = [proto.SerializeToString(deterministic=True)]
        total = wire.total(body) + sum(placed.nbytes for placed in layout)
        written = _Counter(total, progress)
        data: tuple[Path, Path] | None = None
        if layout:
            temporary, file = scratch(self.path, undo)
            digest = _write_data(_Output(file, written), layout, sources)
            data = temporary, self.path.parent / f"{self.path.stem}.{digest}.data"
            body = _located(body, data[1].name)
        if wire.total(body) > LARGEST_FILE:
            raise ModelError(
                f"cannot write {self.path}: {wire.total(body)} bytes are more than protobuf can read"
                + ("" if self.external else "; use external data")
            )
        model, model_file = scratch(self.path, undo)
        _write_model(_Output(model_file, written), body, sources)
        sources.confirm()
        with alone(self.path.parent):
            check_target(self.path, self.overwrite)  # another process may have been faster
            _commit(self.path, model, data, kept, undo)


def _silent(done: int, total: int) -> None:
    pass


def check_target(path: Path, overwrite: bool, *, read: Path | None = None) -> None:
    """Raise ModelError if a model cannot be written to `path`, and say why. `read`: a model whose data files stay."""
    if "\0" in str(path):
        raise ModelError(f"cannot write {str(path)!r}: a name cannot hold a zero byte; name another")
    if path.suffix.lower() in (".onnxtxt", ".onnxtext", ".textproto", ".prototxt", ".pbtxt", ".json"):
        raise ModelError(f"cannot write {path}: only the binary format is written; use the suffix .onnx")
    if not path.parent.is_dir():
        raise ModelError(f"cannot write {path}: the folder {path.parent} does not exist; make it first")
    if path.is_dir():
        raise ModelError(f"cannot write {path}: it is a folder; name a file")
    if path.exists() and not path.is_file():
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
    return not path.is_symlink() and path.exists() and path.resolve() == file.resolve()


def _commit(path: Path, model: Path, data: tuple[Path, Path] | None, kept: Collection[str], undo: ExitStack) -> None:
    """Rename the written files and remove the data of the replaced model, except files in `kept`.

    Only one process at a time may run this: a file outdated for one may have just been written by another.
    """
    outdated = [old for old in _outdated(path, kept) if data is None or old != data[1]]
    if data is not None:
        written, named = data
        if not named.exists():
            undo.callback(named.unlink, missing_ok=True)
        written.replace(named)
    model.replace(path)
    undo.pop_all()
    _sync_folder(path.parent)
    for old in outdated:
        with suppress(OSError):
            old.unlink()


def _read_on(proto: ModelProto, path: Path, read: Path | None) -> frozenset[str]:
    """Files that the model at `read` still needs, if it is not the replaced one."""
    if read is not None and replaces(path, read):
        return frozenset()
    return frozenset(source(tensor).path for tensor in wire.tensors(proto) if is_stub(tensor))


def _outdated(path: Path, kept: Collection[str]) -> list[Path]:
    """Data files that become unused when the model at `path` is replaced.

    They were written by `save`, and no link to the model, no other model in the folder and no entry of `kept` refers
    to them.
    """
    if path.is_symlink() or not path.is_file() or path.stat().st_nlink > 1:
        return []
    own = [file for file in data_files(path) if _own(path).fullmatch(file.name) and os.path.realpath(file) not in kept]
    if not own:
        return []
    near = (other for other in path.parent.iterdir() if other.suffix.lower() == ".onnx" and other.name != path.name)
    others = [other for other in near if other.is_file()]
    shared = {file for other in others for file in data_files(other)}
    return [file for file in own if file not in shared]


class _Replace:
    """Destination of each tensor: streamed into the model file, placed in the `layout` (tied stubs once), or kept."""

    def __init__(self, sources: Sources, layout: list[Placed] | None) -> None:
        self.sources, self.layout = sources, layout
        self.end = 0
        self.tied: dict[tuple[Source, int], int] = {}

    def __call__(self, tensor: TensorProto) -> list[wire.Piece] | None:
        if self.layout is not None and _movable(tensor):
            return [self._place(tensor, self.layout)]
        if is_stub(tensor):
            bare = without_values(tensor)
            if source(tensor).explicit:
                bare.data_location = TensorProto.DEFAULT
            count = nbytes(tensor)
            streamed = wire.Streamed(count, partial(payload, tensor, self.sources))
            return [bare.SerializeToString(deterministic=True), wire.head(wire.RAW_DATA, count), streamed]
        if tensor.ByteSize() > _LARGEST_SHAPE:
            return [wire.Streamed(tensor.ByteSize(), lambda: [tensor.SerializeToString(deterministic=True)])]
        return None

    def _place(self, tensor: TensorProto, layout: list[Placed]) -> bytes:
        """Place a tensor; return its entry in the model file, without the name of the data file."""
        count = nbytes(tensor)
        key = (source(tensor), tensor.data_type) if is_stub(tensor) else None
        offset = None if key is None else self.tied.get(key)
        if offset is None:
            step = _PAGE if count >= _PAGED_FROM else _ALIGN
            offset = -(-self.end // step) * step
            self.end = offset + count
            layout.append(Placed(tensor, offset, count))
            if key is not None:
                self.tied[key] = offset
        bare = without_values(tensor)
        bare.data_location = TensorProto.EXTERNAL
        for name, value in (("location", ""), ("offset", str(offset)), ("length", str(count))):
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
    if kind in (DType.INT64, DType.INT32) and len(tensor.dims) <= 1 and count <= _LARGEST_SHAPE:
        return False
    return is_stub(tensor) or tensor.HasField("raw_data") or kind.bits >= 8


def _located(body: list[wire.Piece], name: str) -> list[wire.Piece]:
    """Return the model file with the name of the data file in its tensors."""
    # other streamed pieces are already in memory (strings, typed fields of packed types)
    light = ModelProto.FromString(b"".join(_bytes(piece) for piece in body))
    for tensor in wire.tensors(light):
        if is_stub(tensor):
            tensor.external_data[0].value = name
    return [light.SerializeToString(deterministic=True)]


def _bytes(piece: wire.Piece) -> bytes:
    return piece if isinstance(piece, bytes) else b"".join(map(bytes, piece.chunks()))


class _Counter:
    """Bytes written so far, reported as they grow."""

    def __init__(self, total: int, progress: Progress) -> None:
        self.done, self.total, self.progress = 0, total, progress

    def add(self, count: int) -> None:
        self.done = min(self.done + count, self.total)
        self.progress(self.done, self.total)


class _Output:
    """A file written sequentially. Every 16 MB the system is advised to start writing to disk, so the final sync is
    short."""

    def __init__(self, file: BinaryIO, written: _Counter) -> None:
        self.file, self.written = file, written
        self.begun = self.end = 0

    def write(self, chunk: bytes | memoryview) -> None:
        self.file.write(chunk)
        self.end += len(chunk)
        self.written.add(len(chunk))
        if self.end - self.begun >= _BEGUN_AT:
            self._begin()

    def _begin(self) -> None:
        if hasattr(os, "posix_fadvise"):
            self.file.flush()
            with suppress(OSError):  # an advice
                # Linux starts writing pages to be dropped, and drops only pages already on disk: none yet
                os.posix_fadvise(self.file.fileno(), self.begun, self.end - self.begun, os.POSIX_FADV_DONTNEED)
        self.begun = self.end

    def finish(self) -> None:
        """Sync the file to disk and close it."""
        self.file.flush()
        sync(self.file.fileno())
        self.file.close()


def _write_data(out: _Output, layout: list[Placed], sources: Sources) -> str:
    """Write the data file, close it, and return the first 16 hex digits of the SHA-256 of its content."""
    digest = hashlib.sha256()
    end = 0
    with closing(_soon(_placed(layout, sources), sources, sum(placed.nbytes for placed in layout))) as pieces:
        for placed, chunk in pieces:
            if placed.offset > end:  # its first chunk
                padding = bytes(placed.offset - end)
                out.write(padding)
                digest.update(padding)
                end = placed.offset
            out.write(chunk)
            digest.update(chunk)
            end += len(chunk)
    out.finish()
    return digest.hexdigest()[:16]


def _placed(layout: list[Placed], sources: Sources) -> Generator[tuple[Placed, bytes | memoryview], None, None]:
    for placed in layout:
        count = 0
        for chunk in payload(placed.tensor, sources):
            count += len(chunk)
            yield placed, chunk
        _check_length(placed.tensor.name, count, placed.nbytes)


def _write_model(out: _Output, body: list[wire.Piece], sources: Sources) -> None:
    with closing(_soon(_chunks(body), sources, wire.total(body))) as chunks:
        for chunk in chunks:
            out.write(chunk)
    out.finish()


def _soon(pieces: Generator[T, None, None], sources: Sources, total: int) -> Generator[T, None, None]:
    """Prefetch the pieces, `total` bytes together, if that saves time."""
    return prefetch(pieces, sources) if total >= WORTH_IT else pieces


def _chunks(body: list[wire.Piece]) -> Generator[bytes | memoryview, None, None]:
    for piece in body:
        if isinstance(piece, bytes):
            yield piece
            continue
        count = 0
        for chunk in piece.chunks():
            count += len(chunk)
            yield chunk
        _check_length("", count, piece.nbytes)


def _check_length(name: str, count: int, expected: int) -> None:
    if count != expected:
        raise ModelError(
            f"tensor {name!r} has {count} bytes, but its dims and type need {expected}; export the model again"
        )


def _sync_folder(folder: Path) -> None:
    """Sync renames to disk, if folders can be synced."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def foreign_data(path: Path) -> list[Path]:
    """Return data files of the model at `path` that `save` did not write; other models may read them."""
    return [file for file in data_files(path) if not _own(path).fullmatch(file.name) and file.is_file()]


def _own(path: Path) -> re.Pattern[str]:
    return re.compile(re.escape(path.stem) + r"\.[0-9a-f]{16}\.data")


def data_files(path: Path) -> list[Path]:
    """Return the data files that the model at `path` names; none for a file that is not a model."""
    names: set[str] = set()
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            light = wire.lightened(file, size, _LARGEST_SHAPE, lambda *_: True, str(path))
        if b"location" not in light:
            return []
        proto = ModelProto.FromString(light)
    except (OSError, ModelError, DecodeError):
        return []
    for tensor in wire.tensors(proto):
        locations = [entry.value for entry in tensor.external_data if entry.key == "location"]
        # protobuf returns bytes for text that is not UTF-8
        names |= {name for name in locations if isinstance(name, str) and "\0" not in name}
    return [path.parent / name for name in sorted(names)]
