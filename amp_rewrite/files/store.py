"""Atomic writing of a model file and its data file.

All output is first written to scratch files in the target folder. Then the data file gets a name with the hash of its
content, the model file is renamed, and the data files of the replaced model are removed. At any moment, either the
complete old model or the complete new one exists. The exception is a data file that the caller names and that already
exists: for a moment, neither model does.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import ModelProto, TensorProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError, PolicyError, spelled
from amp_rewrite.files import wire
from amp_rewrite.files.disk import check_output_path, locked, open_regular, scratch, sweep, sync
from amp_rewrite.files.tensors import Source, Sources, is_stub, nbytes, payload, source, without_values

MAX_FILE_BYTES = (1 << 31) - 1  # protobuf cannot read larger messages
MAX_INLINE_BYTES = 1_500_000_000  # bytes of tensors; external data is the default above this size
TEXT = (".onnxtxt", ".onnxtext", ".textproto", ".prototxt", ".pbtxt", ".txtpb", ".json", ".onnxjson")
"""Suffixes of onnx's text formats."""
MAX_SHAPE_BYTES = 1 << 14
"""Maximum bytes of an integer list kept in the model file: runtimes read shapes before they open data files."""

_LARGE = 50_000_000  # bytes
_MIN_MOVED_BYTES = 1 << 10
_PAGE, _MIN_PAGED_BYTES, _ALIGNMENT = 4096, 1 << 20, 64

ByteProgress = Callable[[int, int], None]


