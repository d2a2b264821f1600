"""Replicas of a step: equal to one process with all rows, skipping together, and ending together."""

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
from amp_rewrite.files.model import Model
from amp_rewrite.settings.loss_scale import DynamicLossScale
from amp_rewrite.train.keras.loss_scale_optimizer import LossScaleOptimizer
from amp_rewrite.train.keras.variables import Variable
from amp_rewrite.train.parallel import replicas as parallel
from amp_rewrite.train.parallel.replicas import SingleReplica, averaged, check_strategy, join_replicas, shard
from amp_rewrite.train.parallel.trainer import DataParallelTrainer, cut
from amp_rewrite.train.step import checkpoint
from amp_rewrite.train.step.step import TrainingStep, training_step
from amp_rewrite.train.step.trainer import History, Trainer
from amp_rewrite.train.update.optimizers import SGD
from support.train import replica
from support.train.nets import CROSS_ENTROPY, batches, mlp, parsed, same
from support.train.processes import started

DATA = list(batches(12))
PLACE: dict[str, Any] = {"providers": ("CPUExecutionProvider",), "threads": 1}
ROUNDING = 2e-6
"""Sums of 16 rows in another order differ by some ulps of float32 (2**-24); Adam's steps of 0.01 carry them on."""


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
    """What the work of each replica gave, or the error that ended it, by rank."""
    group, found = Threads(world), dict[int, Any]()

    def one(rank: int) -> None:
        try:
            found[rank] = work(group.seen_by(rank))
        except (TrainingError, threading.BrokenBarrierError) as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(world)]


def step(**options: Any) -> TrainingStep:
    return training_step(mlp(), **{"loss": CROSS_ENTROPY, "optimizer": "adam,lr=0.01", **options})


def fitted(whole: TrainingStep, data: list[dict[str, Array]]) -> Callable[[Any], tuple[Trainer, History]]:
    """The work of a replica that trains on its rows of the data."""

    def work(replicas: Any) -> tuple[Trainer, History]:
        trainer = DataParallelTrainer(whole, replicas, **PLACE)
        return trainer, trainer.fit(list(shard(data, replicas)))

    return work


# -- the two halves ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "float32"},
        {},
        {"policy": "mixed_bfloat16", "optimizer": "rmsprop,momentum=0.9"},
        {"loss_scale": 8, "micro_batches": 5, "optimizer": "adamw,global_clipnorm=1"},
        {"freeze": ["w1"]},
    ],
)
def test_gradients_and_update_one_after_the_other_give_the_bits_of_the_whole_step(options: dict[str, Any]) -> None:
    whole = step(**options)
    one, halves = Trainer(whole, **PLACE), DataParallelTrainer(whole, SingleReplica(), **PLACE)

    assert one.fit(DATA) == halves.fit(DATA)
    assert same(one.state, halves.state) and one.state.keys() == halves.state.keys()


def test_only_gradients_cross_the_cut() -> None:
    halves = cut(step(policy="float32").model)
    assert len(halves.crossing) == 4
    assert [v.name for v in halves.gradients.proto.graph.input] == ["x", "t", "w1", "b1", "w2", "b2"]
    assert [v.name for v in halves.gradients.proto.graph.output] == ["loss", "accuracy", *halves.crossing]
    assert "x" not in [v.name for v in halves.apply.proto.graph.input]


def test_a_model_that_is_no_step_is_not_cut() -> None:
    with pytest.raises(TrainingError) as error:
        cut(Model(mlp()))
    assert str(error.value) == (
        "the model cannot be cut into gradients and update: no node is named amp.update/…; pass a step's model"
    )


def test_a_step_whose_update_feeds_its_gradients_is_not_cut() -> None:
    model = parsed("net (float[1] x) => (float[1] y) { a = Neg (x) y = Neg (a) }")
    model.graph.node[0].name = "amp.update/a"
    with pytest.raises(TrainingError, match=r"^the model cannot be cut .*: 'a' of the update is read by the backward"):
        cut(Model(model))


def test_an_update_that_reads_whole_numbers_is_not_cut() -> None:
    model = parsed("net (float[1] x) => (int64[1] y) { s = Shape (x) y = Neg (s) }")
    model.graph.node[1].name = "amp.update/y"
    with pytest.raises(TrainingError) as error:
        cut(Model(model))
    assert str(error.value) == "the update reads 's', which is not float32 and cannot be averaged; pass a step's model"


# -- replicas together ---------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3])
def test_replicas_make_the_step_of_one_process_with_all_rows(world: int) -> None:
    whole = step(policy="float32", loss_scale="dynamic")
    alone = Trainer(whole, **PLACE)
    history = alone.fit(DATA)
    found = together(world, fitted(whole, DATA))  # 3 replicas have 6, 5 and 5 rows

    for trainer, seen in found:
        assert same(trainer.state, found[0][0].state)
        assert seen == found[0][1]
        np.testing.assert_allclose(seen.losses, history.losses, rtol=1e-5)
        np.testing.assert_allclose(seen.metrics["accuracy"], history.metrics["accuracy"], rtol=1e-6)
        for name, value in alone.state.items():
            np.testing.assert_allclose(trainer.state[name], value, rtol=1e-4, atol=ROUNDING)


