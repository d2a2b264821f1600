"""Connections to a scheduler of Dask, on a stand-in: what is asked of it, and that all is closed again.

test_dask.py runs a real one, where it is installed.
"""

import sys
from unittest.mock import MagicMock

import pytest

from amp_rewrite.errors import MachineError
from amp_rewrite.pipeline.batch.processes import executor_of


@pytest.fixture
def distributed(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """The part of `distributed` that is used, with twelve threads on two workers."""
    module = MagicMock()
    client = module.Client.return_value
    client.__enter__.return_value, client.__exit__.return_value = client, None
    client.nthreads.return_value = {"a": 8, "b": 4}
    monkeypatch.setitem(sys.modules, "distributed", module)
    return module


@pytest.mark.parametrize(
    ("scheduler", "given", "named"),
    [
        ("head:8786", ("head:8786",), {}),
        ("/srv/scheduler.json", (), {"scheduler_file": "/srv/scheduler.json"}),
    ],
)
def test_a_running_scheduler_is_connected_to_and_left_running(
    distributed: MagicMock, scheduler: str, given: tuple[str, ...], named: dict[str, str]
) -> None:
    client = distributed.Client.return_value
    with executor_of(scheduler) as (executor, threads):
        assert (executor, threads) == (client.get_executor.return_value, 12)
    distributed.Client.assert_called_once_with(*given, **named)
    client.get_executor.assert_called_once_with(pure=False)
    client.__exit__.assert_called_once()
    client.shutdown.assert_not_called()


@pytest.mark.parametrize("refusal", [TimeoutError("too late"), ValueError("too late")])
def test_a_scheduler_without_workers_or_an_answer_says_so(distributed: MagicMock, refusal: Exception) -> None:
    client = distributed.Client.return_value
    client.nthreads.return_value = {}
    with pytest.raises(MachineError, match="has no workers; start some with `dask worker head:8786`"):
        executor_of("head:8786").__enter__()
    client.__exit__.assert_called_once()
    distributed.Client.side_effect = refusal
    with pytest.raises(MachineError, match="no scheduler answers at head:8786: too late; give HOST:PORT of a running"):
        executor_of("head:8786").__enter__()


def test_without_dask_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(MachineError, match=r"needs Dask's distributed; install the extra, .*\[fleet\]"):
        executor_of("head:8786").__enter__()
