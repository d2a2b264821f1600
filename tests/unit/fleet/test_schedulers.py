"""Connections to Dask and tasks of Ray, on stand-ins for both: what is asked of them, and that all is closed again.

test_dask.py and test_ray.py run real ones, where they are installed.
"""

from __future__ import annotations

import sys
from concurrent.futures import Executor, Future
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from amp_rewrite.errors import MachineError, PolicyError
from amp_rewrite.fleet.schedulers import RayExecutor, check_scheduler, executor_of


class Dask(ModuleType):
    """The part of `distributed` that is used; `calls` says what was done with it."""

    def __init__(self, threads: dict[str, int], refusal: OSError | None = None) -> None:
        super().__init__("distributed")
        self.calls: list[Any] = []
        self.executor = Executor()
        said = self.calls.append

        class Client:
            def __init__(client, *given: Any, **named: Any) -> None:
                said(("client", given, named))
                if refusal is not None:
                    raise refusal

            def nthreads(client) -> dict[str, int]:
                return threads

            def get_executor(client, **named: Any) -> Executor:
                said(("executor", named))
                return self.executor

            def close(client) -> None:
                said("client closed")

        def local_cluster(**named: Any) -> Any:
            said(("cluster", named))
            return SimpleNamespace(close=lambda: said("cluster closed"))

        self.Client, self.LocalCluster = Client, local_cluster


def dask(monkeypatch: pytest.MonkeyPatch, threads: dict[str, int], refusal: OSError | None = None) -> Dask:
    module = Dask(threads, refusal)
    monkeypatch.setitem(sys.modules, "distributed", module)
    return module


@pytest.mark.parametrize("text", ["local", "dask://head:8786", "dask:///srv/scheduler.json"])
def test_a_scheduler_is_local_or_an_address_or_a_file(text: str) -> None:
    assert check_scheduler(text) == text


@pytest.mark.parametrize("text", ["", "dask://", "dask:", "ray://head:10001", "Local", "head:8786"])
def test_what_is_not_a_scheduler_is_an_error_that_lists_the_ways(text: str) -> None:
    with pytest.raises(PolicyError, match="is not a scheduler; write local for Dask on this machine, dask://HOST:PORT"):
        check_scheduler(text)
    with pytest.raises(PolicyError), executor_of(text, 1):
        pass


def test_local_processes_have_one_thread_each_and_end_after_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    module = dask(monkeypatch, {"a": 1, "b": 1})
    with executor_of("local", 2) as (executor, threads):
        assert (executor, threads) == (module.executor, 2)
        assert module.calls[-1] == ("executor", {"pure": False})
    assert module.calls[0] == (
        "cluster",
        {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": None},
    )
    assert module.calls[-2:] == ["client closed", "cluster closed"]


@pytest.mark.parametrize(
    ("scheduler", "given", "named"),
    [
        ("dask://head:8786", ("tcp://head:8786",), {}),
        ("dask://tls://head:8786", ("tls://head:8786",), {}),
        ("dask:///srv/scheduler.json", (), {"scheduler_file": "/srv/scheduler.json"}),
    ],
)
def test_a_running_scheduler_is_connected_to_and_left_running(
    monkeypatch: pytest.MonkeyPatch, scheduler: str, given: tuple[str, ...], named: dict[str, str]
) -> None:
    module = dask(monkeypatch, {"a": 8, "b": 4})
    with executor_of(scheduler, 1) as (_, threads):
        assert threads == 12
    assert module.calls == [("client", given, named), ("executor", {"pure": False}), "client closed"]


def test_all_is_closed_when_the_body_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    module = dask(monkeypatch, {"a": 1})
    with pytest.raises(KeyError), executor_of("local", 1):
        raise KeyError
    assert module.calls[-2:] == ["client closed", "cluster closed"]


def test_a_scheduler_without_workers_or_without_an_answer_says_how_to_start_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = dask(monkeypatch, {})
    with pytest.raises(MachineError, match="has no workers; start some with `dask worker head:8786`"):
        executor_of("dask://head:8786", 1).__enter__()
    assert module.calls[-1] == "client closed"
    dask(monkeypatch, {}, TimeoutError("too late"))
    with pytest.raises(MachineError, match="no scheduler answers at dask://head:8786: too late; start one with"):
        executor_of("dask://head:8786", 1).__enter__()


def test_without_dask_or_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("distributed", "ray"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MachineError, match=r"needs Dask's distributed; install the extra, .*\[fleet\]"):
        executor_of("local", 1).__enter__()
    with pytest.raises(MachineError, match="RayExecutor needs ray; install it"):
        RayExecutor()


@pytest.mark.parametrize(
    ("options", "asked"),
    [({}, {"num_cpus": 1}), ({"num_cpus": 2, "max_retries": 3}, {"num_cpus": 2, "max_retries": 3})],
)
def test_a_task_of_ray_calls_the_function_and_asks_for_one_processor_by_default(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, int], asked: dict[str, int]
) -> None:
    said: list[dict[str, Any]] = []

    def remote(**named: Any) -> Any:
        said.append(named)

        def task(function: Any) -> Any:
            def call(*given: Any, **more: Any) -> Any:
                future: Future[Any] = Future()
                future.set_result(function(*given, **more))
                return SimpleNamespace(future=lambda: future)

            return SimpleNamespace(remote=call)

        return task

    module = ModuleType("ray")
    vars(module)["remote"] = remote
    monkeypatch.setitem(sys.modules, "ray", module)
    assert RayExecutor(**options).submit(int, "ff", base=16).result() == 255
    assert said == [asked]
