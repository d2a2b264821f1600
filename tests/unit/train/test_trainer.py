"""Training over data: arrays, batches, callbacks, skipped steps, rates, interrupts, evaluation, the trained model."""

import io
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import amp_rewrite
from amp_rewrite.errors import FeedError, ModelError, TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.runtime.buffers import BufferedRunner
from amp_rewrite.runtime.runner import Runner
from amp_rewrite.train.loss_scale import DynamicLossScale
from amp_rewrite.train.step.fitting import EarlyStopping
from amp_rewrite.train.step.step import training_step
from amp_rewrite.train.step.trainer import Trainer
from amp_rewrite.train.update.optimizers import Adam
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


def test_the_state_is_a_copy_and_a_low_step_on_the_cpu_warns_of_emulation() -> None:
    assert trainer().where == "CPUExecutionProvider, float16 emulated: float32 kernels, rounded"
    assert trainer(policy="float32").where == "CPUExecutionProvider"
    unemulated = Trainer(step(), **PLACE, emulated=False)
    assert unemulated.where == "CPUExecutionProvider, float16 as the provider computes it"
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


def test_the_progress_bar_is_only_drawn_on_a_terminal(monkeypatch: Any) -> None:
    plain, drawn = io.StringIO(), io.StringIO()
    monkeypatch.setattr(drawn, "isatty", lambda: True)
    for stream in (plain, drawn):
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        with amp_rewrite.progress_bar("digits") as bar:
            trainer().fit(DATA[:3], epochs=2, progress=bar)

    assert plain.getvalue() == ""
    assert "digits" in drawn.getvalue() and "100%" in drawn.getvalue()


def test_an_interrupt_within_a_step_keeps_the_previous_state(monkeypatch: Any) -> None:
    made = Trainer(step(micro_batches=2), **PLACE)
    made.fit(DATA[:3])
    before = (made.state, made.steps, made.skipped)
    real = BufferedRunner.run

    def interrupted(self: BufferedRunner, side: Any, feeds: Any) -> Any:
        results = real(self, side, feeds)
        if "applied" in results:  # all new state is written by now
            raise KeyboardInterrupt
        return results

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(BufferedRunner, "run", interrupted)
        made.fit(DATA[3:4])
    assert same(made.state, before[0]) and (made.steps, made.skipped) == before[1:]

    made.fit(DATA[3:])
    straight = Trainer(step(micro_batches=2), **PLACE)
    straight.fit(DATA)
    assert same(straight.state, made.state)


def test_a_failing_run_changes_nothing() -> None:
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


def test_the_exported_model_has_the_learned_weights_and_converts() -> None:
    made = trainer()
    made.fit(DATA, epochs=5)
    learned = made.export()
    x = DATA[0]["x"]
    y: Any = Runner.open(learned).run({"x": x})["y"]

    assert (y.argmax(1) == DATA[0]["t"]).mean() > 0.8
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in learned.to_proto().graph.initializer}
    assert all(np.array_equal(weights[name], made.state[name]) for name in ("w1", "b1", "w2", "b2"))
    assert amp_rewrite.convert(learned).report.text()


ON_CUDA = """
from amp_rewrite.train.step.trainer import Trainer
from support.train.nets import batches, step

made = Trainer(step(policy="float32"))
buffer = made._stepper.buffer
values = [value for side in buffer.sides for value in side.values()]
places = {(value.data_ptr(), value.device_name()) for value in values}
print(made.where, len(made.fit(list(batches(4))).losses), made.evaluate(list(batches(2))).rows)
after = {(value.data_ptr(), value.device_name()) for value in values}
print(len(places) == len(values), {name for _, name in places}, places == after)
print({name: array.shape for name, array in made.state.items() if "/" not in name})
"""


@pytest.mark.stub
def test_on_cuda_the_state_stays_on_the_device(cuda_stub: Path) -> None:
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


def test_evaluation_keeps_statistics_that_the_model_updates_itself() -> None:
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
def test_a_mean_over_data_covers_all_counted_targets(options: str) -> None:
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


