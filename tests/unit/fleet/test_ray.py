"""Tasks of Ray as an executor, on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from amp_rewrite import convert_many
from amp_rewrite.fleet.schedulers import RayExecutor
from support.repositories import repository, tree

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.fleet, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_tasks_write_the_same_files_as_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        src = repository(tmp_path / "src")
        outcomes = list(convert_many(src, out=tmp_path / "there", executor=RayExecutor(), jobs=2))
    finally:
        ray.shutdown()
    list(convert_many(src, out=tmp_path / "here"))
    assert [outcome.error for outcome in outcomes] == ["", "", ""]
    assert tree(tmp_path / "there") == tree(tmp_path / "here")
