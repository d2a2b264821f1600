"""Jobs in other processes or on other machines: a bounded number in flight, and each result as soon as it is ready."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from multiprocessing import connection, resource_tracker
from typing import Any, TypeVar

from amp_rewrite.__main__ import interrupt
from amp_rewrite.errors import AmpRewriteError, MachineError, one_line

J = TypeVar("J")
R = TypeVar("R")

_KILLED = "the process that converted it was killed; it may need more memory than there is"
_INSTALL = "install the extra, from a checkout: pip install '.[fleet]'"
_SPAWN = multiprocessing.get_context("spawn")  # a fork of a process with threads can hang


def through(
    jobs: Iterator[J], function: Callable[[J], R], executor: Executor, limit: int, lost: Callable[[J, str], R]
) -> Generator[R, None, None]:
    """Yield the result of each job as it comes, with at most `limit` in flight: results never pile up.

    `lost` makes the result of a job that the executor fails to do, from the reason. Closing the iterator cancels jobs
    that have not begun.
    """
    flying: dict[Future[R], J] = {}
    try:
        while True:
            while len(flying) < limit and (job := next(jobs, None)) is not None:
                try:
                    flying[executor.submit(function, job)] = job
                except BrokenExecutor as error:
                    yield lost(job, _reason(error))
            if not flying:
                return
            # In turns, since a signal that comes just before a wait does not end it.
            done, _ = wait(flying, 1, FIRST_COMPLETED)
            for future in done:
                job, cause = flying.pop(future), future.exception()
                yield future.result() if cause is None else lost(job, _reason(cause))
    finally:
        for future in flying:
            future.cancel()


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, AmpRewriteError) else f"{type(error).__name__}: {one_line(error)}"


class Processes(ThreadPoolExecutor):
    """An executor of `count` processes on this machine. Leaving its body by an error ends them in the middle of jobs.

    Each thread has a process of its own, so one that dies costs no other job.
    """

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._own = threading.local()
        self._running: list[tuple[Any, connection.Connection]] = []

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        return super().submit(self._done, fn, *args, **kwargs)

    def _done(self, function: Callable[[J], R], job: J) -> R:
        if not hasattr(self._own, "pipe"):
            self._own.pipe, there = _SPAWN.Pipe()
            process = _SPAWN.Process(target=_serve, args=(there,), daemon=True)
            with _interrupts_held():
                process.start()
            there.close()
            self._running.append((process, self._own.pipe))
        try:
            self._own.pipe.send((function, job))
            result: R = self._own.pipe.recv()
        except (EOFError, OSError) as cause:
            del self._own.pipe
            raise MachineError(_KILLED) from cause
        return result

    def __exit__(self, kind: Any, error: Any, lines: Any) -> None:
        if kind is not None:
            self.shutdown(wait=False, cancel_futures=True)
            for process, _ in self._running:
                process.terminate()
        self.shutdown()
        for process, pipe in self._running:
            pipe.close()
            process.join()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Keep Ctrl-C from this thread, and from what it starts: a process that loads answers it with a traceback."""
    if not hasattr(signal, "pthread_sigmask"):  # on Windows
        yield
        return
    resource_tracker.ensure_running()  # which lets them through once it has started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: connection.Connection) -> None:
    """Do jobs from a pipe, until SIGTERM, or the end of the parent, also if it was killed; Ctrl-C is the parent's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, interrupt)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            function, job = pipe.recv()
            pipe.send(function(job))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)


def cores() -> int:
    """Return the number of cores for this process."""
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