def test_batches_are_weighted_by_counted_classes_of_the_models_own_loss() -> None:
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


def test_accuracy_accompanies_losses_of_classes_and_probabilities() -> None:
    made = trainer(policy="float32")
    scores = made.evaluate(DATA)
    y = np.concatenate([made.predict({"x": batch["x"]})["y"] for batch in DATA])
    assert scores.metrics == {"accuracy": np.mean(y.argmax(1) == np.concatenate([batch["t"] for batch in DATA]))}
    shares = [{**batch, "t": np.eye(4, dtype=np.float32)[batch["t"]]} for batch in DATA]
    for loss in ("categorical_cross_entropy", "kl_divergence"):
        assert trainer(loss=f"{loss}(y, t)", policy="float32").evaluate(shares).metrics == scores.metrics


@pytest.mark.parametrize(("text", "least"), [("y, t", 0.0), ("p, t", 0.5), ("p, t, from_logits=False", 0.5)])
def test_a_probability_of_a_half_is_a_yes(text: str, least: float) -> None:
    model = parsed(
        "net (float[N,3] x) => (float[N,2] y, float[N,2] p) <float[3,2] w = {1,-2,3,1,-1,2}>"
        " { y = MatMul (x, w) p = Sigmoid (y) }"
    )
    x, t = np.random.default_rng(0).normal(size=(40, 3)), np.eye(2, dtype=np.float32)[[0, 1] * 20]
    batch = {"x": x.astype(np.float32), "t": t}
    made = Trainer(training_step(model, loss=f"binary_cross_entropy({text})", policy="float32"), **PLACE)
    right = (made.predict({"x": batch["x"]})[text[0]].numpy() >= least) == batch["t"]

    assert made.evaluate([batch]).metrics["accuracy"] == pytest.approx(np.mean(right))


def _arrays(rows: int = 100) -> dict[str, Array]:
    (batch,) = batches(1, rows=rows)
    return batch


def _trainer(**options: Any) -> Trainer:
    return trainer(policy="float32", **options)


def test_a_mapping_of_arrays_is_cut_into_batches_of_32_rows() -> None:
    history = _trainer().fit(_arrays(), epochs=2)
    assert len(history.losses) == 2 * 4
    assert len(_trainer().fit(_arrays(), batch_size=50).losses) == 2


def test_a_tuple_of_arrays_is_a_mapping_in_the_order_of_the_step() -> None:
    data = _arrays()
    named, placed = _trainer(), _trainer()
    assert named.fit(data, batch_size=10, seed=0).losses == placed.fit((data["x"], data["t"]), None, 10, seed=0).losses
    assert named.evaluate(data) == placed.evaluate((data["x"], data["t"]))
    for given in (data["x"], (data["x"],), (data["x"], data["t"])):
        assert (placed.predict(given, batch_size=7)["y"] == named.predict({"x": data["x"]}, batch_size=7)["y"]).all()
    few, many = (
        r"^the targets 't' are missing; pass them after",
        r"^the data is 3 arrays, but the inputs are 'x', 't'",
    )
    for wrong, words in ((data["x"], few), ((data["x"], data["t"], np.ones(100)), many)):
        with pytest.raises(FeedError, match=words):
            placed.fit(wrong)


def test_data_may_be_endless_or_differ_between_epochs() -> None:
    seeds = iter(range(9))
    history = _trainer().fit(lambda: batches(2, seed=next(seeds)), epochs=3)
    expected = _trainer().fit([batch for seed in (1, 2, 3) for batch in batches(2, seed=seed)])
    assert history.losses == expected.losses  # the first pass only inspects the data
    data = _arrays(16)
    endless = (data for _ in itertools.count())
    once = iter([data])
    history = _trainer().fit(endless, epochs=3, steps_per_epoch=2, validation_data=once)
    assert len(history.losses) == 6 and all("val_loss" in epoch for epoch in history.epochs)


