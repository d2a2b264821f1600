"""Jobs in other processes: a bounded number in flight, and each result as soon as it is ready."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from typing import Any, Generic, TypeVar

from amp_rewrite.files.scratch import undo_all

J = TypeVar("J")
R = TypeVar("R")

_KILLED = "the process that converted it was killed, twice; it may need more memory than there is"


@dataclass(frozen=True, slots=True)
class Lost(Generic[J]):
    """A job without a result. `killed`: its process is gone, or another one that ran beside it."""

    job: J
    reason: str
    killed: bool = False


def in_processes(jobs: Iterator[J], function: Callable[[J], R], count: int) -> Generator[R | Lost[J], None, None]:
    """Yield the result of each job, from `count` processes of this machine.

    Jobs that are in flight when a process dies are done again, one at a time: only the one that kills its process is
    lost.
    """
    while True:
        killed: list[J] = []
        with _processes(count) as pool:
            for result in through(jobs, function, pool, count):
                if isinstance(result, Lost) and result.killed:
                    killed.append(result.job)
                else:
                    yield result
        if not killed:
            return
        for job in killed:
            with _processes(1) as pool:
                for result in through(iter([job]), function, pool, 1):
                    yield Lost(job, _KILLED) if isinstance(result, Lost) and result.killed else result


def through(
    jobs: Iterator[J], function: Callable[[J], R], executor: Executor, limit: int
) -> Generator[R | Lost[J], None, None]:
    """Yield the result of each job as it comes; at most `limit` are in flight, so that results never pile up.

    An executor that breaks gets no more jobs. Closing the iterator cancels those that have not begun.
    """
    flying: dict[Future[R], J] = {}
    broken = False
    try:
        while True:
            while not broken and len(flying) < limit and (job := next(jobs, None)) is not None:
                flying[_submitted(executor, function, job)] = job
            if not flying:
                return
            done, _ = wait(flying, return_when=FIRST_COMPLETED)
            for future in done:
                job, error = flying.pop(future), future.exception()
                if error is None:
                    yield future.result()
                else:
                    killed = isinstance(error, BrokenExecutor)
                    broken = broken or killed
                    yield Lost(job, f"{type(error).__name__}: {error}".rstrip(": "), killed)
    finally:
        for future in flying:
            future.cancel()


def _submitted(executor: Executor, function: Callable[[J], R], job: J) -> Future[R]:
    """Submit a job; an executor that is broken gives a future with that error."""
    try:
        return executor.submit(function, job)
    except BrokenExecutor as error:
        future: Future[R] = Future()
        future.set_exception(error)
        return future


class _Pool(ProcessPoolExecutor):
    """An executor whose processes start with signals blocked: `_watch` waits for them, and Ctrl-C is the parent's."""

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        """Pass a job on, which may start a process, and have that process watched."""
        future = self._signals_blocked(fn, *args, **kwargs)
        with self._shutdown_lock:
            # Python wakes the thread that watches processes before it starts one: that thread may have missed it.
            self._executor_manager_thread_wakeup.wakeup()
        return future

    def _signals_blocked(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        if not hasattr(signal, "pthread_sigmask"):  # Windows
            return super().submit(fn, *args, **kwargs)
        resource_tracker.ensure_running()  # it unblocks signals once it has started
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            return super().submit(fn, *args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _processes(count: int) -> Iterator[Executor]:
    """Yield an executor of processes, which end with the body; after an error, in the middle of jobs."""
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads can hang
    reader, writer = context.Pipe(duplex=False)
    pool = _Pool(count, context, _watch, (reader,))
    try:
        yield pool
    except BaseException:
        writer.close()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        writer.close()


def _watch(pipe: connection.Connection) -> None:
    """Let this process end as soon as the other end of a pipe is closed, or by SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    events: list[Callable[[], object]] = [lambda: connection.wait([pipe])]
    if hasattr(signal, "sigwait"):  # not on Windows
        events.append(lambda: signal.sigwait({signal.SIGTERM}))
    for event in events:
        threading.Thread(target=_end_after, args=(event,), daemon=True).start()


def _end_after(event: Callable[[], object]) -> None:
    event()
    try:
        undo_all()
    finally:
        os._exit(1)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
