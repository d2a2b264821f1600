"""Jobs in other processes or on other machines: a bounded number in flight, and each result as soon as it is ready."""

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

from amp_rewrite.errors import MachineError
from amp_rewrite.files.disk import undo_all

J = TypeVar("J")
R = TypeVar("R")

_KILLED = "the process that converted it was killed, twice; it may need more memory than there is"
_INSTALL = "install the extra, from a checkout: pip install '.[fleet]'"
_SIGNALS = {signal.SIGINT, signal.SIGTERM}


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
    """Submit a job; an executor that is broken gives a future with that error.

    A process that this starts begins with signals blocked, until `_watch` is ready for them.
    """
    resource_tracker.ensure_running()  # it unblocks signals once it has started
    blocks = hasattr(signal, "pthread_sigmask")  # not on Windows
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS) if blocks else set()
    try:
        return executor.submit(function, job)
    except BrokenExecutor as error:
        future: Future[R] = Future()
        future.set_exception(error)
        return future
    finally:
        if blocks:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Pool(ProcessPoolExecutor):
    """An executor that notices the death of each of its processes."""

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        future = super().submit(fn, *args, **kwargs)
        super().submit(int)  # Python wakes its watching thread before it starts a process: that thread may miss it
        return future


@contextmanager
def _processes(count: int) -> Iterator[Executor]:
    """Yield an executor of processes, which end with the body; after an error, in the middle of jobs."""
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads can hang
    reader, writer = context.Pipe(duplex=False)
    pool = _Pool(count, context, _watch, (reader,))
    finished = False
    try:
        yield pool
        finished = True
    finally:
        if not finished:
            writer.close()
        pool.shutdown(cancel_futures=True)
        writer.close()


def _watch(pipe: connection.Connection) -> None:
    """Let this process end by SIGTERM, or when the other end of a pipe is closed; Ctrl-C is the parent's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: _end())
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    threading.Thread(target=_end_with, args=(pipe,), daemon=True).start()


def _end_with(pipe: connection.Connection) -> None:
    connection.wait([pipe])
    _end()


def _end() -> None:
    try:
        undo_all()
    finally:
        os._exit(1)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def executor_of(scheduler: str) -> Iterator[tuple[Executor, int]]:
    """Yield the executor of a Dask scheduler, by its address or file, and the number of jobs at once on its workers.

    MachineError without Dask, or if no scheduler answers.
    """
    try:
        from distributed import Client
    except ImportError as cause:
        raise MachineError(f"the scheduler {scheduler} needs Dask's distributed; {_INSTALL}") from cause
    try:
        client = Client(scheduler_file=scheduler) if scheduler.endswith(".json") else Client(scheduler)
    except (OSError, ValueError) as cause:  # ValueError: the address of another kind of server
        ways = "give HOST:PORT of a running one, or its .json file; `dask scheduler` starts one"
        raise MachineError(f"no scheduler answers at {scheduler}: {cause}; {ways}") from cause
    with client:
        threads = sum(client.nthreads().values())
        if not threads:
            raise MachineError(
                f"the scheduler at {scheduler} has no workers; start some with `dask worker {scheduler}`"
            )
        yield client.get_executor(pure=False), threads
