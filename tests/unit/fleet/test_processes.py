"""The processes of a batch: which of them end with it."""

from __future__ import annotations

from typing import Any

import pytest

from amp_rewrite.fleet import flow


class Child:
    """A process that misses the first signal."""

    def __init__(self, pid: int) -> None:
        self.pid, self.signals, self.sentinel = pid, 0, -pid

    def terminate(self) -> None:
        self.signals += 1

    def is_alive(self) -> bool:
        return self.signals < 2


class Pool:
    """Takes the place of the executor of concurrent.futures."""

    def __init__(self, count: int, context: object, initializer: object) -> None:
        self.count, self.closed = count, dict[str, bool]()

    def shutdown(self, **how: bool) -> None:
        self.closed = how


@pytest.mark.parametrize("at_once", [False, True])
def test_only_processes_of_the_batch_end_with_it_and_at_once_only_if_asked(
    at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = [Child(1)]
    monkeypatch.setattr(flow, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(flow.multiprocessing, "active_children", lambda: list(children))
    waits: list[tuple[list[int], float]] = []
    monkeypatch.setattr(flow.connection, "wait", lambda sentinels, timeout: waits.append((sentinels, timeout)))
    processes = flow.Processes(3)
    processes.close(at_once=True)
    assert not children[0].signals, "none was started"
    pool: Any = processes.pool
    assert processes.pool is pool and pool.count == 3
    children.append(Child(2))
    processes.close(at_once=at_once)
    assert [child.signals for child in children] == [0, 2 * at_once]
    assert waits == [([-2], 0.1)] * 2 * at_once
    assert pool.closed == {"wait": True, "cancel_futures": True}
    assert processes.pool is not pool
