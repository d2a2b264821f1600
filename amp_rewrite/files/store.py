"""Atomic writing of a model file and its data file.

Everything is first written to temporary files in the target folder. Then data files get names with the hash of their
content, the model file is renamed, and the data files of the replaced model are removed. So at any moment a complete
old or a complete new model exists; if the caller names data files and a name is taken, at most one of the two exists.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol, TypeVar

from onnx import ModelProto

from amp_rewrite.errors import ModelError, PolicyError, spelled
from amp_rewrite.files import wire
from amp_rewrite.files.casting import Array
from amp_rewrite.files.disk import alone, scratch, sweep, sync, undoing
from amp_rewrite.files.targets import (
    Destinations,
    Layout,
    check_target,
    data_files,
    located,
    models_beside,
    outdated,
    replaces,
    shard_bytes,
)
from amp_rewrite.files.tensors import Sources, fresh_memory, is_stub, source

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

LARGEST_FILE = (1 << 31) - 1  # protobuf reads no larger message
LARGEST_INLINE = 1_500_000_000  # bytes of tensors from which external data is the default

_BEGUN_AT = 1 << 24  # bytes
WORTH_IT = 1 << 28  # bytes; a second thread pays off from a quarter of a second

_GROUPS, _PIECES = 3, 8  # passing a group between threads takes some 50 µs, as long as writing a tenth of it

_ALLOWED: ContextVar[bool] = ContextVar("prefetching", default=True)

Progress = Callable[[int, int], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """Keywords of `Model.save`."""

    overwrite: bool = False
    external_data: bool | str | None = None
    shard_size: str | int | None = None


@dataclass(frozen=True, slots=True)
class Saving:
    """The path of a model to write, and the layout of its weights.

    `read`: the file that it came from. `external`: large tensors go beside it, into files called `name`, `name_1` …, or
    without a name after the model and their content. `shard`: as `Layout` takes it.
    """

    path: Path
    read: Path | None
    overwrite: bool
    external: bool
    name: str = ""
    shard: int | None = None

    @classmethod
    def of(cls, path: Path, read: Path | None, nbytes: int, asked: SaveOptions) -> Saving:
        """Return how a model of `nbytes` is written. ModelError or PolicyError for impossible names of weights."""
        shard = None if asked.shard_size is None else shard_bytes(asked.shard_size)
        name = asked.external_data if isinstance(asked.external_data, str) else ""
        if name and (Path(name).name != name or name in (path.name, "..") or "\0" in name or "\\" in name):
            raise ModelError(f"{name!r} is not a name for the weights of {path}; give the plain name of another file")
        if name and "." not in name:  # "no" or "false" must not become a file
            fix = "give True, False, or the name of a file with its suffix, such as 'weights.data'"
            raise PolicyError(f"external_data={name!r} is str; {fix}")
        large = shard is not None or nbytes > LARGEST_INLINE
        external = large if asked.external_data is None else bool(asked.external_data)
        return cls(path, read, asked.overwrite, external, name, shard if external else None)

    def save(self, proto: ModelProto, progress: Progress | None) -> None:
        """Write the model, as `Model.save` says."""
        path = self.path
        try:
            check_target(path, self.overwrite)
            kept = _read_on(proto, path, self.read)
            if not path.is_symlink() and os.path.realpath(path) in kept:
                raise ModelError(f"cannot write {path}: weights of the model are still read from it; name another")
            sweep(path.parent)
            with Sources() as sources, undoing() as undo:
                _Writing(self, kept, sources, undo).run(proto, progress or _silent)
        except OSError as cause:
            raise ModelError(f"cannot write {path}: {cause.strerror or cause}; nothing was changed") from cause


@dataclass(frozen=True, slots=True)
class _Writing:
    """A save in progress. `kept`: files read by the model; `undo` removes incomplete files."""

    saving: Saving
    kept: Collection[str]
    sources: Sources
    undo: ExitStack

    def run(self, proto: ModelProto, progress: Progress) -> None:
        saving = self.saving
        layout = Layout(self.sources, saving.shard) if saving.external else None
        body = _body(proto, self.sources, layout)
        files = layout.files if layout is not None else []
        written = _Counter(sum(map(wire.total, [body, *files])), progress)
        data = [self._data(number, pieces, written) for number, pieces in enumerate(files)]
        light = located(body, [named.name for _, named in data]) if data else body
        if wire.total(light) > LARGEST_FILE:
            raise ModelError(
                f"cannot write {saving.path}: {wire.total(light)} bytes are more than protobuf can read"
                + ("" if saving.external else "; use external data")
            )
        temporary, file = scratch(saving.path, self.undo)
        _write(_Output(file, written), light, self.sources)
        self.sources.confirm()
        with alone(saving.path.parent):
            check_target(saving.path, saving.overwrite)  # another process may have been faster
            self._commit(temporary, data)

    def _data(self, number: int, pieces: list[wire.Piece], written: _Counter) -> tuple[Path, Path]:
        path, name, digest = self.saving.path, self.saving.name, hashlib.sha256()
        temporary, file = scratch(path, self.undo)
        _write(_Output(file, written, digest), pieces, self.sources)
        named = f"{name}_{number}" if name and number else name or f"{path.stem}.{digest.hexdigest()[:16]}.data"
        return temporary, path.parent / named

    def _commit(self, finished: Path, data: Sequence[tuple[Path, Path]]) -> None:
        """Rename the written files and remove the data of the replaced model, except files in `kept`.

        Only one process at a time may run this: a file outdated for one may have just been written by another. Where a
        data file takes the name of an older one, the model that reads that one goes first.
        """
        path, targets = self.saving.path, [named for _, named in data]
        stale = [old for old in outdated(path, self.kept) if old not in targets]
        if self.saving.name and any(os.path.lexists(named) for named in targets):
            self._make_room(targets)
        for written, named in [*data, (finished, path)]:
            if not os.path.lexists(named):
                self.undo.callback(named.unlink, missing_ok=True)
            written.replace(named)
        self.undo.pop_all()
        _sync_folder(path.parent)
        for old in stale:
            with suppress(OSError):
                old.unlink()

    def _make_room(self, targets: Sequence[Path]) -> None:
        """Remove the replaced model. ModelError if other files have the names of data files."""
        path = self.saving.path
        for named in targets:
            if not os.path.lexists(named):
                continue
            if named.is_dir() or not self.saving.overwrite or os.path.realpath(named) in self.kept:
                way = "name another" if self.saving.overwrite else f"or replace it with {spelled('overwrite', True)}"
                raise ModelError(f"cannot write the weights of {path}: {named} exists; name other external data, {way}")
            reader = next((other for other in models_beside(path) if named in data_files(other)), None)
            if reader is not None:
                raise ModelError(
                    f"cannot write the weights of {path}: {reader} reads {named}; name other external data"
                )
        path.unlink(missing_ok=True)


def _body(proto: ModelProto, sources: Sources, layout: Layout | None) -> list[wire.Piece]:
    return wire.pieces(proto, Destinations(sources, layout)) or [proto.SerializeToString(deterministic=True)]


class Writable(Protocol):
    """A file open to write bytes."""

    def write(self, content: bytes | memoryview, /) -> object:
        """Write all of it."""


def stream(proto: ModelProto, file: Writable, progress: Progress | None) -> None:
    """Write a model with its weights to an open file. ModelError on failure; the file is not a model then."""
    try:
        with Sources() as sources:
            body = _body(proto, sources, None)
            if wire.total(body) > LARGEST_FILE:
                raise ModelError(
                    f"cannot write {wire.total(body)} bytes to a file as one model: protobuf cannot read as many; save"
                    " to a path, which may have external data"
                )
            written = _Counter(wire.total(body), progress or _silent)
            with closing(_soon(body, sources)) as chunks:
                for chunk in chunks:
                    file.write(bytes(chunk))
                    written.add(len(chunk))
    except (OSError, TypeError, ValueError) as cause:  # TypeError: a file of text; ValueError: a closed one
        reason = str(cause).rstrip(".")
        raise ModelError(f"cannot write to {file!r:.80}: {reason}; it does not hold a whole model now") from cause


def _silent(done: int, total: int) -> None:
    pass


def _read_on(proto: ModelProto, path: Path, read: Path | None) -> frozenset[str]:
    if read is not None and replaces(path, read):
        return frozenset()
    return frozenset(source(tensor).path for tensor in wire.tensors(proto) if is_stub(tensor))


class _Counter:
    def __init__(self, total: int, progress: Progress) -> None:
        self.done, self.total, self.progress = 0, total, progress

    def add(self, count: int) -> None:
        self.done = min(self.done + count, self.total)
        self.progress(self.done, self.total)


class _Output:
    """A file written sequentially, and a hash of it if one is given.

    Every 16 MB the system is advised to start writing to disk, so the final sync is short.
    """

    def __init__(self, file: BinaryIO, written: _Counter, digest: hashlib._Hash | None = None) -> None:
        self.file, self.written, self.digest = file, written, digest
        self.begun = self.end = 0

    def write(self, chunk: bytes | memoryview) -> None:
        self.file.write(chunk)
        if self.digest is not None:
            self.digest.update(chunk)
        self.end += len(chunk)
        self.written.add(len(chunk))
        if self.end - self.begun >= _BEGUN_AT:
            self._begin()

    def _begin(self) -> None:
        if hasattr(os, "posix_fadvise"):
            self.file.flush()
            with suppress(OSError):  # advice to the system
                # Linux starts writing pages to be dropped, and drops only pages already on disk: none yet
                os.posix_fadvise(self.file.fileno(), self.begun, self.end - self.begun, os.POSIX_FADV_DONTNEED)
        self.begun = self.end

    def finish(self) -> None:
        self.file.flush()
        sync(self.file.fileno())
        self.file.close()


def _write(out: _Output, pieces: list[wire.Piece], sources: Sources) -> None:
    with closing(_soon(pieces, sources)) as chunks:
        for chunk in chunks:
            out.write(chunk)
    out.finish()


def _soon(pieces: list[wire.Piece], sources: Sources) -> Generator[bytes | memoryview, None, None]:
    chunks = _chunks(pieces)
    return prefetch(chunks, sources) if wire.total(pieces) >= WORTH_IT else chunks


def _chunks(pieces: list[wire.Piece]) -> Generator[bytes | memoryview, None, None]:
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


# -- prefetching: tensors are read and cast in another thread while earlier ones are hashed and written --------------


@contextmanager
def prefetching(allowed: bool) -> Iterator[None]:
    """Let `prefetch` start a thread while the body runs, or none: several conversions at a time share the cores."""
    token = _ALLOWED.set(allowed)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def prefetch(pieces: Iterator[T], sources: Sources) -> Generator[T, None, None]:
    """Yield the pieces in order, computed in another thread, at most some megabytes ahead.

    `pieces`: as `tensors.payload` yields them, in `sources.made`; no other code may use `sources` meanwhile. A piece
    is valid until the next one is requested. Exceptions of the other thread are raised here. Close the iterator to
    stop early, which ends the thread. If no thread can be started, or `prefetching` forbids it, the pieces are computed
    in this one.
    """

    def group_in(memories: list[Array]) -> list[T]:
        group: list[T] = []
        for sources.made in memories:
            piece = next(pieces, None)
            if piece is None:
                break
            group.append(piece)
        return group

    worker = _worker() if _ALLOWED.get() else None
    if worker is None:
        yield from pieces
        return
    with worker:
        turns = [[fresh_memory() for _ in range(_PIECES)] for _ in range(_GROUPS)]
        pending = deque((memories, worker.submit(group_in, memories)) for memories in turns)
        while group := pending[0][1].result():
            yield from group
            memories, _ = pending.popleft()
            pending.append((memories, worker.submit(group_in, memories)))


def _worker() -> ThreadPoolExecutor | None:
    """Start a worker thread; None if the system has no more threads, or Python is shutting down."""
    try:
        from concurrent.futures import ThreadPoolExecutor  # small models do not need this import

        worker = ThreadPoolExecutor(1, "amp-rewrite")
        worker.submit(int).result()
    except RuntimeError:
        return None
    return worker
