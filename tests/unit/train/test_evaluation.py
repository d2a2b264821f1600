"""Loss and metrics over data, with the state as it is."""

import numpy as np
import onnx.parser
import pytest

from amp_rewrite.errors import FeedError, TrainingError
from amp_rewrite.train.step.step import training_step
from amp_rewrite.train.step.trainer import Trainer
from support.train.nets import PLACE, batches, parsed, same, trainer

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


IGNORED = -100


@pytest.mark.parametrize("options", ["", ", class_weights=[1, 2, 0.5, 3]", ", label_smoothing=0.1"])
def test_a_mean_over_data_is_that_of_all_targets_that_count(options: str) -> None:
    torch = pytest.importorskip("torch")
    text = f"cross_entropy(y, t, ignore_index={IGNORED}{options})"
    made = trainer(loss=text, policy="float32", loss_scale="dynamic")
    rng = np.random.default_rng(3)
    data = [
        {**batch, "t": np.where(rng.random(16) < share, IGNORED, batch["t"])}
        for batch, share in zip(DATA, (0.1, 1, 0.8), strict=False)
    ]
    logits = torch.tensor(np.concatenate([made.predict({"x": batch["x"]})["y"] for batch in data]))
    targets = torch.tensor(np.concatenate([batch["t"] for batch in data]))
    given = {"weight": torch.tensor([1, 2, 0.5, 3])} if "weights" in options else {}
    smoothing = 0.1 if "smoothing" in options else 0.0
    expected = torch.nn.functional.cross_entropy(
        logits, targets, **given, ignore_index=IGNORED, label_smoothing=smoothing
    ).item()
    kept = targets != IGNORED
    hits = (logits.argmax(1) == targets)[kept].float().mean().item()
    scores = made.evaluate(data)

    assert scores.loss == pytest.approx(expected, rel=1e-5)
    assert scores.metrics == pytest.approx({"accuracy": hits})
    assert scores.rows == 48
    assert np.isnan(made.evaluate(data[1:2]).loss)
    assert made.fit(data, learning_rate=0.0, validation_data=data).epochs[0]["loss"] == pytest.approx(
        expected, rel=1e-5
    )


def test_class_indices_may_keep_the_axis_of_the_classes() -> None:
    made = trainer(policy="float32")
    columns = [{**batch, "t": batch["t"][:, None]} for batch in DATA]
    arrays = tuple(np.concatenate([batch[name] for batch in columns]) for name in ("x", "t"))
    expected = made.evaluate(DATA)

    assert made.evaluate(columns) == made.evaluate(DATA)
    assert made.evaluate(arrays, batch_size=16) == expected
    assert made.fit(columns).losses == trainer(policy="float32").fit(DATA).losses
    with pytest.raises(FeedError, match="has the shape"):
        made.evaluate([{**DATA[0], "t": DATA[0]["t"].reshape(1, -1)}])
    with pytest.raises(FeedError, match="has the shape"):
        made.evaluate([{**DATA[0], "t": np.eye(4, dtype=np.int64)[DATA[0]["t"]]}])


def test_batches_of_a_loss_of_the_models_own_weigh_the_classes_that_count() -> None:
    model = parsed(
        "net (float[N,2] x, int64[N] t) => (float loss) <float[2,3] w = {1,-2,3,1,-1,2}>"
        " { y = MatMul (x, w) loss = SoftmaxCrossEntropyLoss <ignore_index = -100> (y, t) }"
    )
    made, rng = Trainer(training_step(model, loss="loss", policy="float32"), **PLACE), np.random.default_rng(0)
    t = np.where(rng.random(60) < 0.5, -100, rng.integers(0, 3, 60))
    arrays = {"x": rng.normal(size=(60, 2)).astype(np.float32), "t": np.where(np.arange(60) < 20, -100, t)}
    parts, whole = (made.evaluate(arrays, batch_size=size).loss for size in (20, 60))

    assert parts == pytest.approx(whole, rel=1e-6)
    with pytest.raises(TrainingError, match="has class 3, but the model has classes 0 to 2"):
        made.evaluate({**arrays, "t": np.full(60, 3)})


def test_accuracy_comes_with_losses_of_classes_and_of_shares() -> None:
    made = trainer(policy="float32")
    scores = made.evaluate(DATA)
    y = np.concatenate([made.predict({"x": batch["x"]})["y"] for batch in DATA])
    assert scores.metrics == {"accuracy": np.mean(y.argmax(1) == np.concatenate([batch["t"] for batch in DATA]))}
    shares = [{**batch, "t": np.eye(4, dtype=np.float32)[batch["t"]]} for batch in DATA]
    for loss in ("categorical_cross_entropy", "kl_divergence"):
        assert trainer(loss=f"{loss}(y, t)", policy="float32").evaluate(shares).metrics == scores.metrics


@pytest.mark.parametrize(("text", "least"), [("y, t", 0.0), ("p, t", 0.5), ("p, t, from_logits=False", 0.5)])
def test_yes_begins_at_a_probability_of_a_half(text: str, least: float) -> None:
    model = parsed(
        "net (float[N,3] x) => (float[N,2] y, float[N,2] p) <float[3,2] w = {1,-2,3,1,-1,2}>"
        " { y = MatMul (x, w) p = Sigmoid (y) }"
    )
    x, t = np.random.default_rng(0).normal(size=(40, 3)), np.eye(2, dtype=np.float32)[[0, 1] * 20]
    batch = {"x": x.astype(np.float32), "t": t}
    made = Trainer(training_step(model, loss=f"binary_cross_entropy({text})", policy="float32"), **PLACE)
    right = (made.predict({"x": batch["x"]})[text[0]].numpy() >= least) == batch["t"]

    assert made.evaluate([batch]).metrics["accuracy"] == pytest.approx(np.mean(right))