def test_without_the_exchange_replicas_drift_apart() -> None:
    whole = step(policy="float32")
    alone = [Trainer(whole, **PLACE), Trainer(whole, **PLACE)]
    for rank, trainer in enumerate(alone):
        trainer.fit(list(shard(DATA, _Thread(rank, 2, Threads(2)))))
    assert np.abs(alone[0].state["w1"] - alone[1].state["w1"]).max() > 100 * ROUNDING


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_on_one_replica_skips_the_step_on_all(bad: float) -> None:
    whole = step()

    def work(replicas: Any) -> Trainer:
        trainer = DataParallelTrainer(whole, replicas, **PLACE)
        rows = [dict(batch) for batch in shard(DATA[:4], replicas)]
        if replicas.rank == 1:
            rows[2]["x"] = np.full_like(rows[2]["x"], bad)
        trainer.fit(rows[:2])
        before = {name: a.copy() for name, a in trainer.state.items()}
        trainer.fit(rows[2:3])
        assert same(before, trainer.state, "loss_scale", "good_steps")
        trainer.fit(rows[3:])
        return trainer

    first, second = together(2, work)
    assert (first.skipped, first.steps, first.loss_scale) == (1, 3, 2.0**14)
    assert (second.skipped, second.steps, second.loss_scale) == (1, 3, 2.0**14)
    assert same(first.state, second.state) and np.isfinite(first.state["w1"]).all()


def test_running_statistics_are_means_of_those_of_the_replicas() -> None:
    model = parsed(
        """net (float[N,2] x) => (float[N,2] y)
        <float[2] s = {1, 1}, float[2] b = {0, 0}, float[2] mean = {0, 0}, float[2] var = {1, 1}> {
          y = BatchNormalization <momentum = 0.5> (x, s, b, mean, var)
        }"""
    )
    whole = training_step(model, loss="mean_squared_error(y, t)", training_mode=True, policy="float32")
    x = np.array([[0, 0], [2, 4], [6, 0], [10, 8]], np.float32)
    found = together(2, fitted(whole, [{"x": x, "t": np.zeros_like(x)}]))

    np.testing.assert_allclose(found[0][0].state["mean"], [0.5 * (1 + 8) / 2, 0.5 * (2 + 4) / 2], rtol=1e-6)
    np.testing.assert_allclose(found[0][0].state["var"], [0.5 + 0.5 * (1 + 4) / 2, 0.5 + 0.5 * (4 + 16) / 2], rtol=1e-6)
    assert same(found[0][0].state, found[1][0].state)


def test_replicas_that_begin_differently_are_refused_on_each() -> None:
    steps = [step(), training_step(mlp(seed=1), loss=CROSS_ENTROPY, optimizer="adam,lr=0.01")]
    found = together(2, lambda replicas: DataParallelTrainer(steps[replicas.rank], replicas, **PLACE))
    said = [str(error) for error in found]
    assert said == [
        f"replica {rank} of 2: the replicas differ in step or state; build all of them from the"
        f" same model and options, or load the same checkpoint"
        for rank in (0, 1)
    ]


def test_one_replica_saves_and_all_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = step()
    written: list[object] = []
    write = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda path, *rest: (written.append(path), write(path, *rest)))

    def work(replicas: Any) -> bool:
        straight = DataParallelTrainer(whole, replicas, **PLACE)
        rows = list(shard(DATA, replicas))
        straight.fit(rows[:7])
        straight.save(tmp_path / "a.npz")
        assert [file.name for file in tmp_path.iterdir()] == ["a.npz"]
        resumed = DataParallelTrainer(whole, replicas, **PLACE)
        resumed.load(tmp_path / "a.npz")
        for trainer in (straight, resumed):
            trainer.fit(rows[7:])
        return same(straight.state, resumed.state)

    assert together(2, work) == [True, True]
    assert written == [tmp_path / "a.npz"]


def test_a_checkpoint_of_replicas_is_one_of_a_trainer(tmp_path: Path) -> None:
    made = DataParallelTrainer(step(), SingleReplica(), **PLACE)
    made.fit(DATA[:3])
    made.save(tmp_path / "a.npz")
    other = Trainer(step(), **PLACE)
    other.load(tmp_path / "a.npz")
    assert same(made.state, other.state)


# -- loops of one's own ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fixed", [False, True])
def test_a_loss_scale_optimizer_skips_on_all_replicas_if_it_sees_averaged_gradients(fixed: bool) -> None:
    def work(replicas: Any) -> tuple[Array, Array]:
        variable = Variable([1.0], "v")
        scale = DynamicLossScale(2, 1)
        optimizer = LossScaleOptimizer(SGD(1.0), 2 if fixed else scale)
        gradient = np.array([np.nan if replicas.rank else 4], np.float32)
        optimizer.apply_gradients([(averaged(replicas, [gradient])[0], variable)])
        return variable.numpy(), optimizer.loss_scale()

    for value, scale in together(2, work):
        assert (np.isnan(value).all() if fixed else value.tolist() == [1.0]) and scale == (2 if fixed else 1)


