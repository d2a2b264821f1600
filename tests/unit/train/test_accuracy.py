"""Accuracy over batches, in evaluate and in fit, as a name and as an object."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from amp_rewrite.errors import TrainingError
from amp_rewrite.train.keras.metrics import Accuracy, metrics_of
from amp_rewrite.train.step.callbacks import EarlyStopping
from amp_rewrite.train.step.step import training_step
from amp_rewrite.train.step.trainer import Trainer
from amp_rewrite.train.update.optimizers import SGD
from support.train.nets import CROSS_ENTROPY, F32, PLACE, batches, mlp, parsed

ROWS = 203


def trainer(loss: str = CROSS_ENTROPY) -> Trainer:
    return Trainer(training_step(mlp(), loss=loss, policy="float32"), **PLACE)


@pytest.mark.parametrize("classes", [2, 5])
def test_it_is_the_share_of_rows_whose_class_is_predicted(classes: int) -> None:
    rng = np.random.default_rng(classes)
    targets, scores = rng.integers(0, classes, ROWS), rng.random((ROWS, classes)).astype(F32)
    metric = Accuracy("p")
    for start in range(0, ROWS, 50):
        metric.update_state(targets[start : start + 50], scores[start : start + 50])

    assert metric.result() == np.mean(scores.argmax(1) == targets)
    metric.reset_state()
    assert np.isnan(metric.result())


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_evaluate_and_fit_give_that_of_the_float32_predictions(policy: str) -> None:
    step = training_step(mlp(), loss=CROSS_ENTROPY, optimizer=SGD(0.1), policy=policy)
    made, rows = Trainer(step, **PLACE), list(batches(5))
    asked = ["accuracy", Accuracy("y", "t", name="hits", ignore_index=-1)]
    history = made.fit(rows, epochs=2, validation_data=rows, metrics=asked, callbacks=EarlyStopping("val_accuracy"))
    scores = made.evaluate(rows, metrics=asked)
    y = np.concatenate([made.predict({"x": batch["x"]})["y"] for batch in rows])
    t = np.concatenate([batch["t"] for batch in rows])

    assert scores.metrics["hits"] == np.mean(y.argmax(1) == t)
    assert scores.metrics.keys() == {"accuracy", "hits"}
    assert history.epochs[-1]["val_hits"] == scores.metrics["hits"] and "val_accuracy" in history.epochs[0]


def test_a_last_batch_with_fewer_rows_counts() -> None:
    made, rows = trainer("binary_cross_entropy(y, t)"), next(batches(1, rows=50))
    data = {**rows, "t": np.eye(4, dtype=F32)[rows["t"]]}
    whole, parts = (made.evaluate(data, batch_size=size, metrics="accuracy").metrics for size in (50, 16))

    assert parts == whole


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([3], "not a metric: 3; use 'accuracy' or Accuracy(OUTPUT, TARGET), and compute others from the result of"),
        (["auc"], "not a metric: 'auc'; use 'accuracy' or Accuracy(OUTPUT, TARGET), and compute others from the"),
        ([Accuracy("y", "t")] * 2, "two metrics are named 'accuracy'; give one of them another name="),
        ("accuracy", "'accuracy' is that of the loss, which names no prediction with a target; pass Accuracy(OUTPUT"),
    ],
)
def test_what_is_no_metric_says_so(asked: Any, message: str) -> None:
    with pytest.raises(TrainingError) as error:
        metrics_of(asked, None, ())
    assert str(error.value).startswith(message)


def test_numbers_have_no_accuracy() -> None:
    with pytest.raises(
        TrainingError, match=r"one for each target, so targets must be 0 or 1; numbers have no accuracy"
    ):
        Accuracy("p").update_state(np.array([0.5, 2.0]), np.array([0.5, 2.0]))


def test_a_target_or_an_output_that_is_missing_and_no_validation_say_so() -> None:
    for metric, name in ((Accuracy("y", "u"), "u"), (Accuracy("z", "t"), "z")):
        with pytest.raises(
            TrainingError, match=f"^the metric 'accuracy' reads '{name}', but batch and model have x, t"
        ):
            trainer().evaluate(list(batches(1)), metrics=metric)
    with pytest.raises(TrainingError, match=r"^metrics are computed on validation data"):
        trainer().fit(list(batches(1)), metrics=["accuracy"])


@pytest.mark.parametrize("loss", ["categorical_cross_entropy", "kl_divergence"])
def test_targets_of_a_number_for_each_class_are_read_as_the_loss_reads_them(loss: str) -> None:
    rows = list(batches(3))
    one_hot = [{**batch, "t": np.eye(4, dtype=F32)[batch["t"]]} for batch in rows]
    expected = trainer().evaluate(rows).metrics["accuracy"]

    assert trainer(f"{loss}(y, t)").evaluate(one_hot, metrics=["accuracy"]).metrics["accuracy"] == expected


@pytest.mark.parametrize(("threshold", "least"), [(None, 0), (0.5, 0.5), (0, 0)])
def test_targets_of_a_yes_or_no_each_count_each_from_where_the_loss_decides(threshold: Any, least: float) -> None:
    made, batch = trainer("binary_cross_entropy(y, t)"), next(batches(1))
    targets = np.eye(4, dtype=F32)[batch["t"]]
    y = made.predict({"x": batch["x"]})["y"]
    asked = "accuracy" if threshold is None else Accuracy("y", "t", threshold=threshold)
    scores = made.evaluate([{**batch, "t": targets}], metrics=asked)

    assert scores.metrics["accuracy"] == np.mean((y >= least) == targets)


def test_yes_begins_at_a_half_for_the_probability_beside_logits_that_the_loss_reads() -> None:
    model = parsed(
        "net (float[N,3] x) => (float[N,2] y, float[N,2] p) <float[3,2] w = {1,-2,3,1,-1,2}>"
        " { y = MatMul (x, w) p = Sigmoid (y) }"
    )
    batch = {"x": np.random.default_rng(0).normal(size=(40, 3)).astype(F32), "t": np.eye(2, dtype=F32)[[0, 1] * 20]}
    found = []
    for output in ("y", "p"):
        made = Trainer(training_step(model, loss=f"binary_cross_entropy({output}, t)", policy="float32"), **PLACE)
        found += [made.evaluate([batch], metrics=Accuracy(o, "t")).metrics["accuracy"] for o in (output, "p")]

    assert len(set(found)) == 1


def test_targets_with_two_readings_are_refused_unless_told() -> None:
    targets, predictions = np.eye(3)[[0, 1, 2, 1]], np.eye(3)[[0, 1, 1, 1]]
    with pytest.raises(TrainingError, match="give one_hot=True if each row has one class, one_hot=False"):
        Accuracy("p").update_state(targets, predictions)
    found = []
    for one_hot in (True, False):
        metric = Accuracy("p", one_hot=one_hot)
        metric.update_state(targets, predictions)
        found.append(metric.result())

    assert found == [3 / 4, 10 / 12]


def test_indices_that_keep_the_axis_of_the_classes_are_rows() -> None:
    targets, predictions = np.array([0, 1, 2, 1]), np.eye(3)[[0, 1, 1, 1]]
    found = []
    for given in (targets, targets[:, None]):
        metric = Accuracy("p")
        metric.update_state(given, predictions)
        found.append(metric.result())
    assert found == [3 / 4, 3 / 4]


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ([-100, 1], "the metric 'accuracy' has the target -100, but predictions have classes 0 to 3; correct the"),
        (
            [0.5, 1],
            "the metric 'accuracy' has the target 0.5, but predictions have classes 0 to 3; correct the targets",
        ),
        ([0, 1, 2], "has predictions of shape (2, 4) and targets of shape (3,); without axis -1 they must agree"),
    ],
)
def test_targets_that_are_no_classes_are_refused(targets: list[float], message: str) -> None:
    with pytest.raises(TrainingError) as error:
        Accuracy("p").update_state(np.array(targets), np.ones((2, 4), F32))
    assert message in str(error.value)


def test_classes_that_the_loss_ignores_do_not_count() -> None:
    made = trainer("cross_entropy(y, t, ignore_index=-100)")
    batch = next(batches(1))
    y = made.predict({"x": batch["x"]})["y"]
    ignored = np.arange(16) < 5
    scores = made.evaluate(
        [{**batch, "t": np.where(ignored, -100, batch["t"])}], metrics=Accuracy("y", "t", name="own")
    )

    assert scores.metrics["own"] == np.mean((y.argmax(1) == batch["t"])[~ignored])
