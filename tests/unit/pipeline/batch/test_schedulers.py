"""Connections to a scheduler of Dask, on a stand-in: what is asked of it, and that all is closed again.

test_dask.py runs a real one, where it is installed.
"""

from __future__ import annotations

import sys
from concurrent.futures import Executor
from types import ModuleType
from typing import Any

import pytest

from amp_rewrite.errors import MachineError
from amp_rewrite.pipeline.batch.processes import executor_of


class Dask(ModuleType):
    """The part of `distributed` that is used; `calls` says what was done with it."""

    def __init__(self, threads: dict[str, int], refusal: Exception | None = None) -> None:
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

            def __enter__(client) -> Any:
                return client

            def __exit__(client, *_: object) -> None:
                said("closed")

        self.Client = Client


def dask(monkeypatch: pytest.MonkeyPatch, threads: dict[str, int], refusal: Exception | None = None) -> Dask:
    module = Dask(threads, refusal)
    monkeypatch.setitem(sys.modules, "distributed", module)
    return module


@pytest.mark.parametrize(
    ("scheduler", "given", "named"),
    [("head:8786", ("head:8786",), {}), ("/srv/scheduler.json", (), {"scheduler_file": "/srv/scheduler.json"})],
)
def test_a_running_scheduler_is_connected_to_and_left_running(
    monkeypatch: pytest.MonkeyPatch, scheduler: str, given: tuple[str, ...], named: dict[str, str]
) -> None:
    module = dask(monkeypatch, {"a": 8, "b": 4})
    with executor_of(scheduler) as (executor, threads):
        assert (executor, threads) == (module.executor, 12)
    assert module.calls == [("client", given, named), ("executor", {"pure": False}), "closed"]


@pytest.mark.parametrize("refusal", [TimeoutError("too late"), ValueError("too late")])
def test_a_scheduler_without_workers_is_told_of(monkeypatch: pytest.MonkeyPatch, refusal: Exception) -> None:
    module = dask(monkeypatch, {})
    with pytest.raises(MachineError, match="has no workers; start some with `dask worker head:8786`"):
        executor_of("head:8786").__enter__()
    assert module.calls[-1] == "closed"
    dask(monkeypatch, {}, refusal)
    with pytest.raises(MachineError, match="no scheduler answers at head:8786: too late; give HOST:PORT of a running"):
        executor_of("head:8786").__enter__()


def test_without_dask_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(MachineError, match=r"needs Dask's distributed; install the extra, .*\[fleet\]"):
        executor_of("head:8786").__enter__()
