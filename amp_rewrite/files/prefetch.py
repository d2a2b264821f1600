"""Tensors read and cast in another thread, while what was made before is hashed and written."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, TypeVar

from amp_rewrite.files.casting import Array
from amp_rewrite.files.tensors import Sources, fresh_memory

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

WORTH_IT = 1 << 28  # bytes; from a quarter of a second on a second thread pays

_GROUPS, _PIECES = 3, 8  # to hand over a group takes some 50 µs, as long as writing a tenth of it

T = TypeVar("T")


def ahead(pieces: Iterator[T], sources: Sources) -> Generator[T, None, None]:
    """The same pieces in the same order, made in one other thread, at most some megabytes ahead.

    `pieces`: as `tensors.payload` makes them, in `sources.made`; no one else may use `sources` meanwhile. A piece is
    good until the next one is asked for. Whatever making one raises is raised here. Close the iterator if it is left
    early: the thread is done then. Where no thread can be started the pieces are made in this one.
    """

    def made(memories: list[Array]) -> list[T]:
        group: list[T] = []
        for sources.made in memories:
            piece = next(pieces, None)
            if piece is None:
                break
            group.append(piece)
        return group

    worker = _worker()
    if worker is None:
        yield from pieces
        return
    with worker:
        turns = [[fresh_memory() for _ in range(_PIECES)] for _ in range(_GROUPS)]
        pending = deque((memories, worker.submit(made, memories)) for memories in turns)
        while group := pending[0][1].result():
            yield from group
            memories, _ = pending.popleft()
            pending.append((memories, worker.submit(made, memories)))


def _worker() -> ThreadPoolExecutor | None:
    """A thread that has begun to wait for work; None where the system gives no more of them, or Python is ending."""
    try:
        from concurrent.futures import ThreadPoolExecutor  # small models need not wait for it

        worker = ThreadPoolExecutor(1, "amp-rewrite")
        worker.submit(int).result()
    except RuntimeError:
        return None
    return worker
