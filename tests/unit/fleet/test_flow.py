"""Jobs through an executor: processes that die, results that never pile up, interrupts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from amp_rewrite.fleet import flow
from amp_rewrite.fleet.flow import Lost, Processes, through


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


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_process_that_is_killed_costs_at_most_its_own_job(tmp_path: Path) -> None:
    jobs = [("", 0), ("dies", 1), ("", 2), ("fails", 4), ("", 5)]
    results = list(through(jobs, work, Processes(2), 2))
    results += through([(f"dies once:{tmp_path / 'flag'}", 3)], work, Processes(2), 2)
    lost = {result.job[1]: result.reason for result in results if isinstance(result, Lost)}
    assert sorted(result for result in results if isinstance(result, int)) == [0, 2, 3, 5]
    assert lost.keys() == {1, 4}
    assert "was killed, twice" in lost[1] and lost[4] == "ValueError: no such thing"


def test_a_result_that_is_not_taken_holds_up_the_next_job() -> None:
    begun: list[int] = []
    with ThreadPoolExecutor(4) as threads:
        results = through(range(9), begun.append, threads, 2)
        next(results)
        time.sleep(0.05)
        assert len(begun) <= 2
        assert len(list(results)) == 8


def test_an_executor_that_breaks_loses_jobs_by_name() -> None:
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(1, get_context("spawn")) as processes:
        results = list(through([("dies", 0), ("", 1), ("", 2)], work, processes, 1))
    assert [result.job[1] for result in results if isinstance(result, Lost)] == [0, 1, 2]


INTERRUPTED = """
from amp_rewrite.fleet.flow import Processes, through

processes = Processes(4)
for _ in range(5):
    results = through((bytes(300_000) for _ in range(300)), len, processes, 16)
    assert [next(results) for _ in range(40)] == [300_000] * 40
    try:
        results.throw(KeyboardInterrupt)
    except KeyboardInterrupt:
        print("ended")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_processes_that_end_while_they_read_a_job_say_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n" * 5, "")


STARTED = """
import signal
from multiprocessing import util
from amp_rewrite.fleet.flow import Processes, through

start = util.spawnv_passfds

def started(*given):
    pid = start(*given)
    if "spawn_main" in str(given):  # not multiprocessing's own process
        signal.raise_signal(signal.SIGTERM)
    return pid

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    util.spawnv_passfds = started
    try:
        list(through([b"1"], len, Processes(1), 1))
    except KeyboardInterrupt:
        print("ended")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_an_interrupt_waits_until_a_process_is_started() -> None:
    done = subprocess.run([sys.executable, "-c", STARTED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")


class Finalized:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


def finalized(_: int) -> bool:
    heard = signal.getsignal(signal.SIGTERM)
    Finalized()
    return signal.getsignal(signal.SIGTERM) is heard


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_a_signal_to_a_process_in_a_finalizer_is_silent_and_the_next_one_is_heard(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert list(through([0], finalized, Processes(1), 1)) == [True]
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="no masks of signals")
def test_processes_start_blind_to_what_a_terminal_sends_to_all() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with flow._starting_processes():
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ()) - before
    assert blocked == {signal.SIGINT, signal.SIGHUP} - before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.parametrize("at_once", [False, True])
def test_at_the_end_what_runs_is_waited_for_unless_it_ends_at_once(at_once: bool) -> None:
    go, begun = threading.Event(), threading.Event()

    def job() -> bool:
        begun.set()
        return go.wait(60)

    with ThreadPoolExecutor(1) as pool:
        running, waiting = pool.submit(job), pool.submit(job)
        assert begun.wait(60)
        threading.Timer(0.05, go.set).start()
        flow._end([running, waiting], None, at_once=at_once)
        assert waiting.cancelled() and (running.done() or at_once)
