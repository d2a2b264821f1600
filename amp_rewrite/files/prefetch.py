"""Prefetching: tensors are read and cast in another thread while earlier ones are hashed and written."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

from amp_rewrite.files.casting import Array
from amp_rewrite.files.tensors import Sources, fresh_memory

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

WORTH_IT = 1 << 28  # bytes; a second thread pays off from a quarter of a second

_GROUPS, _PIECES = 3, 8  # passing a group between threads takes some 50 µs, as long as writing a tenth of it

T = TypeVar("T")

_ALLOWED: ContextVar[bool] = ContextVar("prefetching", default=True)


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
