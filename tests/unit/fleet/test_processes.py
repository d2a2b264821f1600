"""Jobs in other processes: some die, results never pile up, and interrupts end them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from amp_rewrite.fleet.processes import Lost, in_processes, through

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs signals")


def work(job: tuple[str, int]) -> int:
    """Do a job in another process: return the number, or die as the text says."""
    how, number = job
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "fails":
        raise ValueError("no such thing")
    if how.startswith("dies once"):
        flag = Path(how.partition(":")[2])
        if not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return number


@posix
def test_a_process_that_is_killed_costs_at_most_its_own_job(tmp_path: Path) -> None:
    jobs = [("", 0), ("dies", 1), ("", 2), (f"dies once:{tmp_path / 'flag'}", 3), ("fails", 4), ("", 5)]
    results = list(in_processes(iter(jobs), work, 2))
    lost = {result.job[1]: result.reason for result in results if isinstance(result, Lost)}
    assert sorted(result for result in results if isinstance(result, int)) == [0, 2, 3, 5]
    assert lost.keys() == {1, 4}
    assert "was killed, twice" in lost[1] and lost[4] == "ValueError: no such thing"


def beside(job: tuple[Path, int]) -> str:
    """Wait beside another job (0), or die in a process that began after that one (1); the second time, be done."""
    folder, number = job
    flag, other = folder / f"{number}", folder / f"{1 - number}"
    if flag.exists():
        return "done again"
    flag.touch()
    patience = time.monotonic() + 20
    while time.monotonic() < patience and not (number and other.exists()):
        time.sleep(0.05)
    if number:
        os.kill(os.getpid(), signal.SIGKILL)
    return "nobody noticed"


@posix
def test_the_death_of_each_process_is_noticed_while_others_work(tmp_path: Path) -> None:
    assert list(in_processes(iter([(tmp_path, 0), (tmp_path, 1)]), beside, 2)) == ["done again"] * 2


def test_a_result_that_is_not_taken_holds_up_the_next_job() -> None:
    begun: list[int] = []
    with ThreadPoolExecutor(4) as threads:
        results = through(iter(range(9)), begun.append, threads, 2)
        next(results)
        time.sleep(0.05)
        assert len(begun) <= 2
        assert len(list(results)) == 8


@posix
def test_an_executor_that_breaks_gets_no_more_jobs() -> None:
    jobs = iter([("dies", 0), ("", 1), ("", 2)])
    with ProcessPoolExecutor(1, get_context("spawn")) as processes:
        results = list(through(jobs, work, processes, 1))
        assert [(result.job[1], result.killed) for result in results if isinstance(result, Lost)] == [(0, True)]
        assert [job[1] for job in jobs] == [1, 2]


def test_what_has_not_begun_is_cancelled_at_the_end() -> None:
    begun: list[int] = []

    def slow(job: int) -> None:
        begun.append(job)
        time.sleep(0.1)

    with ThreadPoolExecutor(1) as threads:
        results = through(iter(range(8)), slow, threads, 4)
        next(results)
        results.close()
    assert len(begun) <= 2


WRITING = """
import os, signal, sys, time
from pathlib import Path
from amp_rewrite.files.disk import replacing
from amp_rewrite.fleet.processes import in_processes

def write(path):
    with replacing(Path(path)) as file:
        file.write(b"half")
        print(os.getpid(), flush=True)
        time.sleep(600)

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    list(in_processes(iter([f"{sys.argv[1]}/{i}" for i in range(2)]), write, 2))
"""


@posix
@pytest.mark.parametrize("way", ["the parent", "the parent, hard", "a process"])
def test_processes_undo_what_they_write_and_end_with_their_parent(tmp_path: Path, way: str) -> None:
    (tmp_path / "writing.py").write_text(WRITING)
    (tmp_path / "out").mkdir()
    command = [sys.executable, tmp_path / "writing.py", tmp_path / "out"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout is not None
        processes = [int(parent.stdout.readline()) for _ in range(2)]
        assert len(list((tmp_path / "out").iterdir())) == 2
        if way == "a process":
            os.kill(processes[0], signal.SIGTERM)
            parent.stdout.readline()  # its job is done again
            assert len(list((tmp_path / "out").iterdir())) == 1
        parent.send_signal(signal.SIGKILL if way == "the parent, hard" else signal.SIGTERM)
        parent.wait(60)
    patience = time.monotonic() + 30 * (way == "the parent, hard")
    while any(map(_alive, processes)) and time.monotonic() < patience:
        time.sleep(0.05)
    assert not list((tmp_path / "out").iterdir())
    assert not [pid for pid in processes if _alive(pid)]


def _alive(pid: int) -> bool:
    """True for a process that runs; one that ended may wait for its parent to notice."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"