def test_means_count_rows_and_leave_out_what_is_none() -> None:
    def work(replicas: Any) -> list[Array | None]:
        value = np.array([[1.0, 2.0]] if replicas.rank else [[4.0, 8.0]], np.float32)
        return averaged(replicas, [value, None, np.array(replicas.rank, np.float32)], rows=1 + 2 * replicas.rank)

    for matrix, nothing, scalar in together(2, work):
        assert (matrix.tolist(), nothing, scalar.tolist()) == ([[1.75, 3.5]], None, 0.75)


# -- shares and refusals -----------------------------------------------------------------------------------


def test_a_shard_is_a_part_of_each_batch_and_scalars_are_whole() -> None:
    batch = {"x": np.arange(5), "ratio": np.array(0.5)}
    parts = [next(shard([batch], _Thread(rank, 2, Threads(2)))) for rank in (0, 1)]
    assert [p["x"].tolist() for p in parts] == [[0, 1, 2], [3, 4]]
    assert [p["ratio"].tolist() for p in parts] == [0.5, 0.5]


def test_a_batch_of_fewer_rows_than_replicas_is_refused() -> None:
    with pytest.raises(TrainingError) as error:
        list(shard([DATA[0], {"x": np.zeros((1, 8))}], _Thread(0, 2, Threads(2))))
    assert str(error.value) == "batch 1 has fewer rows than there are replicas (2); use larger batches"


class TPUStrategyV2:
    pass


class MirroredStrategy:
    pass


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        (
            TPUStrategyV2(),
            ("TPUs compute in bfloat16 and need no loss scale; remove the loss scale and train with their own tools"),
        ),
        (
            "ParameterServerStrategy",
            "its replicas step at different times, so they cannot skip together; use join_replicas()",
        ),
        (
            "CentralStorageStrategy",
            "it keeps one copy of each parameter for all replicas; use join_replicas(), with a copy on each",
        ),
        (MirroredStrategy(), "use join_replicas(), which does the same through torch.distributed"),
        (7, "it is not a Replicas; use join_replicas()"),
    ],
)
def test_a_strategy_that_can_not_be_supported_is_refused(strategy: object, reason: str) -> None:
    name = strategy if isinstance(strategy, str) else type(strategy).__name__
    with pytest.raises(TrainingError) as error:
        DataParallelTrainer(step(), strategy)  # type: ignore[arg-type]
    assert str(error.value) == f"{name!r} cannot train a step: {reason}"
    check_strategy(SingleReplica())


def test_a_process_that_was_started_by_itself_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with join_replicas() as replicas:
        assert replicas == SingleReplica()


def test_without_pytorch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(TrainingError) as error, join_replicas():
        pass
    assert str(error.value) == ("replicas need torch.distributed, but PyTorch is not installed; pip install torch")


def test_nccl_wants_one_gpu_for_each_process() -> None:
    assert (parallel._device("gloo", 4), parallel._device("nccl", 1)) == ("cpu", "cuda:0")
    with pytest.raises(TrainingError) as error:
        parallel._device("nccl", 4)
    assert str(error.value) == (
        "nccl needs one GPU per process, but this process sees 4; set CUDA_VISIBLE_DEVICES to"
        " its own (LOCAL_RANK), or use the backend gloo"
    )


# -- real processes ----------------------------------------------------------------------------------------


@pytest.mark.torch
def test_two_processes_train_as_one_and_skip_together(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed: make extras")
    poisoned = 5
    ended = started(tmp_path, "--poison", str(poisoned))
    assert [code for code, _ in ended] == [0, 0], ended
    first, second = (dict(np.load(tmp_path / f"{rank}.npz")) for rank in (0, 1))
    skipped = (int(first.pop("skipped")), int(second.pop("skipped")))
    alone = Trainer(step(**replica.OPTIONS), **PLACE)
    data = [{name: a.copy() for name, a in batch.items()} for batch in DATA]
    data[poisoned]["x"][-1, 0] = np.inf
    alone.fit(data)

    assert skipped == (1, 1) and same(first, second)
    assert (alone.skipped, alone.steps, alone.loss_scale) == (1, int(first["step"]), float(first["loss_scale"]))
    for name, value in alone.state.items():
        np.testing.assert_allclose(first[name], value, rtol=1e-4, atol=ROUNDING)


@pytest.mark.torch
def test_when_a_replica_dies_the_others_end_with_an_error_and_the_checkpoint_resumes(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed: make extras")
    (survivor, said), (dead, _) = started(tmp_path, "--dies", "6")

    assert (dead, survivor) == (9, 1)
    assert said.strip().splitlines()[-1] == (
        "replica 0 of 2 got no answer from the others (timeout 20 s): one has ended, or has"
        " fewer batches; restart all of them, each with the last checkpoint"
    )
    resumed = Trainer(step(**replica.OPTIONS), **PLACE)
    resumed.load(tmp_path / "checkpoint.npz")
    resumed.fit(DATA[3:])
    assert (resumed.steps, [file.name for file in tmp_path.iterdir()]) == (12, ["checkpoint.npz"])
