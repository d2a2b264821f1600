"""Training over data: epochs, skipped steps, learning rates, interrupts, and the trained model."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import amp_rewrite
from amp_rewrite.errors import FeedError, ModelError, TrainingError
from amp_rewrite.runtime.buffers import BufferedRunner
from amp_rewrite.runtime.runner import Runner
from amp_rewrite.train.loss_scale import DynamicLossScale
from amp_rewrite.train.step.step import training_step
from amp_rewrite.train.step.trainer import Trainer
from support import stub
from support.train.nets import F32, PLACE, batches, parsed, same, step, trainer

DATA = list(batches(12))


def test_loss_falls_and_accuracy_rises_over_epochs() -> None:
    made = trainer()
    before = made.evaluate(DATA)
    history = made.fit(DATA, epochs=20)
    after = made.evaluate(DATA)

    assert (len(history.losses), len(history.epochs), made.steps) == (240, 20, 240)
    assert (history.skipped, history.nonfinite) == (0, 0)
    assert before.rows == after.rows == 12 * 16
    assert after.loss < 0.3 < 1.2 < before.loss
    assert before.metrics["accuracy"] < 0.5 < 0.9 < after.metrics["accuracy"]


def test_the_state_is_a_copy_and_a_low_step_on_the_cpu_is_emulated_and_says_so() -> None:
    assert trainer().where == "CPUExecutionProvider, float16 emulated: float32 kernels, rounded"
    assert trainer(policy="float32").where == "CPUExecutionProvider"
    as_it_is = Trainer(step(), **PLACE, emulated=False)
    assert as_it_is.where == "CPUExecutionProvider, float16 as the provider computes it"
    made = trainer()
    before = made.state
    made.state["w1"][:] = 7
    made.fit(DATA[:1])
    after = made.state
    made.fit(DATA[1:3])

    assert same(before, trainer().state)
    assert not same(before, after) and not same(after, made.state)


def test_nan_in_the_data_skips_that_step_and_is_counted() -> None:
    spoiled = [{name: array.copy() for name, array in batch.items()} for batch in DATA]
    spoiled[4]["x"][3, 3] = np.nan
    made = trainer()
    history = made.fit(spoiled, epochs=2)

    assert (history.skipped, history.nonfinite, made.steps, made.loss_scale) == (2, 2, 22, 2.0**13)
    assert np.isnan(history.losses[4]) and np.isfinite(made.state["w1"]).all()
    without = trainer(loss_scale=DynamicLossScale(2.0**15))
    without.fit([*spoiled[:4], *spoiled[5:]])
    again = trainer()
    again.fit(spoiled)
    assert np.array_equal(without.state["w1"], again.state["w1"])  # powers of two scale exactly


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_progress_bar_is_drawn_on_a_terminal_alone(monkeypatch: Any) -> None:
    plain, drawn = io.StringIO(), _Terminal()
    for stream in (plain, drawn):
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        with amp_rewrite.progress_bar("digits") as bar:
            trainer().fit(DATA[:3], epochs=2, progress=bar)

    assert plain.getvalue() == ""
    assert "digits" in drawn.getvalue() and "100%" in drawn.getvalue()


def test_an_interrupt_within_a_step_leaves_the_state_of_the_step_before(monkeypatch: Any) -> None:
    made = Trainer(step(micro_batches=2), **PLACE)
    made.fit(DATA[:3])
    before = (made.state, made.steps, made.skipped)
    real = BufferedRunner.run

    def interrupted(self: BufferedRunner, side: Any, feeds: Any) -> Any:
        told = real(self, side, feeds)
        if "applied" in told:  # all new state is written by now
            raise KeyboardInterrupt
        return told

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(BufferedRunner, "run", interrupted)
        made.fit(DATA[3:4])
    assert same(made.state, before[0]) and (made.steps, made.skipped) == before[1:]

    made.fit(DATA[3:])
    straight = Trainer(step(micro_batches=2), **PLACE)
    straight.fit(DATA)
    assert same(straight.state, made.state)


def test_a_run_that_fails_changes_nothing() -> None:
    model = parsed(
        "net (int64[N] x) => (float[N,2] y) <float[3,2] table = {1, 2, 3, 4, 5, 6}> { y = Gather (table, x) }"
    )
    made = Trainer(training_step(model, loss="mean_squared_error(y, t)", policy="float32"), **PLACE)
    batch = {"x": np.array([0, 2]), "t": np.zeros((2, 2), F32)}
    made.fit([batch])
    before = made.state
    with pytest.raises(ModelError, match=r"^onnxruntime cannot run the model: .* idx=9 must be within"):
        made.fit([{**batch, "x": np.array([0, 9])}])

    assert same(before, made.state) and made.steps == 1


def test_the_exported_model_computes_what_was_learned_and_converts() -> None:
    made = trainer()
    made.fit(DATA, epochs=5)
    learned = made.export()
    x = DATA[0]["x"]
    y: Any = Runner.open(learned).run({"x": x})["y"]

    assert (y.argmax(1) == DATA[0]["t"]).mean() > 0.8
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in learned.to_proto().graph.initializer}
    assert all(np.array_equal(weights[name], made.state[name]) for name in ("w1", "b1", "w2", "b2"))
    assert amp_rewrite.convert(learned).report.text()


# -- on CUDA -----------------------------------------------------------------------------------------

ON_CUDA = """
from amp_rewrite.train.step.trainer import Trainer
from support.train.nets import batches, step

made = Trainer(step(policy="float32"))
buffer = made._stepper.buffer
held = [value for side in buffer.sides for value in side.values()]
places = {(value.data_ptr(), value.device_name()) for value in held}
print(made.where, len(made.fit(list(batches(4))).losses), made.evaluate(list(batches(2))).rows)
after = {(value.data_ptr(), value.device_name()) for value in held}
print(len(places) == len(held), {name for _, name in places}, places == after)
print({name: array.shape for name, array in made.state.items() if "/" not in name})
"""


@pytest.mark.stub
def test_on_cuda_the_state_stays_where_it_is(cuda_stub: Path) -> None:
    done = stub.on_cuda(cuda_stub, ON_CUDA)
    each = [
        "CUDAExecutionProvider 4 32",
        "True {'cuda'} True",
        "{'w1': (8, 16), 'b1': (16,), 'w2': (16, 4), 'b2': (4,), 'step': ()}",
    ]
    assert done.stdout.splitlines() == each, done.stderr


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
