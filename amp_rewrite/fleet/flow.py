"""The flow of jobs through an executor: a bounded number in flight, and each result as soon as it is ready."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

J = TypeVar("J")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Lost(Generic[J]):
    """A job without a result: the process or machine that did it is gone, or the executor failed."""

    job: J
    reason: str


class Inline(Executor):
    """An executor that does each job at once, here."""

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        """Call the function and return its result as a future; an interrupt is raised at once."""
        future: Future[R] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 as executors do
            future.set_exception(error)
        return future


@dataclass(slots=True)
class Processes:
    """Processes of this machine, started when the first job comes, and anew when one of them dies."""

    count: int
    _pool: ProcessPoolExecutor | None = field(default=None, repr=False)
    _others: set[int | None] = field(default_factory=set, repr=False)

    @property
    def pool(self) -> ProcessPoolExecutor:
        """The executor, with processes that are alive."""
        if self._pool is None:
            self._others = {process.pid for process in multiprocessing.active_children()}
            # a fork of a process with threads (onnxruntime's, a progress bar's) can hang
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.count, context, initializer=_worker_signals)
        return self._pool

    def submit(self, function: Callable[[J], R], job: J) -> Future[R]:
        """Pass a job on, which may start processes."""
        with _starting_processes():
            return self.pool.submit(_done, function, job)

    def close(self, *, at_once: bool = False) -> None:
        """End the processes; the next job starts others. `at_once`: in the middle of jobs, which then undo theirs."""
        if self._pool is None:
            return
        started = [process for process in multiprocessing.active_children() if process.pid not in self._others]
        while at_once and (alive := [process for process in started if process.is_alive()]):
            for process in alive:
                process.terminate()  # again until it ends: a signal just before a process waits for a lock is not seen
            connection.wait([process.sentinel for process in alive], timeout=0.1)
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = None


@contextmanager
def _starting_processes() -> Iterator[None]:
    """Hold signals back while the body starts processes: one that was started by half complains.

    The processes never see what a terminal sends to all: Ctrl-C, and that it is gone.
    """
    held: list[int] = []
    ours = threading.current_thread() is threading.main_thread()
    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGHUP", "SIGTERM") if hasattr(signal, name)]
    try:
        with ExitStack() as stack:
            for number in numbers:
                if ours and callable(signal.getsignal(number)):
                    stack.callback(signal.signal, number, signal.signal(number, lambda number, _: held.append(number)))
            if hasattr(signal, "pthread_sigmask"):  # not on Windows
                before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers[:2])
                stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
            yield
    finally:
        for number in held[:1]:
            signal.raise_signal(number)


_at_work = threading.Event()  # set in a process of `Processes` in the middle of a job


def _worker_signals() -> None:
    """Let Ctrl-C, which a terminal sends to all processes, be the affair of the first; SIGTERM ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    sys.unraisablehook = _again
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _stop(*_: object) -> None:
    """End this process: a job undoes what it did, and a wait for the next one leaves no half-read message behind."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one signal is enough, and undoing must not be interrupted
    if _at_work.is_set():
        raise SystemExit(1)
    os._exit(1)


def _again(unraisable: UnraisableHookArgs, /) -> None:
    """Let the next signal end a job: this one came in a callback or a finalizer, from which nothing is raised."""
    if isinstance(unraisable.exc_value, SystemExit):
        signal.signal(signal.SIGTERM, _stop)
    else:
        sys.__unraisablehook__(unraisable)


def _done(function: Callable[[J], R], job: J) -> R:
    try:
        _at_work.set()
        try:
            return function(job)
        finally:
            _at_work.clear()
    finally:
        if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:  # stopped, wherever in the job that was
            os._exit(1)  # the pool would take the next job, or wait for a lock that another process held


def _end_with_parent() -> None:
    """End this process when the one that started it is killed, which closes no queue."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def through(
    jobs: Iterable[J], function: Callable[[J], R], executor: Executor | Processes, limit: int
) -> Iterator[R | Lost[J]]:
    """Yield the result of each job as it comes; at most `limit` are in flight, so that results never pile up.

    A job whose process dies is done once more, alone; if that one dies, too, the job is lost. Closing the iterator
    cancels jobs that have not begun and waits for the others; of our own processes, an interrupt ends those at once.
    """
    own = executor if isinstance(executor, Processes) else None
    flying: dict[Future[Any], J] = {}
    waiting = iter(jobs)
    try:
        while True:
            while len(flying) < limit and (job := next(waiting, None)) is not None:
                flying[executor.submit(function, job)] = job
            if not flying:
                return
            done, _ = wait(flying, return_when=FIRST_COMPLETED)
            broken = [future for future in done if isinstance(future.exception(), BrokenExecutor)]
            for future in done:
                job = flying[future]
                if future not in broken:
                    del flying[future]
                    yield _result(future, job)
            if broken:
                suspects = list(flying.values())
                flying.clear()
                if own:
                    own.close(at_once=True)
                for job in suspects:
                    yield _alone(job, function) if own else Lost(job, "the executor lost its processes")
                if not own:
                    yield from (Lost(job, "the executor lost its processes") for job in waiting)
    except GeneratorExit:
        _end(flying, own)
        raise
    except BaseException:
        _end(flying, own, at_once=True)
        raise
    finally:
        if own:
            own.close()


def _result(future: Future[Any], job: J) -> Any:
    error = future.exception()
    if error is None:
        return future.result()
    return Lost(job, f"{type(error).__name__}: {error}".rstrip(": "))


def _alone(job: J, function: Callable[[J], R]) -> R | Lost[J]:
    """Do a job in a process of its own: it may be the one that killed the others, or they were killed beside it."""
    apart = Processes(1)
    try:
        future = apart.submit(function, job)
        wait([future])
        if isinstance(future.exception(), BrokenExecutor):
            return Lost(job, "the process that converted it was killed, twice; it may need more memory than there is")
        result: R | Lost[J] = _result(future, job)
        return result
    except BaseException:
        apart.close(at_once=True)
        raise
    finally:
        apart.close()


def _end(flying: Iterable[Future[Any]], own: Processes | None, *, at_once: bool = False) -> None:
    """Cancel what has not begun."""
    if own:
        own.close(at_once=at_once)  # cancels, too: a pool whose processes end must not find futures cancelled elsewhere
        return
    for future in flying:
        future.cancel()
    if not at_once:
        with suppress(KeyboardInterrupt):
            wait([future for future in flying if not future.cancelled()])


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
