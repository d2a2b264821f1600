"""Learning rate schedules: the rates of PyTorch, in steps and objects, resumed and serialized."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from amp_rewrite.settings.loss_scale import serialize
from amp_rewrite.train.keras.optimizer import StatefulOptimizer
from amp_rewrite.train.keras.variables import Variable
from amp_rewrite.train.step.step import training_step
from amp_rewrite.train.step.trainer import Trainer
from amp_rewrite.train.update.optimizer import Schedule, rate_of_config, serialized_rate
from amp_rewrite.train.update.optimizers import SGD, Adam, CosineDecay, ExponentialDecay, deserialize
from support.train.nets import F32, parsed

NET = "net (float[N, 2] x) => (float[N, 3] logits) <float[2, 3] w = {1, -1, 2, 0.5, 1, -2}> { logits = MatMul (x, w) }"
BATCH = {"x": np.array([[1, 2], [-1, 1]], F32), "label": np.array([0, 2])}
EACH = [
    CosineDecay(0.1, 10, 0.25),
    ExponentialDecay(0.1, 4, 0.5, staircase=True),
]


@dataclass(frozen=True)
class Halving(Schedule):
    """A schedule of a user."""

    start: float

    def __call__(self, step: int) -> float:
        return self.start / 2**step


def trainer_of(optimizer: Any) -> Trainer:
    step = training_step(parsed(NET), loss="cross_entropy(logits, label)", optimizer=optimizer, policy="float32")
    return Trainer(step, threads=1)


def in_torch(make: Any, rate: float, steps: int) -> list[float]:
    """Rates of a scheduler of PyTorch."""
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    scheduler, rates = make(torch.optim.lr_scheduler, optimizer), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.torch
@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        (CosineDecay(0.1, 49, 0.1), lambda lr, o: lr.CosineAnnealingLR(o, 49, 0.01)),
        (ExponentialDecay(0.1, 1, 0.9), lambda lr, o: lr.ExponentialLR(o, 0.9)),
        (ExponentialDecay(0.1, 7, 0.5, staircase=True), lambda lr, o: lr.StepLR(o, 7, 0.5)),
    ],
)
def test_a_schedule_has_the_rates_of_pytorch(schedule: Schedule, make: Any) -> None:
    assert [schedule(step) for step in range(50)] == pytest.approx(in_torch(make, 0.1, 50), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("schedule", EACH, ids=lambda s: type(s).__name__)
def test_a_step_an_object_and_fit_take_the_same_steps(schedule: Schedule) -> None:
    inside, given = trainer_of(Adam(schedule)), trainer_of(Adam())
    history = inside.fit([BATCH], epochs=6)
    given.fit([BATCH], epochs=6, learning_rate=schedule)
    listed = trainer_of(Adam())
    listed.fit([BATCH], epochs=6, learning_rate=lambda step: schedule(step))

    assert inside.get_weights()["w"].tobytes() == given.get_weights()["w"].tobytes()
    assert inside.get_weights()["w"].tobytes() == listed.get_weights()["w"].tobytes()
    assert [epoch["learning_rate"] for epoch in history.epochs] == [float(F32(schedule(step))) for step in range(6)]


def test_an_optimizer_object_follows_its_schedule() -> None:
    variable = Variable(np.zeros(1, F32), name="v")
    optimizer = StatefulOptimizer(SGD(Halving(1.0)))
    for _ in range(3):
        optimizer.apply_gradients([(np.ones(1, F32), variable)])

    assert variable.numpy().tolist() == [-1.75]


def test_a_checkpoint_goes_on_with_the_rate_of_its_step(tmp_path: Path) -> None:
    whole, first, second = (trainer_of(SGD(CosineDecay(0.5, 8), 0.9)) for _ in range(3))
    whole.fit([BATCH], epochs=6)
    first.fit([BATCH], epochs=3)
    first.save(tmp_path / "state.npz")
    second.load(tmp_path / "state.npz")
    second.fit([BATCH], epochs=3)

    assert second.get_weights()["w"].tobytes() == whole.get_weights()["w"].tobytes()


@pytest.mark.parametrize("schedule", EACH, ids=lambda s: type(s).__name__)
def test_a_schedule_survives_its_configuration(schedule: Schedule) -> None:
    assert rate_of_config(json.loads(json.dumps(serialized_rate(schedule)))) == schedule
    assert deserialize(json.loads(json.dumps(serialize(Adam(schedule))))) == Adam(schedule)
    assert type(schedule).from_config(schedule.get_config()) == schedule
