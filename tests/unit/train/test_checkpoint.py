"""Checkpoints and optimizer objects: contents, resumed runs with the same bits, and refusals."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from amp_rewrite.errors import FeedError, TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.train.keras.loss_scale_optimizer import LossScaleOptimizer
from amp_rewrite.train.keras.optimizer import StatefulOptimizer
from amp_rewrite.train.loss_scale import DynamicLossScale
from amp_rewrite.train.step.model_loss import ModelLoss
from amp_rewrite.train.step.step import training_step
from amp_rewrite.train.step.trainer import Trainer
from amp_rewrite.train.update.optimizers import SGD, Adam
from support.train.nets import CROSS_ENTROPY, PLACE, batches, mlp, same, trainer

DATA = list(batches(12))


@pytest.mark.parametrize("options", [{}, {"micro_batches": 5}])
def test_a_resumed_run_ends_with_the_same_bits(options: dict[str, Any], tmp_path: Path) -> None:
    data = [*DATA[:3], {"x": np.full((2, 8), np.inf, np.float32), "t": np.zeros(2, np.int64)}, *DATA[4:]]
    straight = trainer(**options)
    straight.fit(data)

    first = trainer(**options)
    first.fit(data[:7])
    first.save(tmp_path / "a.npz")
    second = trainer(**options)
    second.load(tmp_path / "a.npz")
    second.fit(data[7:])

    assert same(straight.state, second.state)
    assert straight.skipped == second.skipped == 1 and straight.nonfinite == second.nonfinite == 1


def test_a_checkpoint_shows_its_contents(tmp_path: Path) -> None:
    trainer(optimizer="sgd,momentum=0.9").save(tmp_path / "a.npz")
    slots = [path for name in ("w1", "b1", "w2", "b2") for path in (f"parameter/{name}", f"slot/{name}/momentum")]
    counts = ["step", "loss_scale", "good_steps", "count/skipped", "count/nonfinite"]

    assert np.load(tmp_path / "a.npz").files == ["amp_rewrite/version", "amp_rewrite/model", *slots, *counts]
    assert [file.name for file in tmp_path.iterdir()] == ["a.npz"]


@pytest.mark.parametrize(("saved", "loaded"), [(None, "dynamic"), ("dynamic", None), (8, "dynamic")])
def test_a_checkpoint_loads_with_and_without_loss_scaling(saved: Any, loaded: Any, tmp_path: Path) -> None:
    source = trainer(loss_scale=saved)
    source.fit(DATA[:3])
    source.save(tmp_path / "a.npz")
    target = trainer(loss_scale=loaded)
    target.load(tmp_path / "a.npz")

    assert all(np.array_equal(source.state[n], target.state[n]) for n in source.state.keys() & target.state.keys())
    assert target.loss_scale == (2.0**15 if loaded else None)
    assert target.steps == 3


def test_an_older_checkpoint_is_replaced_but_survives_a_failed_write(tmp_path: Path, monkeypatch: Any) -> None:
    made = trainer()
    made.save(tmp_path / "a.npz")
    old = (tmp_path / "a.npz").read_bytes()
    made.fit(DATA[:1])

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full)
        with pytest.raises(TrainingError) as error:
            made.save(tmp_path / "a.npz")
    assert str(error.value) == f"cannot write a checkpoint to {tmp_path / 'a.npz'}: No space left on device"
    assert ([f.name for f in tmp_path.iterdir()], (tmp_path / "a.npz").read_bytes()) == (["a.npz"], old)

    made.save(tmp_path / "a.npz")
    assert (tmp_path / "a.npz").read_bytes() != old


@pytest.mark.parametrize(
    ("options", "changes", "fact"),
    [
        ({"optimizer": "sgd"}, {}, "and this step differ in 'slot/w1/m': the file was saved with another optimizer or"),
        ({"freeze": ["w1"]}, {}, "this step differ in 'parameter/w1': the file was saved with another optimizer or"),
        ({"optimizer": "adam,clipnorm=1"}, {"parameter/w1": np.zeros((8, 15), np.float32)}, "differ in 'parameter/w1'"),
        ({}, {"amp_rewrite/version": np.array(2)}, "is a checkpoint of version 2, but this package reads version 1"),
        ({}, {"amp_rewrite/model": np.array("x")}, "is a checkpoint of another model: its ops or its weights' shapes"),
    ],
)
def test_a_checkpoint_of_another_step_is_refused(
    options: dict[str, Any], changes: dict[str, Array], fact: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.npz"
    trainer().save(path)
    np.savez(path, **{**np.load(path), **changes})  # type: ignore[arg-type]
    assert fact in refused(trainer(**options), path)


def test_invalid_checkpoints_and_unwritable_paths_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros(3))
    assert "is not a checkpoint of a training step; use a file written" in refused(trainer(), tmp_path / "a.npz")
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
        archive.writestr("step.npy", b"cos\nsystem\n")
    with pytest.raises(TrainingError):
        trainer().load(tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", **{"amp_rewrite/version": np.array([{}]), "amp_rewrite/model": np.zeros(1)})  # type: ignore[arg-type]
    with pytest.raises(FeedError, match="Object arrays cannot be loaded"):
        trainer().load(tmp_path / "c.npz")
    for path, fact in ((tmp_path / "a.bin", "use a file name ending in .npz"), (tmp_path / "no" / "a.npz", "No such")):
        with pytest.raises(TrainingError, match=f"cannot write a checkpoint to .*[:;] {fact}"):
            trainer().save(path)


def refused(made: Trainer, path: Path) -> str:
    """Return the error of loading a checkpoint; the state must not change."""
    before = made.state
    with pytest.raises(TrainingError) as error:
        made.load(path)
    assert same(made.state, before) and (made.skipped, made.nonfinite) == (0, 0)
    return str(error.value)


def test_micro_batches_may_change_only_after_a_whole_step(tmp_path: Path) -> None:
    begun = trainer(micro_batches=4)
    begun.fit(DATA[:3])
    begun.save(tmp_path / "a.npz")

    assert refused(trainer(micro_batches=2), tmp_path / "a.npz") == (
        f"{tmp_path / 'a.npz'} was saved within a step, after 3 of its micro-batches, but this step has 2;"
        " create it with the same number"
    )
    whole = trainer(micro_batches=4)
    whole.fit(DATA[:4])
    whole.save(tmp_path / "a.npz")
    made = trainer(micro_batches=2)
    made.load(tmp_path / "a.npz")
    made.fit(DATA[:4])

    assert (whole.steps, made.steps) == (1, 3)


SIX = DATA[:6]


def _wrapped(scale: object = "dynamic") -> LossScaleOptimizer:
    return LossScaleOptimizer(Adam(0.01), scale)


def _trainer(optimizer: StatefulOptimizer, policy: str = "mixed_float16") -> Trainer:
    return Trainer(training_step(mlp(), loss=CROSS_ENTROPY, optimizer=optimizer, policy=policy), **PLACE)


def test_a_step_continues_from_the_state_of_its_optimizer() -> None:
    optimizer = _wrapped(DynamicLossScale(2.0**12, 4))
    first = _trainer(optimizer)
    first.fit(SIX[:3])
    weights = {name: first.state[name] for name in first.step.parameters}

    model = first.export()
    second = Trainer(training_step(model, loss=CROSS_ENTROPY, optimizer=optimizer), **PLACE)
    assert second.steps == 3 and second.loss_scale == first.loss_scale
    assert same(second.state, first.state)
    assert all((second.state[name] == weights[name]).all() for name in weights)


def test_a_new_learning_rate_applies_from_the_next_step() -> None:
    optimizer = StatefulOptimizer(SGD(0.1))
    trainer = _trainer(optimizer, "float32")
    trainer.fit(SIX[:1])
    before = trainer.state
    optimizer.learning_rate = 0.0
    trainer.fit(SIX[1:2])
    assert same(before, trainer.state, "step")

    optimizer.lr = 0.2
    trainer.fit(SIX[1:2])
    assert not same(before, trainer.state, "step")


def test_setting_another_hyperparameter_too_late_is_an_error() -> None:
    optimizer = StatefulOptimizer(SGD(0.1, momentum=0.9))
    trainer = _trainer(optimizer, "float32")
    optimizer.momentum = 0.5
    with pytest.raises(TrainingError) as error:
        trainer.fit(SIX[:1])
    assert str(error.value) == (
        "momentum of the optimizer is 0.5, but the step was created with the constant 0.9; create the step again"
    )


def test_an_optimizer_restores_a_trainers_checkpoint(tmp_path: Path) -> None:
    trainer = Trainer(training_step(mlp(), loss=CROSS_ENTROPY, optimizer=Adam(0.01)), **PLACE)
    trainer.fit(SIX)
    trainer.save(tmp_path / "a.npz")
    optimizer = _wrapped()
    optimizer.restore(tmp_path / "a.npz")

    assert optimizer.iterations == len(SIX) and float(optimizer.loss_scale()) == trainer.loss_scale
    assert (optimizer.checkpoint()["slot/w2/v"] == trainer.state["w2/v"]).all()


def test_the_custom_loop_and_fit_share_one_checkpoint(tmp_path: Path) -> None:
    """Training half by fit and half by the loop, in either order, equals training by fit."""
    straight = _trainer(_wrapped(8.0))
    straight.fit(SIX)

    by_fit, optimizer = _trainer(_wrapped(8.0)), _wrapped(8.0)
    by_fit.fit(SIX[:3])
    by_fit.save(tmp_path / "fit.npz")
    loss = ModelLoss.of(mlp(), CROSS_ENTROPY, policy="mixed_float16")
    loss.load(tmp_path / "fit.npz", optimizer)
    for batch in SIX[3:5]:
        optimizer.minimize(loss.on(batch), loss.variables)
    loss.save(tmp_path / "loop.npz", optimizer)

    after = _trainer(_wrapped(8.0))
    after.load(tmp_path / "loop.npz")
    assert after.steps == 5
    after.fit(SIX[5:])
    assert same(straight.state, after.state)