@pytest.mark.torch
def test_a_loader_that_shuffles_trains_and_evaluates() -> None:
    torch = pytest.importorskip("torch")
    data = _arrays(48)
    rows = torch.utils.data.TensorDataset(*map(torch.from_numpy, data.values()))
    loader = torch.utils.data.DataLoader(rows, batch_size=16, shuffle=True)
    trained = _trainer()
    assert len(trained.fit(loader, epochs=3, validation_data=loader).losses) == 9
    assert trained.evaluate(loader).loss == pytest.approx(trained.evaluate(data).loss, rel=1e-6)


def test_numpy_integers_are_accepted_as_counts() -> None:
    one, other = _trainer(), _trainer(micro_batches=np.int64(1), seed=np.int64(3), optimizer=Adam(np.float64(0.01)))
    assert (
        one.fit(_arrays(), epochs=2, batch_size=10, seed=0).losses
        == other.fit(_arrays(), epochs=np.int64(2), batch_size=np.int8(10), seed=np.int64(0)).losses
    )
    json.dumps(other.step.optimizer.get_config())


def test_an_epoch_of_a_few_steps_continues_after_the_previous_one() -> None:
    data = _arrays(103)
    whole, parts, resumed = _trainer(), _trainer(), _trainer()
    expected = whole.fit(data, epochs=4, batch_size=32, seed=0)
    seen: list[tuple[int, int]] = []
    history = parts.fit(
        data, None, 32, 5, seed=0, steps_per_epoch=3, progress=lambda done, total: seen.append((done, total))
    )
    assert history.losses == expected.losses[:15] and len(history.epochs) == 5
    assert seen[-1] == (15, 15)
    resumed.fit(data, epochs=2, batch_size=32, steps_per_epoch=3, seed=0)
    resumed.fit(data, epochs=3, batch_size=32, steps_per_epoch=3, first_epoch=2, seed=0)
    assert same(resumed.state, parts.state)


def test_an_epoch_records_means_validation_rate_and_time() -> None:
    made, data = _trainer(), _arrays()
    history = made.fit(data, epochs=2, learning_rate=0.0, validation_split=0.25, batch_size=10)
    first, second = history.epochs

    assert list(first) == [*("loss", "accuracy", "val_loss", "val_accuracy", "learning_rate", "skipped", "seconds")]
    last_rows = {name: a[75:] for name, a in data.items()}
    assert first["val_loss"] == pytest.approx(made.evaluate(last_rows, batch_size=7).loss, rel=1e-5)
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-5)  # another order, the same rows

    given = made.fit(data, validation_data=last_rows, learning_rate=0.0).epochs[0]
    assert given["val_loss"] == pytest.approx(first["val_loss"], rel=1e-5)


def test_early_stopping_ends_with_the_best_state() -> None:
    data = _arrays()
    rates = iter([0.01, 0.01, 10.0, 10.0, 10.0])
    made, now = _trainer(), [0.0]
    best: dict[str, Array] = {}

    def following(epoch: int, log: Any) -> None:
        if epoch == 1:
            best.update(made.state)
        now[0] = next(rates)

    now[0] = next(rates)
    stopping = EarlyStopping("val_loss", patience=2, restore_best_weights=True)
    options: dict[str, Any] = {"validation_split": 0.25, "callbacks": [following, stopping], "batch_size": 75}
    history = made.fit(data, epochs=9, learning_rate=lambda step: now[0], **options)

    assert len(history.epochs) == 4
    assert same(made.state, best) and made.steps == 2


@pytest.mark.parametrize(("patience", "epochs"), [(0, 3), (1, 3), (2, 4), (3, 5)])
def test_patience_counts_epochs_without_improvement_as_in_keras(patience: int, epochs: int) -> None:
    stopping = EarlyStopping("val_loss", patience)
    losses = [1.0, 0.5, 0.5, 0.6, 0.7, 0.8]
    stopping.begin()
    stops = [stopping.epoch_end(_trainer(), {"val_loss": loss}) for loss in losses]
    assert stops.index(True) + 1 == epochs


@pytest.mark.parametrize(
    ("monitor", "better"), [("loss", 0.1), ("val_loss", 0.1), ("accuracy", 0.9), ("val_accuracy", 0.9)]
)
def test_a_monitor_infers_from_its_name_what_is_better(monitor: str, better: float) -> None:
    stopping = EarlyStopping(monitor)
    stopping.begin()
    assert [stopping.epoch_end(_trainer(), {monitor: value}) for value in (0.5, better, 0.5)] == [False, False, True]


