"""Metrics: those of scikit-learn over batches, in evaluate and in fit, as text, as functions and as ONNX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from amp_rewrite.errors import TrainingError
from amp_rewrite.train.metrics.classification import AUC, Accuracy, F1Score, Perplexity, TopKAccuracy
from amp_rewrite.train.metrics.metric import FunctionMetric, Metric, OnnxMetric
from amp_rewrite.train.metrics.metric_text import metrics_of
from amp_rewrite.train.metrics.regression import MeanAbsoluteError, MeanSquaredError
from amp_rewrite.train.step.callbacks import EarlyStopping
from amp_rewrite.train.step.step import training_step
from amp_rewrite.train.step.trainer import Trainer
from amp_rewrite.train.update.optimizers import SGD
from support.train.nets import CROSS_ENTROPY, F32, PLACE, batches, mlp, parsed

ROWS = 203


def data(classes: int) -> tuple[Any, Any]:
    """Targets and rounded scores, with ties."""
    rng = np.random.default_rng(classes)
    targets = rng.integers(0, classes, ROWS)
    scores = rng.random((ROWS, classes)).round(2) + 0.01 + 0.3 * (np.arange(classes) == targets[:, None])
    return targets, (scores / scores.sum(1, keepdims=True)).astype(np.float32)


def over_batches(metric: Metric, targets: Any, predictions: Any) -> float:
    metric.reset()
    for start in range(0, ROWS, 50):
        metric.update(targets[start : start + 50], predictions[start : start + 50])
    return metric.result()


def test_metrics_of_classes_are_those_of_scikit_learn() -> None:
    sk = pytest.importorskip("sklearn.metrics")
    for classes in (2, 5):
        targets, p = data(classes)
        chosen = p.argmax(1)
        assert over_batches(Accuracy("p"), targets, p) == pytest.approx(sk.accuracy_score(targets, chosen))
        for average in ("macro", "micro", "weighted"):
            expected = sk.f1_score(targets, chosen, average=average)
            assert over_batches(F1Score("p", average=average), targets, p) == pytest.approx(expected)
        area = np.mean(
            [sk.roc_auc_score(targets == c, p[:, c]) for c in range(classes)]
        )  # of two classes twice the same
        assert over_batches(AUC("p"), targets, p) == pytest.approx(area)
        loss = sk.log_loss(targets, p.astype(np.float64) / p.astype(np.float64).sum(1, keepdims=True))
        assert over_batches(Perplexity("p", from_logits=False), targets, p) == pytest.approx(np.exp(loss), rel=1e-5)
        assert over_batches(Perplexity("p"), targets, np.log(p)) == pytest.approx(np.exp(loss), rel=1e-5)
        assert over_batches(Perplexity("p"), targets, p) == pytest.approx(np.exp(loss), rel=1e-5)  # told by their sum
        assert over_batches(Perplexity("p", from_logits=True), targets, p) != pytest.approx(np.exp(loss), rel=1e-2)
    for k in (1, 2, 3):
        expected = sk.top_k_accuracy_score(targets, p, k=k)
        assert over_batches(TopKAccuracy("p", k=k), targets, p) == pytest.approx(expected)
    two, scores = data(2)[0], data(2)[1][:, 1]
    expected = sk.f1_score(two, scores >= 0.4)
    assert over_batches(F1Score("p", average="binary", threshold=0.4), two, scores) == pytest.approx(expected)
    assert over_batches(AUC("p"), two, scores) == pytest.approx(sk.roc_auc_score(two, scores))


def test_metrics_of_numbers_are_those_of_scikit_learn() -> None:
    sk = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    targets, predictions = rng.normal(size=(2, ROWS, 3)).astype(np.float32)
    absolute, squared = sk.mean_absolute_error(targets, predictions), sk.mean_squared_error(targets, predictions)

    assert over_batches(MeanAbsoluteError("p"), targets, predictions) == pytest.approx(absolute)
    assert over_batches(MeanSquaredError("p"), targets, predictions) == pytest.approx(squared)


def test_perplexity_leaves_out_ignored_tokens_of_sequences() -> None:
    logits = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    targets = np.array([[0, 1, -100], [2, -100, 3]])
    metric = Perplexity("p", ignore_index=-100)
    metric.update(targets, logits)
    odds = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = np.exp(-np.mean(np.log([odds[0, 0, 0], odds[0, 1, 1], odds[1, 0, 2], odds[1, 2, 3]])))

    assert metric.result() == pytest.approx(float(expected))


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_evaluate_and_fit_give_metrics_of_the_float32_predictions(policy: str) -> None:
    step = training_step(mlp(), loss=CROSS_ENTROPY, optimizer=SGD(0.1), policy=policy)
    trainer, rows = Trainer(step, **PLACE), list(batches(5))
    squares = OnnxMetric(
        parsed(
            "net (int64[N] targets, float[N, C] predictions) => (float of_squares)"
            " { s = Mul (predictions, predictions)  of_squares = ReduceMean <keepdims = 0> (s) }"
        ),
        "y",
        "t",
    )

    def spread(targets: Any, predictions: Any) -> float:
        return float(np.std(predictions))

    asked = ["accuracy(y, t)", "top_k(y, t, k=2)", "perplexity(y, t)", FunctionMetric(spread, "y", "t"), squares]
    history = trainer.fit(rows, epochs=2, validation_data=rows, metrics=asked, callbacks=[EarlyStopping("val_top_k")])
    scores = trainer.evaluate(rows, metrics=asked)
    y = np.concatenate([trainer.predict({"x": batch["x"]})["y"] for batch in rows])
    t = np.concatenate([batch["t"] for batch in rows])

    assert scores.metrics["accuracy"] == np.mean(y.argmax(1) == t)
    assert scores.metrics["spread"] == pytest.approx(np.std(y), rel=1e-5)
    assert scores.metrics["of_squares"] == pytest.approx(np.mean(y**2), rel=1e-5)
    assert scores.metrics["perplexity"] == pytest.approx(np.exp(scores.loss), rel=1e-2)
    assert history.epochs[-1]["val_perplexity"] == scores.metrics["perplexity"]
    assert {"val_accuracy", "val_top_k", "val_spread", "val_of_squares"} <= history.epochs[0].keys()


def test_a_last_batch_with_fewer_rows_counts() -> None:
    trainer = Trainer(training_step(mlp(), loss=CROSS_ENTROPY, policy="float32"), **PLACE)
    rows = next(batches(1, rows=50))
    whole = trainer.evaluate(rows, batch_size=50, metrics=["accuracy(y, t)", "auc(y, t)"]).metrics
    parts = trainer.evaluate(rows, batch_size=16, metrics=["accuracy(y, t)", "auc(y, t)"]).metrics

    assert parts == pytest.approx(whole)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["acuracy(y, t)"], "unknown metric 'acuracy(y, t)'; did you mean 'accuracy'?"),
        (["auc(z, t)"], "the metric 'auc' reads 'z', not an output of the model; its outputs are y"),
        (["auc(y, t)", AUC("y", "u")], "two metrics are named 'auc'; give one of them another name="),
        ([3], "not a metric: 3; pass a Metric, or text such as accuracy(OUTPUT, TARGET)"),
        (["f1(y, t, average='all')"], "average of F1Score is 'all'; use macro, micro, weighted or binary"),
    ],
)
def test_what_is_no_metric_says_so(asked: Any, message: str) -> None:
    with pytest.raises(TrainingError) as error:
        metrics_of(asked, ["y"])
    assert str(error.value) == message


def test_numbers_have_no_accuracy() -> None:
    for metric in (Accuracy("p"), F1Score("p")):
        with pytest.raises(TrainingError, match=r"one for each target, so targets must be 0 or 1; use mean_absolute"):
            metric.update(np.array([0.5, 2.0]), np.array([0.5, 2.0]))


def test_a_metric_whose_target_is_missing_and_one_without_validation_say_so() -> None:
    trainer = Trainer(training_step(mlp(), loss=CROSS_ENTROPY, policy="float32"), **PLACE)
    with pytest.raises(TrainingError, match=r"^the metric 'auc' reads 'u', but batch and model have x, t, y$"):
        trainer.evaluate(list(batches(1)), metrics=["auc(y, u)"])
    with pytest.raises(TrainingError, match=r"^metrics are computed on validation data"):
        trainer.fit(list(batches(1)), metrics=["auc(y, t)"])


@pytest.mark.parametrize("loss", ["categorical_cross_entropy", "kl_divergence"])
def test_targets_of_a_number_for_each_class_are_read_as_the_loss_reads_them(loss: str) -> None:
    asked = ["accuracy(y, t)", "top_k(y, t, k=2)", "f1(y, t)", "auc(y, t)", "perplexity(y, t)"]
    rows = list(batches(3))
    indices = Trainer(training_step(mlp(), loss=CROSS_ENTROPY, policy="float32"), **PLACE).evaluate(rows, metrics=asked)
    trainer = Trainer(training_step(mlp(), loss=f"{loss}(y, t)", policy="float32"), **PLACE)
    one_hot = [{**batch, "t": np.eye(4, dtype=np.float32)[batch["t"]]} for batch in rows]
    scores = trainer.evaluate(one_hot, metrics=asked)

    assert scores.metrics == pytest.approx({name: indices.metrics[name] for name in scores.metrics})
    assert {"accuracy", "top_k", "f1", "auc", "perplexity"} == scores.metrics.keys()


@pytest.mark.parametrize(
    ("text", "least"),
    [("accuracy(y, t)", 0), ("accuracy(y, t, threshold=0.5)", 0.5), ("accuracy(y, t, threshold=0)", 0)],
)
def test_targets_of_a_yes_or_no_each_count_each_from_where_the_loss_decides(text: str, least: float) -> None:
    trainer = Trainer(training_step(mlp(), loss="binary_cross_entropy(y, t)", policy="float32"), **PLACE)
    batch = next(batches(1))
    targets = np.eye(4, dtype=np.float32)[batch["t"]]
    y = trainer.predict({"x": batch["x"]})["y"]
    scores = trainer.evaluate([{**batch, "t": targets}], metrics=[text])

    assert scores.metrics["accuracy"] == np.mean((y >= least) == targets)


def test_yes_begins_at_a_half_for_the_probability_beside_logits_that_the_loss_reads() -> None:
    model = parsed(
        "net (float[N,3] x) => (float[N,2] y, float[N,2] p) <float[3,2] w = {1,-2,3,1,-1,2}>"
        " { y = MatMul (x, w) p = Sigmoid (y) }"
    )
    batch = {"x": np.random.default_rng(0).normal(size=(40, 3)).astype(F32), "t": np.eye(2, dtype=F32)[[0, 1] * 20]}
    found = []
    for output in ("y", "p"):
        trainer = Trainer(training_step(model, loss=f"binary_cross_entropy({output}, t)", policy="float32"), **PLACE)
        found += [trainer.evaluate([batch], metrics=[f"f1({o}, t)"]).metrics["f1"] for o in (output, "p")]

    assert len(set(found)) == 1


def test_targets_with_two_readings_are_refused_unless_told() -> None:
    targets, predictions = np.eye(3)[[0, 1, 2, 1]], np.eye(3)[[0, 1, 1, 1]]
    with pytest.raises(TrainingError, match="give one_hot=True if each row has one class, one_hot=False"):
        Accuracy("p").update(targets, predictions)
    found = []
    for one_hot in (True, False):
        metric = Accuracy("p", one_hot=one_hot)
        metric.update(targets, predictions)
        found.append(metric.result())

    assert found == [3 / 4, 10 / 12]


def test_indices_that_keep_the_axis_of_the_classes_are_rows() -> None:
    targets, predictions = np.array([0, 1, 2, 1]), np.eye(3)[[0, 1, 1, 1]]
    for metric in (Accuracy("p"), F1Score("p"), TopKAccuracy("p", k=1)):
        metric.update(targets, predictions)
        expected = metric.result()
        metric.reset()
        metric.update(targets[:, None], predictions)
        assert metric.result() == expected


@pytest.mark.parametrize(
    ("row", "logits"),
    [
        ((0.25, 0.25, 0.5), False),
        ((0.0, 0.0, 1.0000001), False),  # of a softmax in float32
        ((-0.5, 0.5, 1.0), True),
        ((0.25, 0.25, 0.25), True),
        ((0.5, 0.5, 0.5), True),
    ],
)
def test_rows_are_probabilities_if_they_are_not_negative_and_sum_to_1(row: tuple[float, ...], logits: bool) -> None:
    found = []
    for asked in (None, logits):
        metric = Perplexity("p", from_logits=asked)
        metric.update(np.array([1, 2]), np.array([row, (0.5, 0.25, 0.25)], np.float32))
        found.append(metric.result())
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("metric", "targets", "message"),
    [
        ("perplexity(y, t)", [0, 4], "the metric 'perplexity' has the target 4, but predictions have classes 0 to 3;"),
        ("accuracy(y, t)", [-100, 1], "the metric 'accuracy' has the target -100, but predictions have classes 0"),
        ("top_k(y, t, k=2)", [0.5, 1], "the metric 'top_k' has the target 0.5, but predictions have classes 0 to 3;"),
        ("auc(z, t)", [0, 2], "one for each target, so targets must be 0 or 1;"),
        ("top_k(y, t, k=0)", [0, 1], "k is 0; use a whole number ≥ 1"),
        ("f1(y, t, average=samples)", [0, 1], "average of F1Score is 'samples'; use macro, micro, weighted or binary"),
    ],
)
def test_targets_that_are_no_classes_are_refused(metric: str, targets: list[float], message: str) -> None:
    with pytest.raises(TrainingError) as error:
        (made,) = metrics_of([metric], ("y", "z"))
        scores = np.ones((2, 4), F32) if made.prediction == "y" else np.ones(2, F32)
        made.update(np.array(targets), scores)
    assert message in str(error.value)


def test_the_area_of_scores_with_a_nan_is_nan() -> None:
    metric = AUC("y", "t")
    metric.update(np.array([0, 1, 1]), np.array([0.1, np.nan, 0.3], F32))
    assert np.isnan(metric.result())
