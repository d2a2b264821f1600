"""Replicas in a loop: equal to one process with all rows, skipping together, and ending together."""

import sys
from pathlib import Path

import numpy as np
import pytest

from amp_rewrite.errors import TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.train import replicas as parallel
from amp_rewrite.train.keras.loss_scale_optimizer import LossScaleOptimizer
from amp_rewrite.train.keras.variables import Variable
from amp_rewrite.train.loss_scale import DynamicLossScale
from amp_rewrite.train.replicas import SingleReplica, averaged, join_replicas, shard
from amp_rewrite.train.update.optimizers import SGD
from support.train.nets import batches, same
from support.train.processes import started
from support.train.replica import STEPS, Loop


class Replica:
    """One of two replicas; the other has already sent its part."""

    world = 2

    def __init__(self, rank: int, other: Array | float = 0) -> None:
        self.rank, self.other = rank, other

    def total(self, bucket: Array) -> Array:
        self.own = bucket
        return np.asarray(bucket + self.other)


def averages(first: list[Array | None], second: list[Array | None], **rows: int) -> list[Array | None]:
    """Return the averages of the first replica; `rows`: the rows of each as r0 and r1."""
    there = Replica(1)
    averaged(there, second, rows=rows.get("r1", 1))
    return averaged(Replica(0, there.own), first, rows=rows.get("r0", 1))


@pytest.mark.parametrize("fixed", [False, True])
def test_nonfinite_gradients_on_one_replica_skip_the_step_on_all(fixed: bool) -> None:
    variable = Variable([1.0], "v")
    optimizer = LossScaleOptimizer(SGD(1.0), 2 if fixed else DynamicLossScale(2, 1))
    (gradient,) = averages([np.array([4], np.float32)], [np.array([np.nan], np.float32)])
    optimizer.apply_gradients([(gradient, variable)])
    assert np.isnan(variable.numpy()).all() if fixed else variable.numpy().tolist() == [1.0]
    assert optimizer.loss_scale() == (2 if fixed else 1)


def test_means_count_rows_and_ignore_none() -> None:
    first, second = ([np.array(m, np.float32), None, np.float32(n)] for m, n in (([[4, 8]], 0), ([[1, 2]], 1)))
    matrix, nothing, scalar = averages(first, second, r0=1, r1=3)
    assert (np.asarray(matrix).tolist(), nothing, scalar) == ([[1.75, 3.5]], None, 0.75)


def test_a_shard_is_a_part_of_each_batch_and_scalars_stay_whole() -> None:
    batch = {"x": np.arange(5), "ratio": np.array(0.5)}
    parts = [next(shard([batch], Replica(rank))) for rank in (0, 1)]
    assert [p["x"].tolist() for p in parts] == [[0, 1, 2], [3, 4]]
    assert [p["ratio"].tolist() for p in parts] == [0.5, 0.5]
    with pytest.raises(TrainingError, match=r"^batch 1 has fewer rows than there are replicas \(2\); use"):
        list(shard([batch, {"x": np.zeros((1, 8))}], Replica(0)))


def test_a_process_without_others_or_pytorch_or_with_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with join_replicas() as replicas:
        assert replicas == SingleReplica()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(TrainingError, match="PyTorch is not installed; pip install torch"), join_replicas():
        pass
    assert (parallel._device("gloo", 4), parallel._device("nccl", 1)) == ("cpu", "cuda:0")
    with pytest.raises(TrainingError, match="nccl needs one GPU per process, but this process sees 2"):
        parallel._device("nccl", 2)


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
    for (
        name,
        value,
    ) in alone.state.items():  # sums of 16 rows in another order; Adam's steps of 0.01 carry the difference forward
        np.testing.assert_allclose(states[0][name], value, atol=2e-6)


@pytest.mark.torch
def test_when_a_replica_dies_the_others_end_with_an_error(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (code, text), (died, _) = started(tmp_path, "--dies", "4")
    assert (code, died) == (1, 9)
    assert "replica 0 of 2 got no answer from the others" in text and "restart all replicas" in text
