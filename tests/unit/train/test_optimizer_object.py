"""An optimizer object in a training step: it brings its state, shows that of the trainer, and its rate has effect."""

from pathlib import Path

import pytest

from amp_rewrite.errors import TrainingError
from amp_rewrite.train.keras.loss_scale_optimizer import LossScaleOptimizer
from amp_rewrite.train.keras.optimizer import StatefulOptimizer
from amp_rewrite.train.loss_scale import DynamicLossScale
from amp_rewrite.train.step.model_loss import ModelLoss
from amp_rewrite.train.step.step import training_step
from amp_rewrite.train.step.trainer import Trainer
from amp_rewrite.train.update.optimizers import SGD, Adam
from support.train.nets import CROSS_ENTROPY, PLACE, batches, mlp, same

DATA = list(batches(6))


def _wrapped(scale: object = "dynamic") -> LossScaleOptimizer:
    return LossScaleOptimizer(Adam(0.01), scale)


def _trainer(optimizer: StatefulOptimizer, policy: str = "mixed_float16") -> Trainer:
    return Trainer(training_step(mlp(), loss=CROSS_ENTROPY, optimizer=optimizer, policy=policy), **PLACE)


def test_a_step_goes_on_where_its_optimizer_stands() -> None:
    optimizer = _wrapped(DynamicLossScale(2.0**12, 4))
    first = _trainer(optimizer)
    first.fit(DATA[:3])
    weights = {name: first.state[name] for name in first.step.parameters}

    model = first.export()
    second = Trainer(training_step(model, loss=CROSS_ENTROPY, optimizer=optimizer), **PLACE)
    assert second.steps == 3 and second.loss_scale == first.loss_scale
    assert same(second.state, first.state)
    assert all((second.state[name] == weights[name]).all() for name in weights)


def test_a_learning_rate_that_is_set_holds_from_the_next_step_on() -> None:
    optimizer = StatefulOptimizer(SGD(0.1))
    trainer = _trainer(optimizer, "float32")
    trainer.fit(DATA[:1])
    before = trainer.state
    optimizer.learning_rate = 0.0
    trainer.fit(DATA[1:2])
    assert same(before, trainer.state, "step")

    optimizer.lr = 0.2
    trainer.fit(DATA[1:2])
    assert not same(before, trainer.state, "step")


def test_another_hyperparameter_that_is_set_too_late_is_an_error() -> None:
    optimizer = StatefulOptimizer(SGD(0.1, momentum=0.9))
    trainer = _trainer(optimizer, "float32")
    optimizer.momentum = 0.5
    with pytest.raises(TrainingError) as error:
        trainer.fit(DATA[:1])
    assert str(error.value) == (
        "momentum of the optimizer was set to 0.5 after the step was made with 0.9, which is a constant of the step;"
        " make the step again"
    )


def test_an_optimizer_restores_a_checkpoint_of_a_trainer(tmp_path: Path) -> None:
    trainer = Trainer(training_step(mlp(), loss=CROSS_ENTROPY, optimizer=Adam(0.01)), **PLACE)
    trainer.fit(DATA)
    trainer.save(tmp_path / "a.npz")
    optimizer = _wrapped()
    optimizer.restore(tmp_path / "a.npz")

    assert optimizer.iterations == len(DATA) and float(optimizer.loss_scale()) == trainer.loss_scale
    assert (optimizer.checkpoint()["slot/w2/v"] == trainer.state["w2/v"]).all()


def test_the_custom_loop_and_fit_share_one_checkpoint(tmp_path: Path) -> None:
    """Half by fit and half by the loop, or the other way round: the same as all by fit."""
    straight = _trainer(_wrapped(8.0))
    straight.fit(DATA)

    by_fit, optimizer = _trainer(_wrapped(8.0)), _wrapped(8.0)
    by_fit.fit(DATA[:3])
    by_fit.save(tmp_path / "fit.npz")
    loss = ModelLoss.of(mlp(), CROSS_ENTROPY, policy="mixed_float16")
    loss.load(tmp_path / "fit.npz", optimizer)
    for batch in DATA[3:5]:
        optimizer.minimize(loss.on(batch), loss.variables)
    loss.save(tmp_path / "loop.npz", optimizer)

    after = _trainer(_wrapped(8.0))
    after.load(tmp_path / "loop.npz")
    assert after.steps == 5
    after.fit(DATA[5:])
    assert same(straight.state, after.state)
