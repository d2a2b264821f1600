"""Loss and metrics over data, with the state as it is."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest

from amp_rewrite.train.step.step import training_step
from amp_rewrite.train.step.trainer import Trainer
from support.train.nets import PLACE, batches, same, trainer

DATA = list(batches(12))


def test_a_mean_over_data_counts_rows_not_batches() -> None:
    made = trainer(policy="float32")
    rows = {name: np.concatenate([b[name] for b in DATA[:3]]) for name in ("x", "t")}
    uneven = [{name: a[:40] for name, a in rows.items()}, {name: a[40:] for name, a in rows.items()}]

    assert made.evaluate(uneven).loss == pytest.approx(made.evaluate([rows]).loss, rel=1e-6)


def test_evaluation_of_a_training_mode_step_uses_running_statistics_and_no_dropout() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]> net (float[N,2,1] x) => (float[N,2,1] y)
        <float[2] s = {1, 1}, float[2] b = {0, 0}, float[2] mean = {0, 0}, float[2] var = {1, 1}, float r = {0.5}> {
          n = BatchNormalization <epsilon = 0.0> (x, s, b, mean, var)
          y = Dropout <seed = 1> (n, r)
        }"""
    )
    made = Trainer(training_step(model, loss="mean_squared_error(y, t)", training_mode=True, optimizer="sgd,lr=0"))
    batch = {"x": np.full((4, 2, 1), 3, np.float32), "t": np.zeros((4, 2, 1), np.float32)}
    batch["x"][0] = 1

    assert made.evaluate([batch]).loss == pytest.approx((1 + 3 * 9) / 4)  # unchanged by mean 0 and variance 1
    made.fit([batch])
    mean, variance = 0.1 * 2.5, 0.9 + 0.1 * 0.75
    expected = np.mean((batch["x"] - mean) ** 2) / variance
    assert made.evaluate([batch]).loss == pytest.approx(expected, rel=1e-5)


def test_evaluation_changes_nothing() -> None:
    made = trainer()
    made.fit(DATA)
    before = made.state
    made.evaluate(DATA)

    assert same(before, made.state)


def test_evaluation_changes_no_statistics_that_the_model_moves_by_itself() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]> net (float[N,2,1] x) => (float[N,2,1] y)
        <float[2] s = {1, 1}, float[2] b = {0, 0}, float[2] mean = {0, 0}, float[2] var = {1, 1}> {
          y, moved_mean, moved_var = BatchNormalization <training_mode = 1> (x, s, b, mean, var)
        }"""
    )
    made = Trainer(training_step(model, loss="mean_squared_error(y, t)", training_mode=True, policy="float32"), **PLACE)
    batch = {"x": np.array([[[3], [5]], [[1], [2]]], np.float32), "t": np.zeros((2, 2, 1), np.float32)}
    made.fit([batch])
    before = made.state
    scores = [made.evaluate([batch]) for _ in range(3)]

    assert same(before, made.state) and scores[0] == scores[1] == scores[2]


def test_evaluation_sees_the_state_of_the_last_step_after_each_of_them() -> None:
    made = trainer(policy="float32")
    seen = [made.evaluate(DATA[:1]).loss for batch in DATA[:3] if made.fit([batch])]

    assert made.evaluate(DATA[:1]).loss == seen[-1]
    assert len(set(seen)) == 3
