"""Averages, low momenta and factored moments in a trainer: exported, evaluated, resumed, in files and in objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from amp_rewrite.errors import TrainingError
from amp_rewrite.train.keras.loss_scale_optimizer import LossScaleOptimizer
from amp_rewrite.train.step.model_loss import ModelLoss
from amp_rewrite.train.step.step import training_step
from amp_rewrite.train.step.step_file import load_step, save_step
from amp_rewrite.train.step.trainer import Trainer
from amp_rewrite.train.update.optimizers import SGD, Adafactor, Adam, Optimizer
from support.train.nets import CROSS_ENTROPY, PLACE, batches, mlp

EACH = [Adam(0.01, momentum_dtype="bfloat16"), SGD(0.1, 0.9, momentum_dtype="float16"), Adafactor(ema_momentum=0.5)]


def trainer_of(optimizer: Any, policy: str = "float32") -> Trainer:
    return Trainer(training_step(mlp(), loss=CROSS_ENTROPY, optimizer=optimizer, policy=policy), **PLACE)


def test_averages_are_evaluated_and_exported_and_training_goes_on_without_them() -> None:
    plain, trainer = trainer_of(SGD(0.1)), trainer_of(SGD(0.1, ema_momentum=0.75))
    seen = []
    for batch in batches(6):
        plain.fit([batch])
        trainer.fit([batch])
        seen.append(trainer.get_weights()["w1"])
    average = seen[0]
    for weights in seen[1:]:
        average = 0.75 * average + 0.25 * weights
    data, before = list(batches(1)), trainer.evaluate(list(batches(1)))
    with trainer.averaged() as here:
        exported = {t.name: here.export().array(t) for t in here.export().proto.graph.initializer}
        scores = here.evaluate(data)
        predicted = here.predict({"x": data[0]["x"]})["y"]

    assert np.abs(exported["w1"] - average).max() < 1e-6 < np.abs(exported["w1"] - seen[-1]).max()
    assert scores != before == trainer.evaluate(data) and predicted.shape == (16, 4)
    assert all(np.array_equal(a, plain.get_weights()[name]) for name, a in trainer.get_weights().items())


def test_no_averages_is_an_error() -> None:
    with pytest.raises(TrainingError, match=r"^the optimizer keeps no averages; give"), trainer_of(SGD()).averaged():
        pass


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize("optimizer", EACH)
def test_slots_of_other_types_and_shapes_are_resumed_bit_by_bit(
    optimizer: Optimizer, policy: str, tmp_path: Path
) -> None:
    straight, first, second = (trainer_of(optimizer, policy) for _ in "123")
    data = list(batches(6))
    straight.fit(data)
    first.fit(data[:3])
    first.save(tmp_path / "half.npz")
    second.load(tmp_path / "half.npz")
    second.fit(data[3:])

    for name, array in straight.state.items():
        assert array.dtype == second.state[name].dtype and array.tobytes() == second.state[name].tobytes(), name


@pytest.mark.parametrize("optimizer", EACH)
def test_a_file_and_an_object_make_the_same_steps(optimizer: Optimizer, tmp_path: Path) -> None:
    trainer, data = trainer_of(optimizer), list(batches(4))
    save_step(trainer.step, tmp_path / "step.onnx")
    again = Trainer(load_step(tmp_path / "step.onnx", forward=mlp()), **PLACE)
    loss, keras = ModelLoss.of(mlp(), CROSS_ENTROPY, policy="float32"), LossScaleOptimizer(optimizer, 1)
    trainer.fit(data)
    again.fit(data)
    for batch in data:
        keras.minimize(loss.on(batch), loss.variables)
    loss.save(tmp_path / "loop.npz", keras)
    third = trainer_of(optimizer)
    third.load(tmp_path / "loop.npz")

    for name, array in trainer.state.items():
        assert array.tobytes() == again.state[name].tobytes(), name
        assert np.allclose(array.astype(np.float64), third.state[name].astype(np.float64), atol=1e-5), name
