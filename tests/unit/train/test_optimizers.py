"""Optimizers: clipping, steps by hand, agreement with PyTorch, and identical states on the host and in the graph."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.rewrite.autodiff.builder import Builder
from amp_rewrite.runtime.buffers import BufferedRunner, Side
from amp_rewrite.runtime.runner import Runner, SessionOptions
from amp_rewrite.train.keras.optimizer import StatefulOptimizer
from amp_rewrite.train.keras.variables import Variable
from amp_rewrite.train.loss_scale import (
    Array,
    DynamicLossScale,
    FixedLossScale,
    LossScale,
    ScaleState,
    all_finite,
    serialize,
)
from amp_rewrite.train.step.step import training_step
from amp_rewrite.train.step.trainer import Trainer
from amp_rewrite.train.update.graph import Scaling, Update, append_update
from amp_rewrite.train.update.optimizer import Optimizer, Schedule, applied, initial_slots, rate_from_config
from amp_rewrite.train.update.optimizers import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    CosineDecay,
    ExponentialDecay,
    RMSprop,
    deserialize,
    parse_optimizer,
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
def test_two_steps_from_3_with_a_gradient_of_2_match_hand_calculation(rule: Optimizer, expected: list[float]) -> None:
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
def test_200_steps_match_pytorch(name: str) -> None:
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


def test_an_optimizer_prints_its_hyperparameters() -> None:
    assert parse_optimizer("adam") == Adam()
    assert parse_optimizer("SGD, lr=0.1, momentum=0.9, nesterov=true") == SGD(0.1, 0.9, nesterov=True)
    assert parse_optimizer("adamw,weight_decay=0.5,clipnorm=1") == AdamW(weight_decay=0.5, clipnorm=1.0)


def test_rmsprop_follows_pytorch_and_on_request_keras_3() -> None:
    gradient, start = np.array([1e-3, 2.0], F32), {"w": np.zeros(2, F32)}
    square = 0.1 * gradient.astype(np.float64) ** 2
    for rule, root in (
        (RMSprop(0.1), np.sqrt(square) + 1e-7),
        (RMSprop(0.1, epsilon_in_root=True), np.sqrt(square + 1e-7)),
    ):
        after, _ = applied(rule, start, {"w": gradient}, initial_slots(rule, start), step=1)
        np.testing.assert_allclose(after["w"], -0.1 * gradient / root, rtol=1e-5)


NET = "net (float[N, 2] x) => (float[N, 3] logits) <float[2, 3] w = {1, -1, 2, 0.5, 1, -2}> { logits = MatMul (x, w) }"
BATCH = {"x": np.array([[1, 2], [-1, 1]], F32), "label": np.array([0, 2])}
EACH = [CosineDecay(0.1, 10, 0.25), ExponentialDecay(0.1, 4, 0.5, staircase=True)]


@dataclass(frozen=True)
class Halving(Schedule):
    """A user-defined schedule."""

    start: float

    def __call__(self, step: int) -> float:
        return self.start / 2**step


def trainer_of(optimizer: Any) -> Trainer:
    step = training_step(parsed(NET), loss="cross_entropy(logits, label)", optimizer=optimizer, policy="float32")
    return Trainer(step, threads=1)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        (CosineDecay(0.1, 49, 0.1), lambda lr, o: lr.CosineAnnealingLR(o, 49, 0.01)),
        (ExponentialDecay(0.1, 1, 0.9), lambda lr, o: lr.ExponentialLR(o, 0.9)),
        (ExponentialDecay(0.1, 7, 0.5, staircase=True), lambda lr, o: lr.StepLR(o, 7, 0.5)),
    ],
)
def test_the_rates_of_a_schedule_match_pytorch(schedule: Schedule, make: Any) -> None:
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler, rates = make(torch.optim.lr_scheduler, optimizer), []
    for _ in range(50):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert [schedule(step) for step in range(50)] == pytest.approx(rates, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("schedule", EACH, ids=lambda s: type(s).__name__)
def test_a_step_an_object_and_fit_take_identical_steps(schedule: Schedule) -> None:
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


def test_a_checkpoint_continues_with_the_rate_of_its_step(tmp_path: Path) -> None:
    whole, first, second = (trainer_of(SGD(CosineDecay(0.5, 8), 0.9)) for _ in range(3))
    whole.fit([BATCH], epochs=6)
    first.fit([BATCH], epochs=3)
    first.save(tmp_path / "state.npz")
    second.load(tmp_path / "state.npz")
    second.fit([BATCH], epochs=3)

    assert second.get_weights()["w"].tobytes() == whole.get_weights()["w"].tobytes()


@pytest.mark.parametrize("schedule", EACH, ids=lambda s: type(s).__name__)
def test_a_schedule_survives_its_configuration(schedule: Schedule) -> None:
    assert rate_from_config(json.loads(json.dumps(serialize(schedule)))) == schedule
    assert deserialize(json.loads(json.dumps(serialize(Adam(schedule))))) == Adam(schedule)
    assert type(schedule).from_config(schedule.get_config()) == schedule


STEPS = 1_000

# Three elements and one: a norm over so few has only one order of summation.
ONE: Mapping[str, Array] = {"a": np.array([0.5, -2, 3], F32)}
TWO: Mapping[str, Array] = {**ONE, "b": np.array(1.5, F32)}
Rules = Mapping[str, tuple[Optimizer, Mapping[str, Array]]]
RULES: Rules = {
    "sgd": (SGD(0.1), ONE),
    "momentum": (SGD(0.1, momentum=0.9), ONE),
    "nesterov, decay": (SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01), ONE),
    "rmsprop": (RMSprop(epsilon_in_root=True), ONE),
    "rmsprop, momentum": (RMSprop(momentum=0.5, weight_decay=0.01), ONE),
    "adam": (Adam(), ONE),
    "adamw": (AdamW(), ONE),
    "adagrad": (Adagrad(), ONE),
    "adam, decay, by value": (Adam(weight_decay=0.01, clipvalue=0.5), ONE),
    "by norm": (SGD(0.1, clipnorm=0.5), TWO),
    "by global norm": (SGD(0.1, global_clipnorm=0.5), TWO),
}

SCALES: Mapping[str, LossScale | None] = {
    "dynamic": DynamicLossScale(2.0**15, 20, 3.0),
    "fixed": FixedLossScale(3.0),  # not a power of two, so division by it rounds
    "none": None,
}


@dataclass(slots=True)
class Host:
    """One optimizer as an object: its variables, slots and step count."""

    rule: Optimizer
    values: Mapping[str, Array]
    slots: Mapping[str, Mapping[str, Array]]
    step: int = 0

    def go(self, gradients: Mapping[str, Array], rate: np.float32) -> None:
        self.step += 1
        given = {name: gradients[name] for name in self.values}
        self.values, self.slots = applied(self.rule, self.values, given, self.slots, step=self.step, learning_rate=rate)


@dataclass(frozen=True, slots=True)
class Nodes:
    """All updates in one open graph; `views` is their state in memory, for each side by rule and path."""

    runner: BufferedRunner
    updates: Mapping[str, Update]
    views: tuple[Mapping[str, Mapping[str, Array]], ...]

    @classmethod
    def of(cls, scale: LossScale | None, rules: Rules) -> Nodes:
        b = Builder.of(Model.load(parsed("net (float[3] g_a, float g_b) => (float[3] o) { o = Identity (g_a) }")))
        updates = {name: _appended(b, name, *rule, scale) for name, rule in rules.items()}
        runner = Runner.open(b.model(), SessionOptions(threads=1, pooled=False))
        state = [v for update in updates.values() for v in update.state]
        buffer = runner.double_buffer({v.input: v.initial for v in state})
        last = list(updates.values())[-1]
        made = runner.buffered(buffer, {v.input: v.output for v in state}, (last.finite, last.applied))
        sides: tuple[Side, Side] = (0, 1)
        views = tuple(
            {name: {_path(v.name): buffer.view(side, v.input) for v in u.state} for name, u in updates.items()}
            for side in sides
        )
        return cls(made, updates, views)

    def go(self, side: Side, gradients: Mapping[str, Array], rate: np.float32) -> list[bool]:
        """Run one step from one side to the other; return whether it was finite, and applied, by the last rule."""
        rates = {update.learning_rate: np.array(rate) for update in self.updates.values()}
        flags = self.runner.run(side, {**{f"g_{name}": g for name, g in gradients.items()}, **rates})
        return [bool(flag) for flag in flags.values()]


def _appended(b: Builder, name: str, rule: Optimizer, start: Mapping[str, Array], scale: LossScale | None) -> Update:
    inputs = {b.input(f"{name}/{k}", DType.FLOAT, a.shape): a for k, a in start.items()}
    return append_update(b, inputs, dict(zip(inputs, ("g_a", "g_b"), strict=False)), rule, Scaling.of(b, scale))


def _path(name: str) -> str:
    """ "slot/adam/a/m" as "a/m", the name in `Host`."""
    kind, _, rest = name.partition("/")
    return rest.partition("/")[2] if kind in ("parameter", "slot") else kind


def drawn(rng: np.random.Generator, spoiled: float) -> dict[str, Array]:
    """Return gradients over seven orders of magnitude, with this share nonfinite."""
    found = {n: np.array(rng.standard_normal(a.shape) * 10.0 ** int(rng.integers(-4, 3)), F32) for n, a in TWO.items()}
    if rng.random() < spoiled:
        found["a"][1] = rng.choice([np.inf, -np.inf, np.nan])
    return found


def side_by_side(
    scale: LossScale | None, steps: int, spoiled: float, rules: Rules = RULES
) -> tuple[int, ScaleState | None]:
    """Run both; return the number of applied steps and the last scale. AssertionError if a bit differs."""
    rng = np.random.default_rng(7)
    hosts = {name: Host(rule, start, initial_slots(rule, start)) for name, (rule, start) in rules.items()}
    nodes, side = Nodes.of(scale, rules), 0
    state = scale.initial if isinstance(scale, DynamicLossScale) else None
    factor = F32(scale()) if scale is not None else F32(1)
    for _ in range(steps):
        rate = F32(rng.uniform(1e-4, 1e-1))
        with np.errstate(all="ignore"):
            scaled = {name: np.asarray(g * factor) for name, g in drawn(rng, spoiled).items()}
            exact = {name: np.asarray(g / factor) for name, g in scaled.items()}
        finite = all_finite(exact)
        assert nodes.go(side, scaled, rate) == [finite, finite or state is None]  # type: ignore[arg-type]
        side = 1 - side
        if state is not None:
            assert isinstance(scale, DynamicLossScale)
            state = scale.after(state, finite)
            factor = state.scale
        for name, host in hosts.items():
            if finite or state is None:
                host.go(exact, rate)
            _compare(nodes.views[side][name], host, state, name)
    return hosts["sgd"].step, state


def _compare(mine: Mapping[str, Array], host: Host, state: ScaleState | None, name: str) -> None:
    theirs: dict[str, Any] = {"step": np.int64(host.step), **host.values}
    theirs |= {f"{variable}/{slot}": array for variable, own in host.slots.items() for slot, array in own.items()}
    if state is not None:
        theirs |= {"loss_scale": state.scale, "good_steps": np.int64(state.good_steps)}
    assert mine.keys() == theirs.keys()
    for path, array in theirs.items():
        if mine[path].tobytes() != array.tobytes():
            assert np.array_equal(mine[path], array, equal_nan=True), (name, path)  # NaN may have a sign


@pytest.mark.parametrize("scale", SCALES)
def test_every_optimizer_takes_the_same_states_with_every_loss_scale(scale: str) -> None:
    steps, state = side_by_side(SCALES[scale], STEPS, spoiled=0.05 if scale == "dynamic" else 0.0)

    assert (state is None) == (scale != "dynamic")
    assert (0.9 * STEPS < steps < STEPS) if state is not None else steps == STEPS


@pytest.mark.parametrize("scale", ["fixed", "none"])
def test_nonfinite_gradients_are_applied_alike_without_a_dynamic_scale(scale: str) -> None:
    assert side_by_side(SCALES[scale], 30, spoiled=0.3)[0] == 30


@pytest.mark.parametrize(
    ("period", "multiplier", "backoff", "spoiled"),
    # up to where gradients overflow, and down to 1
    [(7, 2.0, None, 0.0), (7, 1.5, None, 0.001), (3, 2.0, None, 0.3), (2, 1.3, 0.3, 0.3)],
)
def test_a_dynamic_scale_takes_the_same_states(
    period: int, multiplier: float, backoff: float | None, spoiled: float
) -> None:
    scale = DynamicLossScale(2.0**15, period, multiplier, backoff)
    steps, state = side_by_side(scale, 2 * STEPS, spoiled, {"sgd": (SGD(0.1), TWO)})

    assert state is not None and (state.scale > 2.0**100) == (spoiled < 0.1) and STEPS < steps < 2 * STEPS


def test_the_comparison_notices_one_bit() -> None:
    """The comparison must fail if the graph rounds differently from the host."""
    with pytest.raises(AssertionError, match="adam"), pytest.MonkeyPatch.context() as patch:
        original = Adam.rule

        def off(self: Adam, by: Any, variable: Any, *rest: Any) -> Any:
            value, slots = original(self, by, variable, *rest)
            return (value if isinstance(variable, np.ndarray) else value * F32(1 + 2.0**-23)), slots

        patch.setattr(Adam, "rule", off)
        side_by_side(None, 3, spoiled=0.0)
