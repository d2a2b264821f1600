"""Batches on a real Dask cluster of processes, even if workers are killed."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from amp_rewrite import convert_many
from support.repositories import repository, tree

distributed = pytest.importorskip("distributed")
pytestmark = [pytest.mark.fleet, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    cluster = distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None)
    with cluster, distributed.Client(cluster) as client:
        yield client


@pytest.fixture
def src(tmp_path: Path) -> Path:
    return repository(tmp_path / "src")


def test_a_cluster_writes_the_same_files_as_one_process(client: Any, src: Path, tmp_path: Path) -> None:
    list(convert_many(src, out=tmp_path / "here"))
    there = list(convert_many(src, out=tmp_path / "there", executor=client.get_executor(pure=False)))
    assert {outcome.rc for outcome in there} == {0}
    assert tree(tmp_path / "there") == tree(tmp_path / "here")


@pytest.mark.parametrize("published", [False, True], ids=["while it writes", "before it reports"])
def test_a_worker_killed_midway_loses_no_model(client: Any, src: Path, tmp_path: Path, published: bool) -> None:
    killed = str(tmp_path / "killed")

    def arm() -> None:
        import signal
        from pathlib import Path

        from amp_rewrite.files import store

        real = store._commit

        def dying(*arguments: Any) -> None:
            first = not os.path.exists(killed)  # noqa: PTH110
            Path(killed).touch()
            if published or not first:
                real(*arguments)
            if first:
                os.kill(os.getpid(), signal.SIGKILL)

        store._commit = dying

    client.run(arm)
    outcomes = list(convert_many(src, out=tmp_path / "there", executor=client.get_executor(pure=False)))
    assert Path(killed).exists()
    assert [outcome.error for outcome in outcomes] == ["", "", ""]
    list(convert_many(src, out=tmp_path / "here"))
    files = {name: content for name, content in tree(tmp_path / "there").items() if not name.endswith(".tmp")}
    assert files == tree(tmp_path / "here")
    client.restart()
