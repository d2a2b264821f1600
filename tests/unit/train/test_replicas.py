"""Replicas in a loop: equal to one process with all rows, skipping together, and ending together."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from amp_rewrite.errors import TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.settings.loss_scale import DynamicLossScale
from amp_rewrite.train import replicas as parallel
from amp_rewrite.train.keras.loss_scale_optimizer import LossScaleOptimizer
from amp_rewrite.train.keras.variables import Variable
from amp_rewrite.train.replicas import SingleReplica, averaged, join_replicas, shard
from amp_rewrite.train.update.optimizers import SGD
from support.train.nets import batches, same
from support.train.processes import started
from support.train.replica import STEPS, Loop


class Threads:
    """Replicas in threads of this process, which meet at a barrier."""

    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world, timeout=20)
        self.buckets: dict[int, Array] = {}

    def seen_by(self, rank: int) -> _Thread:
        return _Thread(rank, self.barrier.parties, self)


class _Thread:
    def __init__(self, rank: int, world: int, group: Threads) -> None:
        self.rank, self.world, self._group = rank, world, group

    def total(self, bucket: Array) -> Array:
        self._group.buckets[self.rank] = bucket
        self._group.barrier.wait()
        found = functools.reduce(np.add, [self._group.buckets[rank] for rank in range(self.world)])
        self._group.barrier.wait()
        return np.asarray(found)


def together(world: int, work: Callable[[Any], Any]) -> list[Any]:
    """The results of the work of all replicas, by rank."""
    group, found = Threads(world), dict[int, Any]()

    def one(rank: int) -> None:
        found[rank] = work(group.seen_by(rank))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(world)]


@pytest.mark.parametrize("fixed", [False, True])
def test_what_is_not_finite_on_one_replica_skips_the_step_on_all(fixed: bool) -> None:
    def work(replicas: Any) -> tuple[Array, Array]:
        variable = Variable([1.0], "v")
        optimizer = LossScaleOptimizer(SGD(1.0), 2 if fixed else DynamicLossScale(2, 1))
        gradient = np.array([np.nan if replicas.rank else 4], np.float32)
        optimizer.apply_gradients([(averaged(replicas, [gradient])[0], variable)])
        return variable.numpy(), optimizer.loss_scale()

    for value, scale in together(2, work):
        assert (not np.isfinite(value).any() if fixed else value.tolist() == [1.0]) and scale == (2 if fixed else 1)


def test_means_count_rows_and_leave_out_what_is_none() -> None:
    def work(replicas: Any) -> list[Array | None]:
        value = np.array([[1.0, 2.0]] if replicas.rank else [[4.0, 8.0]], np.float32)
        return averaged(replicas, [value, None, np.array(replicas.rank, np.float32)], rows=1 + 2 * replicas.rank)

    for matrix, nothing, scalar in together(2, work):
        assert (matrix.tolist(), nothing, scalar.tolist()) == ([[1.75, 3.5]], None, 0.75)


def test_a_shard_is_a_part_of_each_batch_and_scalars_are_whole() -> None:
    batch = {"x": np.arange(5), "ratio": np.array(0.5)}
    parts = [next(shard([batch], _Thread(rank, 2, Threads(2)))) for rank in (0, 1)]
    assert [p["x"].tolist() for p in parts] == [[0, 1, 2], [3, 4]]
    assert [p["ratio"].tolist() for p in parts] == [0.5, 0.5]
    with pytest.raises(TrainingError, match=r"^batch 1 has fewer rows than there are replicas \(2\); use"):
        list(shard([batch, {"x": np.zeros((1, 8))}], _Thread(0, 2, Threads(2))))


def test_a_process_that_was_started_by_itself_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with join_replicas() as replicas:
        assert replicas == SingleReplica()


def test_without_pytorch_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(TrainingError, match="PyTorch is not installed; pip install torch"), join_replicas():
        pass


def test_nccl_wants_one_gpu_for_each_process() -> None:
    assert (parallel._device("gloo", 4), parallel._device("nccl", 1)) == ("cpu", "cuda:0")
    with pytest.raises(TrainingError, match="nccl needs one GPU per process, but this process sees 2"):
        parallel._device("nccl", 2)


# -- processes -----------------------------------------------------------------------------------------


@pytest.mark.torch
def test_two_processes_train_as_one_and_skip_together(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    assert [code for code, _ in started(tmp_path, "--poison", "5")] == [0, 0]
    states = [dict(np.load(tmp_path / f"{rank}.npz")) for rank in range(2)]
    alone = Loop()
    for number, batch in enumerate(batches(STEPS)):
        if number == 5:
            batch["x"][-1, 0] = np.inf
        alone.step(SingleReplica(), batch)

    assert same(*states) and states[0]["step"] == STEPS - 1 and states[0]["loss_scale"] == 2**14
    for name, value in alone.state.items():  # sums of 16 rows in another order; Adam's steps of 0.01 carry them on
        np.testing.assert_allclose(states[0][name], value, atol=2e-6)


@pytest.mark.torch
def test_when_a_replica_dies_the_others_end_with_an_error(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (code, said), (died, _) = started(tmp_path, "--dies", "4")
    assert (code, died) == (1, 9)
    assert "replica 0 of 2 got no answer from the others" in said and "restart all of them" in said
