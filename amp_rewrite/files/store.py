"""Atomic writing of a model file and its data file.

Everything is first written to temporary files in the target folder. Then the data file gets a name with the hash of its
content, the model file is renamed, and the data files of the replaced model are removed. So at any moment a complete
old or a complete new model exists; if the caller names the data file and the name is taken, at most one of the two
exists.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from onnx import ModelProto, TensorProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError, PolicyError, spelled
from amp_rewrite.files import wire
from amp_rewrite.files.disk import alone, scratch, sweep, sync
from amp_rewrite.files.targets import LARGEST_SHAPE, check_target, data_files, models_beside, outdated, replaces
from amp_rewrite.files.tensors import Source, Sources, is_stub, nbytes, payload, source, without_values

LARGEST_FILE = (1 << 31) - 1  # protobuf reads no larger message
LARGEST_INLINE = 1_500_000_000  # bytes of tensors from which external data is the default

_SMALLEST_MOVED = 1 << 10
_PAGE, _PAGED_FROM, _ALIGN = 4096, 1 << 20, 64

Progress = Callable[[int, int], None]


class Destinations:
    """Destination of each tensor of a model: the model file, or a data file; then `data` has its pieces.

    `location`: the name of the data file; None for a model without one. Tied tensors share bytes there.
    """

    def __init__(self, sources: Sources, location: str | None) -> None:
        self.sources, self.location = sources, location
        self.data: list[wire.Piece] = []
        self._end = 0
        self._tied: dict[tuple[Source, int], int] = {}

    def __call__(self, tensor: TensorProto) -> list[wire.Piece] | None:
        if self.location is not None and _movable(tensor):
            bare = without_values(tensor)
            bare.data_location = TensorProto.EXTERNAL
            placed = {"location": self.location, "offset": self._place(tensor), "length": nbytes(tensor)}
            for key, value in placed.items():
                bare.external_data.add(key=key, value=str(value))
            return [bare.SerializeToString(deterministic=True)]
        if is_stub(tensor):
            bare, values = without_values(tensor), self._streamed(tensor)
            return [bare.SerializeToString(deterministic=True), wire.head(wire.RAW_DATA, values.nbytes), values]
        if tensor.ByteSize() > LARGEST_SHAPE:
            whole = partial(tensor.SerializeToString, deterministic=True)
            return [wire.StreamedPiece(tensor.ByteSize(), lambda: [whole()], tensor.name)]
        return None

    def _place(self, tensor: TensorProto) -> int:
        """Add a tensor to the data file; return its offset there."""
        key = (source(tensor), tensor.data_type) if is_stub(tensor) else None
        if key is not None and key in self._tied:
            return self._tied[key]
        count = nbytes(tensor)
        step = _PAGE if count >= _PAGED_FROM else _ALIGN
        offset = -(-self._end // step) * step
        self.data += [bytes(offset - self._end), self._streamed(tensor)]
        self._end = offset + count
        if key is not None:
            self._tied[key] = offset
        return offset

    def _streamed(self, tensor: TensorProto) -> wire.StreamedPiece:
        return wire.StreamedPiece(nbytes(tensor), partial(payload, tensor, self.sources), tensor.name)


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


@dataclass(frozen=True, slots=True)
class Saving:
    """A model to write: to a path, with a data file or without.

    `name`: that of the data file; "": after the model and its content. `read`: the file that the model came from.
    """

    path: Path
    read: Path | None
    overwrite: bool
    external: bool
    name: str = ""

    @classmethod
    def of(
        cls, path: Path, read: Path | None, nbytes: int, *, overwrite: bool, external_data: bool | str | None
    ) -> Saving:
        """Return how a model of `nbytes` is written. ModelError or PolicyError for impossible names of weights."""
        name = external_data if isinstance(external_data, str) else ""
        if name and (Path(name).name != name or name in (path.name, "..") or "\0" in name or "\\" in name):
            raise ModelError(f"{name!r} is not a name for the weights of {path}; give the plain name of another file")
        if name and "." not in name:  # "no" or "false" must not become a file
            fix = "give True, False, or the name of a file with its suffix, such as 'weights.data'"
            raise PolicyError(f"external_data={name!r} is str; {fix}")
        external = nbytes > LARGEST_INLINE if external_data is None else bool(external_data)
        return cls(path, read, overwrite, external, name)

    def save(self, proto: ModelProto, progress: Progress | None) -> None:
        """Write the model, as `Model.save` says."""
        path = self.path
        try:
            check_target(path, self.overwrite)
            kept = self._read_on(proto)
            if not path.is_symlink() and os.path.realpath(path) in kept:
                raise ModelError(f"cannot write {path}: weights of the model are still read from it; name another")
            sweep(path.parent)
            with Sources() as sources, ExitStack() as undo:
                written, data = self._written(proto, sources, progress, undo)
                with alone(path.parent):
                    check_target(path, self.overwrite)  # another process may have been faster
                    self._commit(written, data, kept, undo)
        except OSError as cause:
            raise ModelError(f"cannot write {path}: {cause.strerror or cause}; nothing was changed") from cause

    def _read_on(self, proto: ModelProto) -> frozenset[str]:
        """Source files of tensors not yet read."""
        if self.read is not None and replaces(self.path, self.read):
            return frozenset()
        return frozenset(source(tensor).path for tensor in wire.tensors(proto) if is_stub(tensor))

    def _written(
        self, proto: ModelProto, sources: Sources, progress: Progress | None, undo: ExitStack
    ) -> tuple[Path, list[tuple[Path, Path]]]:
        """Write the files under temporary names; return the model's, and both names of the data file, if any."""
        secret = secrets.token_hex(8)  # as long as the part of the hash that takes its place
        location = (self.name or f"{self.path.stem}.{secret}.data") if self.external else None
        places = Destinations(sources, location)
        body = wire.pieces(proto, places) or [proto.SerializeToString(deterministic=True)]
        if (size := wire.total(body)) > LARGEST_FILE:
            way = "" if self.external else "; use external data"
            raise ModelError(f"cannot write {self.path}: {size} bytes are more than protobuf can read{way}")
        written, data = _Written(size + wire.total(places.data), progress), []
        if places.data:
            temporary, file = scratch(self.path, undo)
            digest = hashlib.sha256()
            written.write(file, places.data, digest.update)
            own, named = secret.encode(), digest.hexdigest()[: len(secret)].encode()
            body = [piece.replace(own, named) if isinstance(piece, bytes) else piece for piece in body]
            data = [(temporary, self.path.parent / str(location).replace(secret, named.decode()))]
        temporary, file = scratch(self.path, undo)
        written.write(file, body)
        sources.confirm()
        return temporary, data

    def _commit(self, finished: Path, data: list[tuple[Path, Path]], kept: frozenset[str], undo: ExitStack) -> None:
        """Rename the written files and remove the data of the replaced model, except files in `kept`.

        Only one process at a time may run this: a file outdated for one may have just been written by another. Where a
        data file takes the name of an older one, the model that reads that one goes first.
        """
        path = self.path
        stale = [old for old in outdated(path, kept) if old not in (named for _, named in data)]
        for _, named in data:
            if self.name and os.path.lexists(named):
                self._make_room(named, kept)
        for written, named in [*data, (finished, path)]:
            if not os.path.lexists(named):
                undo.callback(named.unlink, missing_ok=True)
            written.replace(named)
        undo.pop_all()
        _sync_folder(path.parent)
        for old in stale:
            with suppress(OSError):
                old.unlink()

    def _make_room(self, named: Path, kept: frozenset[str]) -> None:
        """Remove the replaced model. ModelError if its data file has the name of a file that must stay."""
        if named.is_dir() or not self.overwrite or os.path.realpath(named) in kept:
            way = "name another" if self.overwrite else f"or replace it with {spelled('overwrite', True)}"
            raise ModelError(
                f"cannot write the weights of {self.path}: {named} exists; name other external data, {way}"
            )
        reader = next((other for other in models_beside(self.path) if named in data_files(other)), None)
        if reader is not None:
            raise ModelError(
                f"cannot write the weights of {self.path}: {reader} reads {named}; name other external data"
            )
        self.path.unlink(missing_ok=True)


class _Written:
    """Bytes written so far of all files of a model."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.done, self.total, self.progress = 0, total, progress

    def write(
        self, file: BinaryIO, pieces: list[wire.Piece], update: Callable[[bytes | memoryview], None] | None = None
    ) -> None:
        """Write pieces to a file and close it. `update`: that of a hash of them."""
        for chunk in _chunks(pieces):
            file.write(chunk)
            if update is not None:
                update(chunk)
            self.done += len(chunk)
            if self.progress is not None:
                self.progress(self.done, self.total)
        file.flush()
        sync(file.fileno())
        file.close()


def _chunks(pieces: list[wire.Piece]) -> Iterator[bytes | memoryview]:
    for piece in pieces:
        if isinstance(piece, bytes):
            yield piece
            continue
        count = 0
        for chunk in piece.chunks():
            count += len(chunk)
            yield chunk
        if count != piece.nbytes:
            raise ModelError(
                f"tensor {piece.tensor!r} has {count} bytes, but its dims and type need {piece.nbytes}; export the"
                " model again"
            )


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
