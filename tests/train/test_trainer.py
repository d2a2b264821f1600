"""Training over data: epochs, skipped steps, evaluation, checkpoints that resume bit by bit, and the trained model."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import amp_rewrite
from amp_rewrite.errors import FeedError, TrainingError
from amp_rewrite.files.model import Model
from amp_rewrite.ort.runner import Runner
from amp_rewrite.train.loss_scale import Array, DynamicLossScale
from amp_rewrite.train.step import TrainingStep, training_step
from amp_rewrite.train.trainer import Trainer
from train.nets import batches, mlp

CROSS_ENTROPY = "cross_entropy(y, t)"
DATA = list(batches(12))


def step(**options: Any) -> TrainingStep:
    return training_step(mlp(), **{"loss": CROSS_ENTROPY, "optimizer": "adam,lr=0.01", **options})


def trainer(**options: Any) -> Trainer:
    return Trainer(step(**options), providers=("CPUExecutionProvider",), threads=1)


def same(a: Trainer, b: Trainer) -> bool:
    return a.state.keys() == b.state.keys() and all(np.array_equal(a.state[n], b.state[n]) for n in a.state)


def test_loss_falls_and_accuracy_rises_over_epochs() -> None:
    made = trainer()
    before = made.evaluate(DATA)
    history = made.fit(DATA, epochs=20)
    after = made.evaluate(DATA)

    assert (len(history.losses), len(history.metrics["accuracy"]), made.steps) == (240, 240, 240)
    assert (history.skipped, history.nonfinite) == (0, 0)
    assert before.rows == after.rows == 12 * 16
    assert after.loss < 0.3 < 1.2 < before.loss
    assert before.metrics["accuracy"] < 0.5 < 0.9 < after.metrics["accuracy"]


def test_on_the_cpu_a_low_step_is_emulated_and_says_so() -> None:
    assert trainer().where == "CPUExecutionProvider, float16 emulated: float32 kernels, rounded"
    assert trainer(policy="float32").where == "CPUExecutionProvider"
    as_it_is = Trainer(step(), providers=("CPUExecutionProvider",), emulated=False)
    assert as_it_is.where == "CPUExecutionProvider, float16 as the provider computes it"


def test_emulation_rounds_where_the_providers_own_kernels_do_not() -> None:
    rounded = trainer()
    plain = Trainer(step(), providers=("CPUExecutionProvider",), emulated=False, threads=1)
    for each in (rounded, plain):
        each.fit(DATA)

    assert not np.array_equal(rounded.state["w1"], plain.state["w1"])


def test_a_scale_that_grows_fast_overflows_float16_now_and_then_and_training_goes_on() -> None:
    fast = trainer(loss_scale=DynamicLossScale(2.0**15, 10))
    history = fast.fit(DATA, epochs=30)
    steady = trainer()
    steady.fit(DATA, epochs=30)

    assert history.skipped == history.nonfinite > 5
    assert fast.loss_scale is not None and fast.loss_scale < 2.0**26  # 36 doublings, had nothing overflowed
    assert fast.evaluate(DATA).loss == pytest.approx(steady.evaluate(DATA).loss, abs=0.05)


def test_a_mean_over_data_counts_rows_not_batches() -> None:
    made = trainer(policy="float32")
    rows = {name: np.concatenate([b[name] for b in DATA[:3]]) for name in ("x", "t")}
    uneven = [{name: a[:40] for name, a in rows.items()}, {name: a[40:] for name, a in rows.items()}]

    assert made.evaluate(uneven).loss == pytest.approx(made.evaluate([rows]).loss, rel=1e-6)


def test_a_step_in_training_mode_is_evaluated_with_running_statistics_and_without_dropout() -> None:
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
    before = {name: array.copy() for name, array in made.state.items()}
    made.evaluate(DATA)

    assert all(np.array_equal(before[name], made.state[name]) for name in before)


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


@pytest.mark.parametrize("scale", [8, None])
def test_with_a_fixed_scale_or_none_what_is_not_finite_is_applied_and_reported(scale: float | None) -> None:
    spoiled = [{"x": np.full((2, 8), np.inf, np.float32), "t": np.zeros(2, np.int64)}]
    made = trainer(loss_scale=scale)
    history = made.fit(spoiled)

    assert (history.skipped, history.nonfinite, made.steps, made.loss_scale) == (0, 1, 1, scale)


def test_with_micro_batches_steps_are_counted_not_runs() -> None:
    made = trainer(micro_batches=5)
    history = made.fit(DATA)
    assert (len(history.losses), made.steps, int(made.state["micro_batch"])) == (12, 2, 2)


def test_the_learning_rate_may_follow_the_steps() -> None:
    asked: list[int] = []

    def rate(steps: int) -> float:
        asked.append(steps)
        return 0.0 if steps < 3 else 0.01

    made = trainer()
    made.fit(DATA[:5], learning_rate=rate)
    still = trainer()
    still.fit(DATA[:3], learning_rate=0.0)

    assert asked == [0, 1, 2, 3, 4]
    assert np.array_equal(still.state["w1"], trainer().state["w1"])
    assert not np.array_equal(made.state["w1"], still.state["w1"])


@pytest.mark.parametrize("rate", [float("nan"), -0.1, "fast", None])
def test_a_learning_rate_that_would_spoil_the_parameters_is_refused(rate: Any) -> None:
    made = trainer()
    with pytest.raises(TrainingError) as error:
        made.fit(DATA, learning_rate=lambda steps: rate if steps == 2 else 0.1)
    assert str(error.value) == f"the learning rate of step 3 is {rate!r}; give a number of 0 or more"
    assert made.steps == 2


def test_progress_is_told_after_each_run() -> None:
    told: list[tuple[int, int]] = []
    trainer().fit(DATA[:3], epochs=2, progress=lambda done, total: told.append((done, total)))

    assert told == [(i, 6) for i in range(1, 7)]


def test_a_generator_function_is_read_anew_in_each_epoch() -> None:
    made = trainer()
    made.fit(lambda: batches(12), epochs=2)
    other = trainer()
    other.fit(DATA, epochs=2)

    assert same(made, other)


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


# -- checkpoints -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"micro_batches": 5}, {"policy": "float32"}, {"loss_scale": 8}])
def test_a_run_that_is_resumed_ends_with_the_same_bits(options: dict[str, Any], tmp_path: Path) -> None:
    straight = trainer(**options)
    straight.fit(DATA)

    first = trainer(**options)
    first.fit(DATA[:7])
    first.save(tmp_path / "a.npz")
    second = trainer(**options)
    second.load(tmp_path / "a.npz")
    second.fit(DATA[7:])

    assert same(straight, second)


def test_counts_of_skipped_steps_are_resumed(tmp_path: Path) -> None:
    made = trainer()
    made.fit([{"x": np.full((2, 8), np.inf, np.float32), "t": np.zeros(2, np.int64)}])
    made.save(tmp_path / "a.npz")
    again = trainer()
    again.load(tmp_path / "a.npz")

    assert (again.skipped, again.nonfinite, again.loss_scale) == (1, 1, 2.0**14)


def test_a_checkpoint_shows_what_is_in_it(tmp_path: Path) -> None:
    trainer(optimizer="sgd,momentum=0.9").save(tmp_path / "a.npz")
    slots = [f"{kind}/{name}{slot}" for name in ("w1", "b1", "w2", "b2") for kind, slot in _KINDS]

    assert np.load(tmp_path / "a.npz").files == [
        "amp_rewrite/version",
        "amp_rewrite/model",
        *slots,
        "step",
        "loss_scale",
        "good_steps",
        "count/skipped",
        "count/nonfinite",
    ]
    assert [file.name for file in tmp_path.iterdir()] == ["a.npz"]


_KINDS = (("parameter", ""), ("slot", "/momentum"))


@pytest.mark.parametrize(("saved", "loaded"), [(None, "dynamic"), ("dynamic", None), (8, "dynamic")])
def test_a_checkpoint_loads_with_and_without_loss_scaling(saved: Any, loaded: Any, tmp_path: Path) -> None:
    source = trainer(loss_scale=saved)
    source.fit(DATA[:3])
    source.save(tmp_path / "a.npz")
    target = trainer(loss_scale=loaded)
    target.load(tmp_path / "a.npz")

    assert all(np.array_equal(source.state[n], target.state[n]) for n in source.state.keys() & target.state.keys())
    assert target.loss_scale == (2.0**15 if loaded else None)
    assert target.steps == 3


def test_an_older_checkpoint_is_replaced_and_a_failed_write_leaves_it(tmp_path: Path, monkeypatch: Any) -> None:
    made = trainer()
    made.save(tmp_path / "a.npz")
    old = (tmp_path / "a.npz").read_bytes()
    made.fit(DATA[:1])

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full)
        with pytest.raises(TrainingError) as error:
            made.save(tmp_path / "a.npz")
    assert str(error.value) == f"cannot write a checkpoint to {tmp_path / 'a.npz'}: No space left on device"
    assert ([f.name for f in tmp_path.iterdir()], (tmp_path / "a.npz").read_bytes()) == (["a.npz"], old)

    made.save(tmp_path / "a.npz")
    assert (tmp_path / "a.npz").read_bytes() != old


def test_who_reads_a_checkpoint_while_it_is_replaced_reads_the_older_one_whole(tmp_path: Path) -> None:
    made = trainer()
    made.save(tmp_path / "a.npz")
    before = (tmp_path / "a.npz").read_bytes()
    made.fit(DATA[:1])
    with (tmp_path / "a.npz").open("rb") as reader:
        made.save(tmp_path / "a.npz")
        assert reader.read() == before
    assert (tmp_path / "a.npz").read_bytes() != before


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    trainer().save(tmp_path / "a.npz")
    other = mlp()
    other.graph.node[2].op_type = "Tanh"
    made = Trainer(training_step(other, loss=CROSS_ENTROPY, optimizer="adam"))
    with pytest.raises(TrainingError) as error:
        made.load(tmp_path / "a.npz")
    assert str(error.value) == (
        f"{tmp_path / 'a.npz'} is a checkpoint of another model: its ops or its weights' shapes differ"
    )


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        (
            {"optimizer": "sgd"},
            "holds 'slot/w1/m', and this step has no such state; it was saved with another optimizer: make the step"
            " with that one",
        ),
        (
            {"optimizer": "rmsprop"},
            "holds 'slot/w1/m', and this step has no such state; it was saved with another optimizer: make the step"
            " with that one",
        ),
        (
            {"freeze": ["w1"]},
            "holds 'parameter/w1', and this step has no such state; it was saved with other parameters trained: make"
            " the step with the same ones",
        ),
    ],
)
def test_a_checkpoint_of_another_step_is_refused(options: dict[str, Any], fact: str, tmp_path: Path) -> None:
    trainer().save(tmp_path / "a.npz")
    made = trainer(**options)
    before = dict(made.state)
    with pytest.raises(TrainingError) as error:
        made.load(tmp_path / "a.npz")
    assert str(error.value) == f"{tmp_path / 'a.npz'} {fact}"
    assert made.state == before


def test_a_checkpoint_that_lacks_something_is_refused(tmp_path: Path) -> None:
    trainer(optimizer="sgd").save(tmp_path / "a.npz")
    with pytest.raises(TrainingError) as error:
        trainer().load(tmp_path / "a.npz")
    assert str(error.value) == (
        f"{tmp_path / 'a.npz'} lacks 'slot/w1/m'; it was saved with another optimizer: make the step with that one"
    )


def _rewritten(path: Path, **changes: Array) -> None:
    arrays = dict(np.load(path))
    np.savez(path, **{**arrays, **changes})  # type: ignore[arg-type]


def test_a_checkpoint_of_another_version_or_shape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    trainer().save(path)
    _rewritten(path, **{"parameter/w1": np.zeros((8, 15), np.float32)})
    with pytest.raises(TrainingError) as error:
        trainer().load(path)
    assert str(error.value) == f"{path}: 'parameter/w1' is float32 [8, 15], and the step has float32 [8, 16]"

    _rewritten(path, **{"amp_rewrite/version": np.array(2)})
    with pytest.raises(TrainingError) as error:
        trainer().load(path)
    assert str(error.value) == f"{path} is a checkpoint of version 2; this package reads version 1"


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros(3))
    with pytest.raises(TrainingError) as error:
        trainer().load(tmp_path / "a.npz")
    assert str(error.value) == (
        f"{tmp_path / 'a.npz'} is no checkpoint of a training step; name one that Trainer.save wrote"
    )
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
        archive.writestr("step.npy", b"cos\nsystem\n")
    with pytest.raises(TrainingError):
        trainer().load(tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", **{"amp_rewrite/version": np.array([{}]), "amp_rewrite/model": np.zeros(1)})  # type: ignore[arg-type]
    with pytest.raises(FeedError, match="holds pickled Python objects, which are not read"):
        trainer().load(tmp_path / "c.npz")


def test_a_place_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as error:
        trainer().save(tmp_path / "a.bin")
    assert str(error.value) == f"cannot write a checkpoint to {tmp_path / 'a.bin'}: name a .npz file"
    with pytest.raises(TrainingError) as error:
        trainer().save(tmp_path / "none" / "a.npz")
    where = tmp_path / "none" / "a.npz"
    assert str(error.value) == f"cannot write a checkpoint to {where}: No such file or directory"


# -- data --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wrong", "at"), [(-1, 3), (4, 5)])
def test_a_target_that_names_no_class_is_refused_before_the_step(wrong: int, at: int) -> None:
    bad = {name: array.copy() for name, array in DATA[1].items()}
    bad["t"][at] = wrong
    made = trainer()
    with pytest.raises(TrainingError) as error:
        made.fit([DATA[0], bad])
    assert str(error.value) == (
        f"input 't' of batch 1 has class {wrong}, and the model knows 0 to 3; correct the targets"
    )
    assert made.steps == 1
    with pytest.raises(TrainingError):
        made.evaluate([bad])


def test_data_that_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(FeedError, match="batch 0 has nothing for input 't'"):
        trainer().fit([{"x": DATA[0]["x"]}])
    with pytest.raises(FeedError, match="batch 0 has 'w1', which is no input"):
        trainer().fit([{**DATA[0], "w1": DATA[0]["x"]}])


def test_a_model_in_a_file_is_trained_too(tmp_path: Path) -> None:
    onnx.save(mlp(), tmp_path / "net.onnx")
    made = Trainer(training_step(tmp_path / "net.onnx", loss=CROSS_ENTROPY, optimizer="adam,lr=0.01"), threads=1)
    made.fit(DATA[:2])
    other = trainer()
    other.fit(DATA[:2])

    assert same(made, other)
    made.export().save(tmp_path / "trained.onnx")
    assert Model.load(tmp_path / "trained.onnx").to_proto() == made.export().to_proto()
