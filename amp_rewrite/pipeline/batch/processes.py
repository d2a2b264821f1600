"""Execution of jobs in other processes or on other machines, with a limited number in flight."""

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

_KILLED = "the process that converted it was killed; it may need more memory than is available"
_INSTALL = "install the `fleet` extra from a checkout: pip install '.[fleet]'"
_SPAWN = multiprocessing.get_context("spawn")  # a fork of a process with threads can hang


def run_jobs(
    jobs: Iterator[J], function: Callable[[J], R], executor: Executor, limit: int, on_failure: Callable[[J, str], R]
) -> Generator[R, None, None]:
    """Yield the result of each job as soon as it is ready, with at most `limit` in flight, so results never pile up.

    `on_failure` returns the result of a failed job from the reason. Closing the iterator cancels all jobs that have not
    started.
    """
    in_flight: dict[Future[R], J] = {}
    try:
        while True:
            while len(in_flight) < limit and (job := next(jobs, None)) is not None:
                try:
                    in_flight[executor.submit(function, job)] = job
                except BrokenExecutor as error:
                    yield on_failure(job, _reason(error))
            if not in_flight:
                return
            # Wait repeatedly, since a signal just before a wait does not end it.
            done, _ = wait(in_flight, 1, FIRST_COMPLETED)
            for future in done:
                job, cause = in_flight.pop(future), future.exception()
                yield future.result() if cause is None else on_failure(job, _reason(cause))
    finally:
        for future in in_flight:
            future.cancel()


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, AmpRewriteError) else f"{type(error).__name__}: {one_line(error)}"


class Processes(ThreadPoolExecutor):
    """An executor with `count` local processes.

    An exception in its `with` block terminates them, even during their jobs. Each thread has its own process, so one
    that dies does not affect other jobs.
    """

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._own = threading.local()
        self._running: list[tuple[Any, connection.Connection]] = []

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        return super().submit(self._run, fn, *args, **kwargs)

    def _run(self, function: Callable[[J], R], job: J) -> R:
        if not hasattr(self._own, "pipe"):
            self._own.pipe, child_end = _SPAWN.Pipe()
            process = _SPAWN.Process(target=_serve, args=(child_end,), daemon=True)
            with _interrupts_blocked():
                process.start()
            child_end.close()
            self._running.append((process, self._own.pipe))
        try:
            self._own.pipe.send((function, job))
            result: R = self._own.pipe.recv()
        except (EOFError, OSError) as cause:
            del self._own.pipe
            raise MachineError(_KILLED) from cause
        return result

    def __exit__(self, exc_type: Any, _exc: Any, _traceback: Any) -> None:
        if exc_type is not None:
            self.shutdown(wait=False, cancel_futures=True)
            for process, _ in self._running:
                process.terminate()
        self.shutdown()
        for process, pipe in self._running:
            pipe.close()
            process.join()


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C in this thread and in processes it starts: they would print a traceback while loading."""
    if not hasattr(signal, "pthread_sigmask"):  # on Windows
        yield
        return
    resource_tracker.ensure_running()  # started now, since its start unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: connection.Connection) -> None:
    """Run jobs from a pipe until SIGTERM or the end of the parent, even if it is killed; ignore Ctrl-C."""
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
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def executor_of(scheduler: str) -> Iterator[tuple[Executor, int]]:
    """Yield the executor of a Dask scheduler, given by its address or file, and the number of its workers' threads.

    Raises MachineError if Dask is not installed, or no scheduler answers.
    """
    try:
        from distributed import Client
    except ImportError as cause:
        raise MachineError(f"the scheduler {scheduler} requires Dask's `distributed` package; {_INSTALL}") from cause
    try:
        client = Client(scheduler_file=scheduler) if scheduler.endswith(".json") else Client(scheduler)
    except (OSError, ValueError) as cause:  # ValueError: the address of another kind of server
        ways = "pass HOST:PORT of a running one, or its .json file; `dask scheduler` starts one"
        raise MachineError(f"no scheduler answers at {scheduler}: {cause}; {ways}") from cause
    with client:
        threads = sum(client.nthreads().values())
        if not threads:
            raise MachineError(
                f"the scheduler at {scheduler} has no workers; start some with `dask worker {scheduler}`"
            )
        yield client.get_executor(pure=False), threads
