"""Accuracy: that of the loss, and the object of a loop."""

from __future__ import annotations

import numpy as np
import pytest

from amp_rewrite.errors import TrainingError
from amp_rewrite.train.keras.metrics import Accuracy
from amp_rewrite.train.step.fitting import EarlyStopping
from amp_rewrite.train.step.step import training_step
from amp_rewrite.train.step.trainer import Trainer
from support.train.nets import CROSS_ENTROPY, F32, PLACE, batches, mlp, parsed

ROWS = 203


def trainer(loss: str = CROSS_ENTROPY) -> Trainer:
    return Trainer(training_step(mlp(), loss=loss, policy="float32"), **PLACE)


@pytest.mark.parametrize("classes", [2, 5])
def test_it_is_the_share_of_rows_whose_class_is_predicted(classes: int) -> None:
    rng = np.random.default_rng(classes)
    targets, scores = rng.integers(0, classes, ROWS), rng.random((ROWS, classes)).astype(F32)
    metric = Accuracy()
    for start in range(0, ROWS, 50):
        metric.update_state(targets[start : start + 50], scores[start : start + 50])

    assert metric.result() == np.mean(scores.argmax(1) == targets)
    metric.reset_state()
    assert np.isnan(metric.result())


def test_targets_with_two_readings_are_refused_unless_told() -> None:
    targets, predictions = np.eye(3)[[0, 1, 2, 1]], np.eye(3)[[0, 1, 1, 1]]
    with pytest.raises(TrainingError, match="give one_hot=True if each row has one class, one_hot=False"):
        Accuracy().update_state(targets, predictions)
    found = []
    for one_hot in (True, False):
        metric = Accuracy(one_hot=one_hot)
        metric.update_state(targets, predictions)
        found.append(metric.result())

    assert found == [3 / 4, 10 / 12]


def test_indices_that_keep_the_axis_of_the_classes_are_rows() -> None:
    targets, predictions = np.array([0, 1, 2, 1]), np.eye(3)[[0, 1, 1, 1]]
    found = []
    for given in (targets, targets[:, None]):
        metric = Accuracy()
        metric.update_state(given, predictions)
        found.append(metric.result())
    assert found == [3 / 4, 3 / 4]


def test_evaluate_and_fit_give_that_of_the_loss() -> None:
    made, rows = trainer(), list(batches(5))
    history = made.fit(rows, epochs=2, validation_data=rows, callbacks=EarlyStopping("val_accuracy"))
    scores = made.evaluate(rows)
    y = np.concatenate([made.predict({"x": batch["x"]})["y"] for batch in rows])

    assert scores.metrics == {"accuracy": np.mean(y.argmax(1) == np.concatenate([batch["t"] for batch in rows]))}
    assert history.epochs[-1]["val_accuracy"] == scores.metrics["accuracy"]


@pytest.mark.parametrize("loss", ["categorical_cross_entropy", "kl_divergence"])
def test_of_shares_it_is_that_of_the_classes_with_the_largest(loss: str) -> None:
    rows = list(batches(3, rows=50))
    shares = [{**batch, "t": np.eye(4, dtype=F32)[batch["t"]]} for batch in rows]
    assert trainer(f"{loss}(y, t)").evaluate(shares).metrics == trainer().evaluate(rows).metrics


@pytest.mark.parametrize(("text", "least"), [("y, t", 0.0), ("p, t", 0.5), ("p, t, from_logits=False", 0.5)])
def test_yes_begins_at_a_probability_of_a_half(text: str, least: float) -> None:
    model = parsed(
        "net (float[N,3] x) => (float[N,2] y, float[N,2] p) <float[3,2] w = {1,-2,3,1,-1,2}>"
        " { y = MatMul (x, w) p = Sigmoid (y) }"
    )
    batch = {"x": np.random.default_rng(0).normal(size=(40, 3)).astype(F32), "t": np.eye(2, dtype=F32)[[0, 1] * 20]}
    made = Trainer(training_step(model, loss=f"binary_cross_entropy({text})", policy="float32"), **PLACE)
    right = (made.predict({"x": batch["x"]})[text[0]].numpy() >= least) == batch["t"]

    assert made.evaluate([batch]).metrics["accuracy"] == pytest.approx(np.mean(right))
