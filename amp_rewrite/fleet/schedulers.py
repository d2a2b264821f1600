"""Connection to a scheduler of Dask."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

from amp_rewrite.errors import MachineError

_INSTALL = "install the extra, from a checkout: pip install '.[fleet]'"


@contextmanager
def executor_of(scheduler: str) -> Iterator[tuple[Executor, int]]:
    """Yield the executor of a scheduler, by its address or file, and the number of jobs that its workers do at once.

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