class Destinations:
    """The destinations of a model's tensors: the model file, or the data file, with the pieces in `data`.

    `location`: the name of the data file; None for a model without one. Tied tensors share their bytes in the data
    file.
    """

    def __init__(self, sources: Sources, location: str | None) -> None:
        self.sources, self.location = sources, location
        self.data: list[wire.Piece] = []
        self._end = 0
        self._tied: dict[tuple[Source, int] | int, int] = {}

    def __call__(self, tensor: TensorProto) -> list[wire.Piece] | None:
        if self.location is not None and _movable(tensor):
            bare = without_values(tensor)
            bare.data_location = TensorProto.EXTERNAL
            reference = {"location": self.location, "offset": self._place(tensor), "length": nbytes(tensor)}
            for key, value in reference.items():
                bare.external_data.add(key=key, value=str(value))
            return [bare.SerializeToString(deterministic=True)]
        if is_stub(tensor):
            bare, values = without_values(tensor), self._streamed(tensor)
            return [bare.SerializeToString(deterministic=True), wire.head(wire.RAW_DATA, values.nbytes), values]
        if tensor.ByteSize() > MAX_SHAPE_BYTES:
            serialize = partial(tensor.SerializeToString, deterministic=True)
            return [wire.StreamedPiece(tensor.ByteSize(), lambda: [serialize()], tensor.name)]
        return None

    def _place(self, tensor: TensorProto) -> int:
        """Add a tensor to the data file; return its offset."""
        key = (source(tensor), tensor.data_type) if is_stub(tensor) else len(self.data)
        if key not in self._tied:
            count = nbytes(tensor)
            step = _PAGE if count >= _MIN_PAGED_BYTES else _ALIGNMENT
            offset = self._tied[key] = -(-self._end // step) * step
            self.data += [bytes(offset - self._end), self._streamed(tensor)]
            self._end = offset + count
        return self._tied[key]

    def _streamed(self, tensor: TensorProto) -> wire.StreamedPiece:
        return wire.StreamedPiece(nbytes(tensor), partial(payload, tensor, self.sources), tensor.name)


def _movable(tensor: TensorProto) -> bool:
    """True if the tensor may be moved to a data file. Short integer lists may not, since they may be shapes."""
    kind = DType.of(tensor.data_type)
    if kind in (None, DType.STRING) or tensor.HasField("segment"):
        return False
    count = nbytes(tensor)
    if count < _MIN_MOVED_BYTES:
        return False
    if kind in (DType.INT64, DType.INT32) and len(tensor.dims) <= 1 and count <= MAX_SHAPE_BYTES:
        return False
    return is_stub(tensor) or tensor.HasField("raw_data") or kind.bits >= 8


def save(
    proto: ModelProto,
    path: Path,
    progress: ByteProgress | None,
    *,
    loaded_from: Path | None,
    overwrite: bool,
    external_data: bool | str,
) -> None:
    """Write a model to a path, as documented in `Model.save`. `loaded_from`: the file of the model, if any."""
    name = external_data if isinstance(external_data, str) else ""
    if name and (Path(name).name != name or name in (path.name, "..") or "\0" in name or "\\" in name):
        raise ModelError(f"{name!r} cannot name the weights of {path}; pass the name of another file, without a folder")
    if name and "." not in name:  # "no" or "false" must not become a file name
        legal = "True, False, or the name of a file with its suffix, such as 'weights.data'"
        raise PolicyError(f"external_data={name!r} must be {legal}")
    try:
        check_target(path, overwrite)
        kept: frozenset[str] = frozenset()  # files of tensors that have not been read
        if loaded_from is None or not replaces(path, loaded_from):
            kept = frozenset(source(tensor).path for tensor in wire.tensors(proto) if is_stub(tensor))
            if not path.is_symlink() and os.path.realpath(path) in kept:
                raise ModelError(f"cannot write {path}: the model still reads weights from it; name another output")
        sweep(path.parent)
        with Sources() as sources, ExitStack() as undo:
            written = _write_scratch_files(proto, path, external_data, sources, progress, undo)
            with locked(path.parent):
                check_target(path, overwrite)  # another process may have written it
                stale = [old for old in outdated(path, kept) if old not in written.values()]
                for named in written.values():
                    if named.name == name and os.path.lexists(named):
                        _make_room(path, named, kept, overwrite=overwrite)
                _commit(written, stale, undo)
    except OSError as cause:
        raise ModelError(f"cannot write {path}: {cause.strerror or cause}; nothing was changed") from cause


def _write_scratch_files(
    proto: ModelProto,
    path: Path,
    external_data: bool | str,
    sources: Sources,
    progress: ByteProgress | None,
    undo: ExitStack,
) -> dict[Path, Path]:
    """Write scratch files; return the final path of each, with the model last."""
    secret = secrets.token_hex(8)  # as long as the part of the hash that replaces it
    location = external_data if isinstance(external_data, str) else f"{path.stem}.{secret}.data"
    places = Destinations(sources, location if external_data else None)
    body = wire.pieces(proto, places) or [proto.SerializeToString(deterministic=True)]
    if (size := wire.total(body)) > MAX_FILE_BYTES:
        remedy = "" if external_data else "; use external data"
        raise ModelError(f"cannot write {path}: {size} bytes are more than protobuf can read{remedy}")
    done, total, names = 0, size + wire.total(places.data), dict[Path, Path]()

    def advance(chunk: bytes | memoryview) -> None:
        nonlocal done
        done += len(chunk)
        if progress is not None:
            progress(done, total)

    if places.data:
        temporary, file = scratch(path, undo)
        digest = hashlib.sha256()

        def hashed(chunk: bytes | memoryview) -> None:
            digest.update(chunk)
            advance(chunk)

        _write(file, places.data, hashed)
        old, new = secret.encode(), digest.hexdigest()[: len(secret)].encode()
        body = [piece.replace(old, new) if isinstance(piece, bytes) else piece for piece in body]
        names[temporary] = path.parent / location.replace(secret, new.decode())
    temporary, file = scratch(path, undo)
    _write(file, body, advance)
    sources.confirm()
    return names | {temporary: path}


def _commit(written: Mapping[Path, Path], stale: Iterable[Path], undo: ExitStack) -> None:
    """Rename the scratch files, and remove the data files of the replaced model.

    Only one process at a time may run this: another one may have just written a data file that looks stale.
    """
    for temporary, named in written.items():
        if not os.path.lexists(named):
            undo.callback(named.unlink, missing_ok=True)
        temporary.replace(named)
    undo.pop_all()
    with suppress(OSError):
        descriptor = os.open(named.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    for old in stale:
        with suppress(OSError):
            old.unlink()


def _make_room(path: Path, named: Path, kept: frozenset[str], *, overwrite: bool) -> None:
    """Remove the old model before its data file is replaced; ModelError if the data file must not be replaced."""
    refused = f"cannot write the weights of {path}: "
    if named.is_dir() or not overwrite or os.path.realpath(named) in kept:
        remedy = "or another output" if overwrite else f"or use {spelled('overwrite', True)}"
        raise ModelError(f"{refused}{named} already exists; name another file for the weights, {remedy}")
    reader = next((other for other in models_beside(path) if named in data_files(other)), None)
    if reader is not None:
        raise ModelError(f"{refused}{reader} reads {named}; name another file for the weights")
    path.unlink(missing_ok=True)


def _write(file: BinaryIO, pieces: list[wire.Piece], on_chunk: Callable[[bytes | memoryview], None]) -> None:
    """Write pieces to a file and close it. `on_chunk`: called with each written chunk."""
    for piece in pieces:
        count = 0
        for chunk in (piece,) if isinstance(piece, bytes) else piece.chunks():
            file.write(chunk)
            on_chunk(chunk)
            count += len(chunk)
        if not isinstance(piece, bytes) and count != piece.nbytes:
            raise ModelError(
                f"tensor {piece.tensor!r} has {count} bytes, but its dims and type need {piece.nbytes}; export the"
                " model again"
            )
    file.flush()
    sync(file.fileno())
    file.close()


# -- targets and their data files ----------------------------------------------------------------------


def check_target(path: Path, overwrite: bool, *, loaded_from: Path | None = None) -> None:
    """Raise ModelError if a model cannot be written to `path`. `loaded_from`: a model with data files to keep."""
    if "\0" in str(path):
        raise ModelError(f"cannot write {str(path)!r}: a name cannot contain a zero byte; name another output")
    if path.suffix.lower() in TEXT:
        raise ModelError(f"cannot write {path}: only the binary format can be written; use the suffix .onnx")
    check_output_path(path, ModelError)
    open_file = path.is_symlink() and str(path.readlink()).startswith("/proc/")  # of a process, such as /dev/stdout
    if (path.exists() and not path.is_file()) or open_file:
        raise ModelError(f"cannot write {path}: it is not a regular file; name another output")
    if not overwrite and (path.exists() or path.is_symlink()):
        raise ModelError(f"{path} already exists; name another output, or use {spelled('overwrite', True)}")
    try:
        path.name.encode()
    except UnicodeEncodeError as cause:
        raise ModelError(f"cannot write {str(path)!r}: its name is not Unicode; name another output") from cause
    if loaded_from is not None and any(replaces(path, data) for data in data_files(loaded_from)):
        reason = f"it contains the weights of {loaded_from}, which is being read"
        raise ModelError(f"cannot write {path}: {reason}; name another output")


def replaces(path: Path, file: Path) -> bool:
    """True if writing to `path` replaces `file`. Writing to a link replaces only the link."""
    return not path.is_symlink() and path.exists() and os.path.realpath(path) == os.path.realpath(file)


def outdated(path: Path, kept: Collection[str]) -> list[Path]:
    """Return the data files that become unused when the model at `path` is replaced.

    These are files written by `save` and missing from `kept`, if no other model in the folder and no other link to the
    model refers to them.
    """
    if path.is_symlink() or not path.is_file() or path.stat().st_nlink > 1:
        return []
    written = re.compile(re.escape(path.stem) + r"\.[0-9a-f]{16}\.data")
    unused = [file for file in data_files(path) if written.fullmatch(file.name) and os.path.realpath(file) not in kept]
    if not unused:
        return []
    shared = {file for other in models_beside(path) for file in data_files(other)}
    return [file for file in unused if file not in shared]


def models_beside(path: Path) -> list[Path]:
    others = (other for other in path.parent.iterdir() if other.suffix.lower() == ".onnx" and other.name != path.name)
    return [other for other in others if other.is_file()]


def data_files(path: Path) -> list[Path]:
    """Return the data files of the model at `path`; none if it is not a model."""
    try:
        with open_regular(path) as file:
            return data_files_in(file, os.fstat(file.fileno()).st_size, path)
    except OSError:
        return []


def is_large(path: Path) -> bool:
    """True if converting and checking a model takes more than a moment."""
    with suppress(OSError):
        return path.stat().st_size >= _LARGE or any(file.stat().st_size >= _LARGE for file in data_files(path))
    return False


def data_files_in(file: BinaryIO, size: int, path: Path) -> list[Path]:
    """Return the data files of a model opened from `path`; none if it is not a model."""
    names: set[str] = set()
    try:
        light = wire.lightened(file, size, MAX_SHAPE_BYTES, lambda *_: True, str(path))
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
