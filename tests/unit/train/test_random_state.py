"""Random numbers as state: seeds, resumed runs, and distributions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto
from onnx.numpy_helper import from_array

from amp_rewrite.files.casting import Array
from amp_rewrite.files.model import Model
from amp_rewrite.rewrite.autodiff.lowering.random_numbers import (
    MULTIPLIERS,
    PRIME,
    initial_random_state,
    with_random_state,
)
from amp_rewrite.runtime.runner import Runner, SessionOptions
from amp_rewrite.train.step.model_loss import ModelLoss
from amp_rewrite.train.step.step import TrainingStep, training_step
from amp_rewrite.train.step.trainer import Trainer
from support.train.nets import CROSS_ENTROPY, F32, PLACE, SHAPES, batches, parsed, same

DATA = list(batches(8))


def _net() -> ModelProto:
    """The small model with Dropout after its first layer, and again before its last op."""
    model = parsed(
        """net (float[N,8] x) => (float[N,4] y) <float half = {0.5}, float few = {0.25}> {
          h = MatMul (x, w1)  hb = Add (h, b1)  a = Relu (hb)  d = Dropout (a, half)
          z = MatMul (d, w2)  e = Dropout (z, few)  y = Add (e, b2)
        }"""
    )
    rng = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        model.graph.initializer.append(from_array(np.asarray(rng.normal(size=shape) * 0.3, F32), name))
    return model


def _step(**options: Any) -> TrainingStep:
    chosen: dict[str, Any] = {"loss": CROSS_ENTROPY, "optimizer": "adam,lr=0.01", "training_mode": True}
    return training_step(_net(), **{**chosen, **options})


def _trainer(**options: Any) -> Trainer:
    return Trainer(_step(**options), **PLACE)


@pytest.mark.parametrize("options", [{}, {"micro_batches": 3}])
def test_a_resumed_run_with_dropout_ends_with_the_same_bits(options: dict[str, Any], tmp_path: Path) -> None:
    straight = _trainer(**options)
    losses = straight.fit(DATA).losses
    first, second = _trainer(**options), _trainer(**options)
    before = first.fit(DATA[:5]).losses
    first.save(tmp_path / "a.npz")
    second.load(tmp_path / "a.npz")

    assert before + second.fit(DATA[5:]).losses == losses
    assert same(straight.state, second.state)


def test_a_loss_draws_the_same_numbers_as_a_step_of_its_seed() -> None:
    options: dict[str, Any] = {"training_mode": True, "policy": "float32", "seed": 3}
    (losses,) = Trainer(_step(policy="float32", seed=3), **PLACE).fit(DATA[:1]).losses
    loss = ModelLoss.of(_net(), CROSS_ENTROPY, **options).on(DATA[0])()
    assert float(loss) == pytest.approx(losses, rel=1e-6)


def test_each_step_drops_other_values_even_after_a_skipped_one() -> None:
    trainer = _trainer(policy="float32", loss_scale="dynamic", optimizer="sgd")
    seen = [trainer.fit([{"x": x, "t": DATA[0]["t"]}], learning_rate=0.0).losses for x in [DATA[0]["x"]] * 3]
    assert len(set(seen)) == 3

    bad = {"x": np.full_like(DATA[0]["x"], np.inf), "t": DATA[0]["t"]}
    before = trainer.state["random"]
    assert trainer.fit([bad]).skipped == 1
    assert (trainer.state["random"] == before * np.array(MULTIPLIERS) % PRIME).all()


# -- distributions ------------------------------------------------------------------------------------


def _drawn(graph: str, feeds: dict[str, Array], state: Array) -> list[Array]:
    model, names = with_random_state(Model.load(parsed(graph)))
    assert names is not None
    runner = Runner.open(model, SessionOptions(threads=1))
    outputs = [v.name for v in model.proto.graph.output]
    results = runner.run({**feeds, "random": state}, outputs)
    return [np.asarray(results[name]) for name in outputs]


_DROPOUT = """net (float[{dims}] x) => (float[{dims}] y, bool[{dims}] kept)
  <float ratio = {{0.3}}, bool on = {{1}}> {{ y, kept = Dropout (x, ratio, on) }}"""


def _correlation(a: Array, b: Array) -> float:
    return abs(float(np.corrcoef(a.ravel().astype(float), b.ravel().astype(float))[0, 1]))


@pytest.mark.parametrize("dims", ["N,M", "10,50,200"])
def test_dropout_drops_its_share_and_scales_up_the_rest(dims: str) -> None:
    shape = (10, 50, 200) if dims.count(",") == 2 else (500, 200)
    y, kept = _drawn(_DROPOUT.format(dims=dims), {"x": np.ones(shape, F32)}, initial_random_state(0))

    assert (kept == (y != 0)).all() and set(np.unique(y)) == {F32(0), F32(1 / 0.7)}
    assert (~kept).mean() == pytest.approx(0.3, abs=0.01)
    rows = kept.reshape(-1, 200)
    assert rows.mean(1).std() == pytest.approx(np.sqrt(0.21 / 200), rel=0.15)  # as for independent draws
    assert rows.mean(0).std() == pytest.approx(np.sqrt(0.21 / len(rows)), rel=0.2)
    assert _correlation(rows[1:], rows[:-1]) < 0.02 and _correlation(rows[:, 1:], rows[:, :-1]) < 0.02


def test_steps_seeds_and_ops_draw_independently() -> None:
    graph = """net (float[300,100] x) => (bool[300,100] a, bool[300,100] b) <float ratio = {0.3}, bool on = {1}> {
      y, a = Dropout (x, ratio, on)  z, b = Dropout (x, ratio, on) }"""
    feeds, start = {"x": np.ones((300, 100), F32)}, initial_random_state(0)
    draws = [
        *_drawn(graph, feeds, start),
        *_drawn(graph, feeds, start * np.array(MULTIPLIERS) % PRIME),
        *_drawn(graph, feeds, initial_random_state(1)),
    ]
    worst = max(_correlation(a, b) for i, a in enumerate(draws) for b in draws[:i])
    assert worst < 0.03


def test_random_ops_draw_from_their_distributions() -> None:
    graph = """net (float[400,50] p) => (float[1000,30] n, float[400,50] l, float[1000,30] u, float[400,50] b) {
      n = RandomNormal <shape = [1000, 30], mean = 2.0, scale = 3.0> ()  l = RandomNormalLike (p)
      u = RandomUniform <shape = [1000, 30], low = -1.0> ()  b = Bernoulli (p) }"""
    n, like, u, b = _drawn(graph, {"p": np.full((400, 50), 0.2, F32)}, initial_random_state(0))

    assert (n.mean(), n.std()) == (pytest.approx(2, abs=0.1), pytest.approx(3, abs=0.1))
    assert (like.mean(), like.std()) == (pytest.approx(0, abs=0.05), pytest.approx(1, abs=0.05))
    assert ((like / like.std()) ** 4).mean() == pytest.approx(3, abs=0.2)
    assert -1 <= u.min() < -0.99 and 0.99 < u.max() <= 1 and u.mean() == pytest.approx(0, abs=0.02)
    assert set(np.unique(b)) == {0, 1} and b.mean() == pytest.approx(0.2, abs=0.02)


def test_a_computed_ratio_and_a_ratio_of_1() -> None:
    computed = """net (float[100,100] x, float ratio) => (float[100,100] y) <bool on = {1}> {
      y = Dropout (x, ratio, on) }"""
    (y,) = _drawn(computed, {"x": np.ones((100, 100), F32), "ratio": np.array(0.25, F32)}, initial_random_state(0))
    assert (y == 0).mean() == pytest.approx(0.25, abs=0.02) and y.max() == F32(1 / 0.75)

    whole = _DROPOUT.format(dims="3,4").replace("0.3", "1")
    assert (_drawn(whole, {"x": np.ones((3, 4), F32)}, initial_random_state(0))[0] == 0).all()
