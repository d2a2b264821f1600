"""Executors beyond this process's own: Dask's distributed scheduler, by address or on this machine, and Ray tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from amp_rewrite.errors import MachineError, PolicyError, spelled

R = TypeVar("R")
LOCAL = "local"
_DASK = "dask://"
_INSTALL = "install the extra, from a checkout: pip install '.[fleet]'"


def check_scheduler(text: str) -> str:
    """Return a scheduler: "local", "dask://HOST:PORT" or "dask:///FILE.json". PolicyError for another text."""
    if text == LOCAL or (text.startswith(_DASK) and len(text) > len(_DASK)):
        return text
    ways = "write local for Dask on this machine, dask://HOST:PORT, or dask:///PATH of a scheduler file"
    raise PolicyError(f"{spelled('scheduler', text)} is not a scheduler; {ways}")


@contextmanager
def executor_of(scheduler: str, workers: int) -> Iterator[tuple[Executor, int]]:
    """Connect to a scheduler of Dask, and yield its executor and the number of its threads, which is what runs at once.

    "local" starts `workers` processes of one thread on this machine and ends them; each may use its part of the memory.
    MachineError without Dask, or if the scheduler does not answer.
    """
    check_scheduler(scheduler)
    try:
        from distributed import Client, LocalCluster
    except ImportError as cause:
        raise MachineError(f"{spelled('scheduler', scheduler)} needs Dask's distributed; {_INSTALL}") from cause
    place = scheduler.removeprefix(_DASK)
    try:
        if scheduler == LOCAL:
            cluster = LocalCluster(n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=None)
            client = Client(cluster)
        elif place.endswith(".json"):
            cluster, client = None, Client(scheduler_file=str(Path(place)))
        else:
            cluster, client = None, Client(f"tcp://{place}" if "://" not in place else place)
    except OSError as cause:
        raise MachineError(f"no scheduler answers at {scheduler}: {cause}; start one with `dask scheduler`") from cause
    try:
        threads = sum(client.nthreads().values())
        if not threads:
            raise MachineError(f"the scheduler at {scheduler} has no workers; start some with `dask worker {place}`")
        yield client.get_executor(pure=False), threads
    finally:
        client.close()
        if cluster is not None:
            cluster.close()


class RayExecutor(Executor):
    """Tasks of Ray as an executor. `ray.init` comes first, and workers see the same files; tested on one machine alone.

    Args:
        **options: as `ray.remote` takes them, such as `num_cpus=2` or `max_retries=3`.

    Example:
        >>> from amp_rewrite.fleet.schedulers import RayExecutor
        >>> import amp_rewrite, ray  # doctest: +SKIP
        >>> ray.init()  # doctest: +SKIP
        >>> outcomes = amp_rewrite.convert_many("models", out="out", executor=RayExecutor(num_cpus=1), jobs=64)
    """

    def __init__(self, **options: Any) -> None:
        try:
            import ray
        except ImportError as cause:
            raise MachineError("RayExecutor needs ray; install it (pip install ray)") from cause
        self._task = ray.remote(**{"num_cpus": 1, **options})(_called)

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        """Start a task and return its future."""
        future: Future[R] = self._task.remote(fn, *args, **kwargs).future()
        return future


def _called(function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    return function(*args, **kwargs)