def test_a_function_may_be_the_only_callback_and_can_stop_the_run() -> None:
    seen: list[tuple[int, Any]] = []

    def look(epoch: int, log: Any) -> bool:
        seen.append((epoch, log))
        return epoch == 1

    history = _trainer().fit(_arrays(), epochs=5, callbacks=look)
    assert seen == list(enumerate(history.epochs)) and len(seen) == 2


def test_inputs_and_targets_are_passed_as_in_keras() -> None:
    data = _arrays()
    expected = _trainer().fit(data, epochs=2, batch_size=25, seed=1)
    for x, y in ((data["x"], data["t"]), ({"x": data["x"]}, data["t"]), ((data["x"],), {"t": data["t"]})):
        made = _trainer()
        history = made.fit(x, y, batch_size=25, epochs=2, verbose=2, seed=1, validation_data=(data["x"], data["t"]))
        assert history.losses == expected.losses
        loss, accuracy = made.evaluate(x, y, verbose=0)
        assert history.history["val_loss"][-1] == pytest.approx(loss) and accuracy == made.evaluate(data)[1]
    assert list(history.history) == list(history.epochs[0])
    labels = data["t"].astype(F32)
    assert _trainer().fit(data["x"], labels, batch_size=25, epochs=2, seed=1).losses == expected.losses


def test_each_call_shuffles_differently_unless_it_has_a_seed() -> None:
    orders = [_trainer().fit(_arrays(), seed=seed).losses for seed in (None, None, 3, 3)]
    assert orders[0] != orders[1] and orders[2] == orders[3]


def _warned(made: Trainer, data: Any) -> str:
    with pytest.warns(UserWarning, match="the first is 'b2'") as seen:
        history = made.fit(data, epochs=3)
    assert len(seen) == 1 and history.nonfinite == 3
    return str(seen[0].message)


def test_a_run_that_skips_all_steps_ends_with_one_warning() -> None:
    large = [{"x": np.full((2, 8), np.inf, F32), "t": np.array([0, 1])}]
    warning = _warned(_trainer(loss_scale=DynamicLossScale(4.0)), large)
    assert warning.startswith(
        "all steps were skipped, because gradients were not finite; the first is 'b2' (shape [4])"
    )
    assert "the loss scale is 1. Allow a scale below 1 with loss_scale=DynamicLossScale(minimum=2**-14)" in warning
    warning = _warned(_trainer(loss_scale=None), large)
    assert warning.startswith("weights are NaN, because nonfinite gradients were applied; the first is 'b2'")


def test_predictions_of_all_rows_are_in_their_order() -> None:
    made, data = _trainer(), _arrays()
    made.fit(data, epochs=3)
    whole = made.predict({"x": data["x"]}, batch_size=7)["y"]
    assert whole.shape == (100, 4)
    np.testing.assert_allclose(whole[:16], made.predict([{"x": data["x"][:16]}])["y"], rtol=1e-5, atol=1e-6)
    assert (whole.argmax(1) == data["t"]).mean() == pytest.approx(made.evaluate(data).metrics["accuracy"])


def test_weights_are_read_and_set_by_name() -> None:
    first, second = _trainer(), _trainer()
    first.fit(_arrays())
    second.set_weights(first.get_weights())
    assert all((first.state[name] == second.state[name]).all() for name in ("w1", "b1", "w2", "b2"))
    assert second.steps == 0
    for weights, message in (
        ({"w9": np.ones(3)}, "weight 'w9' of the step is not trained; pass the result of get_weights"),
        ({"b1": np.ones(3)}, r"weight 'b1' of the step has shape \(16,\), not \(3,\); pass the result of get_weights"),
        ([np.ones(3)], "weights of Trainer.set_weights must be a mapping"),
    ):
        with pytest.raises(TrainingError, match=message):
            second.set_weights(weights)  # type: ignore[arg-type]
