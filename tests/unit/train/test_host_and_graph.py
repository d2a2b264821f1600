"""Objects on the host and nodes of a graph go through the same states, bit by bit, over thousands of random steps.

All optimizers stand side by side in one graph and are run by one session, their state bound in two sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.rewrite.autodiff.builder import Builder
from amp_rewrite.runtime.buffers import BufferedRunner, Side
from amp_rewrite.runtime.runner import Runner, SessionOptions
from amp_rewrite.train.loss_scale import (
    Array,
    DynamicLossScale,
    FixedLossScale,
    LossScale,
    ScaleState,
    all_finite,
)
from amp_rewrite.train.update.graph import Scaling, Update, append_update
from amp_rewrite.train.update.optimizer import Optimizer, applied, initial_slots
from amp_rewrite.train.update.optimizers import SGD, Adagrad, Adam, AdamW, RMSprop
from support.train.nets import F32, parsed

STEPS = 1_000

# Numbers of three and of one: a norm over so few is added up in one order only, whoever adds.
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
    "fixed": FixedLossScale(3.0),  # no power of two, so that dividing by it rounds
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
        """One step from one side to the other; whether it was finite, and applied, as the last rule tells."""
        rates = {update.learning_rate: np.array(rate) for update in self.updates.values()}
        told = self.runner.run(side, {**{f"g_{name}": g for name, g in gradients.items()}, **rates})
        return [bool(flag) for flag in told.values()]


def _appended(b: Builder, name: str, rule: Optimizer, start: Mapping[str, Array], scale: LossScale | None) -> Update:
    inputs = {b.input(f"{name}/{k}", DType.FLOAT, a.shape): a for k, a in start.items()}
    return append_update(b, inputs, dict(zip(inputs, ("g_a", "g_b"), strict=False)), rule, Scaling.of(b, scale))


def _path(name: str) -> str:
    """ "slot/adam/a/m" as "a/m": what `Host` calls it."""
    kind, _, rest = name.partition("/")
    return rest.partition("/")[2] if kind in ("parameter", "slot") else kind


def drawn(rng: np.random.Generator, spoiled: float) -> dict[str, Array]:
    """Gradients over seven orders of magnitude; this share of them not finite."""
    found = {n: np.array(rng.standard_normal(a.shape) * 10.0 ** int(rng.integers(-4, 3)), F32) for n, a in TWO.items()}
    if rng.random() < spoiled:
        found["a"][1] = rng.choice([np.inf, -np.inf, np.nan])
    return found


def side_by_side(
    scale: LossScale | None, steps: int, spoiled: float, rules: Rules = RULES
) -> tuple[int, ScaleState | None]:
    """Run both; how many steps were applied, and the last scale. AssertionError where a bit differs."""
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
def test_every_optimizer_goes_through_the_same_states_with_every_loss_scale(scale: str) -> None:
    steps, state = side_by_side(SCALES[scale], STEPS, spoiled=0.05 if scale == "dynamic" else 0.0)

    assert (state is None) == (scale != "dynamic")
    assert (0.9 * STEPS < steps < STEPS) if state is not None else steps == STEPS


@pytest.mark.parametrize("scale", ["fixed", "none"])
def test_what_is_not_finite_is_applied_alike_without_a_dynamic_scale(scale: str) -> None:
    assert side_by_side(SCALES[scale], 30, spoiled=0.3)[0] == 30


@pytest.mark.parametrize(
    ("period", "multiplier", "backoff", "spoiled"),
    # up to where gradients overflow, and down to 1
    [(7, 2.0, None, 0.0), (7, 1.5, None, 0.001), (3, 2.0, None, 0.3), (2, 1.3, 0.3, 0.3)],
)
def test_a_dynamic_scale_goes_through_the_same_states(
    period: int, multiplier: float, backoff: float | None, spoiled: float
) -> None:
    scale = DynamicLossScale(2.0**15, period, multiplier, backoff)
    steps, state = side_by_side(scale, 2 * STEPS, spoiled, {"sgd": (SGD(0.1), TWO)})

    assert state is not None and (state.scale > 2.0**100) == (spoiled < 0.1) and STEPS < steps < 2 * STEPS


def test_the_comparison_sees_one_bit() -> None:
    """Its must-fail twin: another rounding in the graph than on the host."""
    with pytest.raises(AssertionError, match="adam"), pytest.MonkeyPatch.context() as patch:
        original = Adam.rule

        def off(self: Adam, by: Any, variable: Any, *rest: Any) -> Any:
            value, slots = original(self, by, variable, *rest)
            return (value if isinstance(variable, np.ndarray) else value * F32(1 + 2.0**-23)), slots

        patch.setattr(Adam, "rule", off)
        side_by_side(None, 3, spoiled=0.0)
