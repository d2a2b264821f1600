"""The executor of a batch, and how many jobs run at once, from the options `--scheduler` and `--jobs`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from amp_rewrite.cli.batch import executor_for


@pytest.mark.parametrize(
    ("scheduler", "jobs", "workers", "at_once"),
    [
        (None, None, None, 1),
        (None, 3, None, 3),
        ("", 3, None, 3),
        ("local", None, 1, 7),
        ("local", 3, 3, 3),
    ],
)
def test_a_scheduler_gets_as_many_workers_as_jobs_and_without_jobs_runs_its_threads(
    scheduler: str | None, jobs: int | None, workers: int | None, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, int]] = []

    @contextmanager
    def executor_of(scheduler: str, workers: int) -> Iterator[tuple[str, int]]:
        started.append((scheduler, workers))
        yield "an executor", 7

    monkeypatch.setattr("amp_rewrite.fleet.schedulers.executor_of", executor_of)
    with executor_for(scheduler, jobs) as (executor, count):
        assert (executor, count) == (None if workers is None else "an executor", at_once)
    assert started == ([] if workers is None else [(scheduler, workers)])
