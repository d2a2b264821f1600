"""Jobs in other processes: crashes, bounded queues and interrupts."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from amp_rewrite.errors import MachineError
from amp_rewrite.pipeline.batch.processes import Processes, executor_of, run_jobs

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs signals")


def work(job: tuple[str, int]) -> int:
    """Run a job in another process: return the number, or end as requested."""
    how, number = job
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def lost(job: tuple[str, int], reason: str) -> str:
    return f"{job[1]}: {reason}"


@posix
def test_a_killed_process_loses_only_its_own_job() -> None:
    jobs = [("", 0), ("dies", 1), ("", 2), ("", 3)]
    with Processes(2) as pool:
        results = list(run_jobs(iter(jobs), work, pool, 2, lost))
    assert sorted(map(str, results)) == [
        "0",
        "1: the process that converted it was killed; it may need more memory than is available",
        "2",
        "3",
    ]


@posix
def test_ctrl_c_only_interrupts_the_parent_even_while_a_process_starts() -> None:
    """A process that loads modules would print a traceback."""
    with Processes(1) as pool:
        blocked = pool.submit(partial(signal.pthread_sigmask, signal.SIG_BLOCK), []).result()
    assert signal.SIGINT in blocked and signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@posix
def test_a_broken_or_failing_executor_loses_jobs_with_the_reason() -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as processes:
        results = list(run_jobs(iter([("dies", 0), ("", 1)]), work, processes, 1, lost))
    assert [str(result).partition(":")[0] for result in results] == ["0", "1"]
    assert all("BrokenProcessPool: " in str(result) for result in results)
    with ThreadPoolExecutor(1) as threads:
        assert [*run_jobs(iter([0]), lambda _: str([][0]), threads, 1, lambda _, reason: reason)] == [
            "IndexError: list index out of range"
        ]


def test_results_never_pile_up_and_pending_jobs_are_cancelled() -> None:
    begun: list[int] = []

    def slow(job: int) -> None:
        begun.append(job)
        time.sleep(0.1)

    with ThreadPoolExecutor(1) as threads:
        results = run_jobs(iter(range(8)), slow, threads, 4, lambda *_: None)
        next(results)
        assert len(begun) <= 4
        results.close()
    assert len(begun) <= 2


WRITING = """
import os, signal, sys, time
from functools import partial
from pathlib import Path
from amp_rewrite.files.disk import replacing
from amp_rewrite.pipeline.batch.processes import Processes, run_jobs

def write(path):
    with replacing(Path(path)) as file:
        file.write(b"half")
        os.write(1, f"{os.getpid()}\\n".encode())  # at once: two processes share the pipe
        while True:
            time.sleep(0.1)

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Processes(2) as pool:
        list(run_jobs(iter([f"{sys.argv[1]}/{i}" for i in range(2)]), write, pool, 2, partial(print, flush=True)))
"""


@posix
@pytest.mark.parametrize("way", ["the parent", "the parent, hard", "a process"])
def test_processes_remove_partial_files_and_end_with_their_parent(tmp_path: Path, way: str) -> None:
    (tmp_path / "writing.py").write_text(WRITING)
    (tmp_path / "out").mkdir()
    command = [sys.executable, tmp_path / "writing.py", tmp_path / "out"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        try:
            assert parent.stdout is not None
            processes = [int(parent.stdout.readline()) for _ in range(2)]
            assert len(list((tmp_path / "out").iterdir())) == 2
            if way == "a process":
                os.kill(processes[0], signal.SIGTERM)
                parent.stdout.readline()  # its job is lost
                assert len(list((tmp_path / "out").iterdir())) == 1
            parent.send_signal(signal.SIGKILL if way == "the parent, hard" else signal.SIGTERM)
            parent.wait(60)
        finally:
            parent.kill()
    while way == "the parent, hard" and any(map(_alive, processes)):
        time.sleep(0.05)
    assert not list((tmp_path / "out").iterdir())
    assert not [pid for pid in processes if _alive(pid)]


def _alive(pid: int) -> bool:
    """Whether a process is running; an ended one may still be a zombie."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


# -- a stub of Dask's scheduler; test_dask.py runs a real one if it is installed -----------------------------


@pytest.fixture
def distributed(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """A stub of `distributed` with twelve threads on two workers."""
    module = MagicMock()
    client = module.Client.return_value
    client.__enter__.return_value, client.__exit__.return_value = client, None
    client.nthreads.return_value = {"a": 8, "b": 4}
    monkeypatch.setitem(sys.modules, "distributed", module)
    return module


@pytest.mark.parametrize(
    ("scheduler", "arguments", "named"),
    [("head:8786", ("head:8786",), {}), ("/srv/scheduler.json", (), {"scheduler_file": "/srv/scheduler.json"})],
)
def test_a_running_scheduler_is_used_and_left_running(
    distributed: MagicMock, scheduler: str, arguments: tuple[str, ...], named: dict[str, str]
) -> None:
    client = distributed.Client.return_value
    with executor_of(scheduler) as (executor, threads):
        assert (executor, threads) == (client.get_executor.return_value, 12)
    distributed.Client.assert_called_once_with(*arguments, **named)
    client.get_executor.assert_called_once_with(pure=False)
    client.__exit__.assert_called_once()
    client.shutdown.assert_not_called()


@pytest.mark.parametrize("refusal", [TimeoutError("too late"), ValueError("too late")])
def test_a_scheduler_without_workers_or_an_answer_is_reported(distributed: MagicMock, refusal: Exception) -> None:
    client = distributed.Client.return_value
    client.nthreads.return_value = {}
    with pytest.raises(MachineError, match="has no workers; start some with `dask worker head:8786`"):
        executor_of("head:8786").__enter__()
    client.__exit__.assert_called_once()
    distributed.Client.side_effect = refusal
    with pytest.raises(MachineError, match="no scheduler answers at head:8786: too late; pass HOST:PORT of a running"):
        executor_of("head:8786").__enter__()


def test_without_dask_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(MachineError, match=r"requires Dask's `distributed` package; install .*\[fleet\]"):
        executor_of("head:8786").__enter__()
