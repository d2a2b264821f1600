"""Optimizers: clipping, steps by hand, PyTorch agrees, and what they refuse. See also test_host_and_graph."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from amp_rewrite.train.keras.optimizer import StatefulOptimizer
from amp_rewrite.train.keras.variables import Variable
from amp_rewrite.train.loss_scale import serialize
from amp_rewrite.train.step.step import training_step
from amp_rewrite.train.step.trainer import Trainer
from amp_rewrite.train.update.optimizer import (
    Optimizer,
    Schedule,
    applied,
    initial_slots,
    rate_of_config,
)
from amp_rewrite.train.update.optimizers import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    CosineDecay,
    ExponentialDecay,
    RMSprop,
    deserialize,
    named,
)
from support.train.nets import F32, parsed


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (SGD(0.5), [3 - 1, 3 - 2]),
        (SGD(0.5, clipvalue=1.0), [3 - 0.5, 3 - 1]),
        (SGD(0.5, momentum=0.5), [3 - 1, 3 - 1 - 1.5]),
        (SGD(0.5, momentum=0.5, nesterov=True), [3 - 1.5, 3 - 1.5 - 1.75]),
        (SGD(0.5, weight_decay=1.0), [3 - 0.5 * (2 + 3), 0.5 - 0.5 * (2 + 0.5)]),
        (RMSprop(0.5, rho=0.75), [3 - 0.5 * 2 / 1, 2 - 0.5 * 2 / np.sqrt(1.75)]),
        (Adam(0.5), [3 - 0.5, 3 - 1.0]),
        (AdamW(0.5, weight_decay=0.5), [3 * 0.75 - 0.5, 1.75 * 0.75 - 0.5]),
        (Adagrad(0.5, initial_accumulator_value=0.0), [3 - 0.5, 2.5 - 1 / np.sqrt(8)]),
    ],
)
def test_two_steps_by_hand_from_3_down_a_gradient_of_2(rule: Optimizer, expected: list[float]) -> None:
    values = {"v": np.array(3, F32)}
    slots = initial_slots(rule, values)
    seen = []
    for step in (1, 2):
        values, slots = applied(rule, values, {"v": np.array(2, F32)}, slots, step=step)
        seen.append(float(values["v"]))

    assert seen == pytest.approx(expected, rel=1e-6)  # epsilon is 1e-7


ROOT_MEAN = {"lr": 0.01, "alpha": 0.9, "eps": 1e-7}
TORCH: Mapping[str, tuple[Optimizer, str, dict[str, Any]]] = {
    "sgd": (SGD(0.1), "SGD", {"lr": 0.1}),
    "momentum": (SGD(0.1, momentum=0.9), "SGD", {"lr": 0.1, "momentum": 0.9}),
    "nesterov": (SGD(0.1, momentum=0.9, nesterov=True), "SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "decay": (SGD(0.1, weight_decay=0.05), "SGD", {"lr": 0.1, "weight_decay": 0.05}),
    "adam": (Adam(0.01), "Adam", {"lr": 0.01, "eps": 1e-7}),
    "adam, decay": (Adam(0.01, weight_decay=0.05), "Adam", {"lr": 0.01, "eps": 1e-7, "weight_decay": 0.05}),
    "adamw": (AdamW(0.01), "AdamW", {"lr": 0.01, "eps": 1e-7}),
    "rmsprop": (RMSprop(0.01), "RMSprop", ROOT_MEAN),
    "rmsprop, momentum": (RMSprop(0.01, momentum=0.5), "RMSprop", {**ROOT_MEAN, "momentum": 0.5}),
    "schedule": (SGD(ExponentialDecay(0.1, 20, 0.5, staircase=True)), "SGD", {"lr": 0.1}),
    "adagrad": (Adagrad(0.1), "Adagrad", {"lr": 0.1, "eps": 1e-7, "initial_accumulator_value": 0.1}),
}


@pytest.mark.torch
@pytest.mark.parametrize("name", TORCH)
def test_200_steps_are_those_of_pytorch(name: str) -> None:
    torch = pytest.importorskip("torch")
    rule, class_name, settings = TORCH[name]
    rng = np.random.default_rng(3)
    ours = {"v": np.array(rng.normal(size=(4, 3)), F32)}
    theirs = torch.nn.Parameter(torch.tensor(ours["v"].copy()))
    optimizer = getattr(torch.optim, class_name)([theirs], **settings)
    falling = torch.optim.lr_scheduler.StepLR(optimizer, 20, 1.0 if "schedule" not in name else 0.5)
    slots = initial_slots(rule, ours)
    for step in range(1, 201):
        grads = {"v": np.array(rng.normal(size=(4, 3)), F32)}
        theirs.grad = torch.tensor(grads["v"])
        optimizer.step()
        falling.step()
        ours, slots = applied(rule, ours, grads, slots, step=step)

    # 200 steps, each a handful of float32 roundings of values of order 1
    assert np.abs(ours["v"] - theirs.detach().numpy()).max() < 200 * 8 * 2.0**-24 * max(1.0, np.abs(ours["v"]).max())


# -- words -------------------------------------------------------------------------------------------


def test_an_optimizer_is_spelled_with_its_hyperparameters() -> None:
    assert named("adam") == Adam()
    assert named("SGD, lr=0.1, momentum=0.9, nesterov=true") == SGD(0.1, 0.9, nesterov=True)
    assert named("adamw,weight_decay=0.5,clipnorm=1") == AdamW(weight_decay=0.5, clipnorm=1.0)


def test_rmsprop_has_the_formula_of_pytorch_and_on_request_that_of_keras_3() -> None:
    gradient, start = np.array([1e-3, 2.0], F32), {"w": np.zeros(2, F32)}
    square = 0.1 * gradient.astype(np.float64) ** 2
    for rule, root in (
        (RMSprop(0.1), np.sqrt(square) + 1e-7),
        (RMSprop(0.1, epsilon_in_root=True), np.sqrt(square + 1e-7)),
    ):
        after, _ = applied(rule, start, {"w": gradient}, initial_slots(rule, start), step=1)
        np.testing.assert_allclose(after["w"], -0.1 * gradient / root, rtol=1e-5)


# -- schedules ----------------------------------------------------------------------------------------

NET = "net (float[N, 2] x) => (float[N, 3] logits) <float[2, 3] w = {1, -1, 2, 0.5, 1, -2}> { logits = MatMul (x, w) }"
BATCH = {"x": np.array([[1, 2], [-1, 1]], F32), "label": np.array([0, 2])}
EACH = [CosineDecay(0.1, 10, 0.25), ExponentialDecay(0.1, 4, 0.5, staircase=True)]


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
    assert rate_of_config(json.loads(json.dumps(serialize(schedule)))) == schedule
    assert deserialize(json.loads(json.dumps(serialize(Adam(schedule))))) == Adam(schedule)
    assert type(schedule).from_config(schedule.get_config()) == schedule
