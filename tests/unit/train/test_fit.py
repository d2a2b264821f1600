"""`fit` on arrays: batches, order, validation, callbacks, history, weights and predictions."""

import itertools
import json
from typing import Any

import numpy as np
import pytest

from amp_rewrite.errors import FeedError, TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.train.loss_scale import DynamicLossScale
from amp_rewrite.train.step.fitting import EarlyStopping
from amp_rewrite.train.step.trainer import Trainer
from amp_rewrite.train.update.optimizers import Adam
from support.train.nets import F32, batches, same, trainer


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
    few, many = r"^the targets 't' are missing; pass them after", r"^3 arrays for the inputs 'x', 't'; give a tuple"
    for wrong, words in ((data["x"], few), ((data["x"], data["t"], np.ones(100)), many)):
        with pytest.raises(FeedError, match=words):
            placed.fit(wrong)


def test_data_may_be_an_endless_generator_or_batches_that_change_from_epoch_to_epoch() -> None:
    seeds = iter(range(9))
    history = _trainer().fit(lambda: batches(2, seed=next(seeds)), epochs=3)
    expected = _trainer().fit([batch for seed in (1, 2, 3) for batch in batches(2, seed=seed)])
    assert history.losses == expected.losses  # the first pass is the look at the data
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


def test_counts_of_numpy_count() -> None:
    one, other = _trainer(), _trainer(micro_batches=np.int64(1), seed=np.int64(3), optimizer=Adam(np.float64(0.01)))
    assert (
        one.fit(_arrays(), epochs=2, batch_size=10, seed=0).losses
        == other.fit(_arrays(), epochs=np.int64(2), batch_size=np.int8(10), seed=np.int64(0)).losses
    )
    json.dumps(other.step.optimizer.get_config())


def test_an_epoch_of_some_steps_goes_on_where_the_one_before_ended() -> None:
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

    assert list(first) == [
        *("loss", "accuracy", "val_loss", "val_accuracy", "learning_rate", "skipped", "seconds"),
    ]
    held = {name: a[75:] for name, a in data.items()}
    assert first["val_loss"] == pytest.approx(made.evaluate(held, batch_size=7).loss, rel=1e-5)
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-5)  # another order, the same rows

    given = made.fit(data, validation_data=held, learning_rate=0.0).epochs[0]
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
def test_patience_counts_epochs_without_improvement_as_keras_does(patience: int, epochs: int) -> None:
    stopping = EarlyStopping("val_loss", patience)
    losses = [1.0, 0.5, 0.5, 0.6, 0.7, 0.8]
    stopping.begin()
    stops = [stopping.epoch_end(_trainer(), {"val_loss": loss}) for loss in losses]
    assert stops.index(True) + 1 == epochs


@pytest.mark.parametrize(
    ("monitor", "better"),
    [("loss", 0.1), ("val_loss", 0.1), ("accuracy", 0.9), ("val_accuracy", 0.9)],
)
def test_a_monitor_knows_by_the_name_what_is_better(monitor: str, better: float) -> None:
    stopping = EarlyStopping(monitor)
    stopping.begin()
    assert [stopping.epoch_end(_trainer(), {monitor: value}) for value in (0.5, better, 0.5)] == [False, False, True]


def test_a_function_of_an_epoch_is_a_callback_needs_no_list_and_stops_if_it_says_so() -> None:
    seen: list[tuple[int, Any]] = []

    def look(epoch: int, log: Any) -> bool:
        seen.append((epoch, log))
        return epoch == 1

    history = _trainer().fit(_arrays(), epochs=5, callbacks=look)
    assert seen == list(enumerate(history.epochs)) and len(seen) == 2


def test_inputs_and_targets_are_given_as_in_keras() -> None:
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


def test_each_call_draws_an_order_of_its_own_unless_it_has_a_seed() -> None:
    orders = [_trainer().fit(_arrays(), seed=seed).losses for seed in (None, None, 3, 3)]
    assert orders[0] != orders[1] and orders[2] == orders[3]


def _warned(made: Trainer, data: Any) -> str:
    with pytest.warns(UserWarning, match="first that of") as seen:
        history = made.fit(data, epochs=3)
    assert len(seen) == 1 and history.nonfinite == 3
    return str(seen[0].message)


def test_a_run_that_skips_all_steps_ends_with_one_warning() -> None:
    large = [{"x": np.full((2, 8), np.inf, F32), "t": np.array([0, 1])}]
    told = _warned(_trainer(loss_scale=DynamicLossScale(4.0)), large)
    assert told.startswith("all steps were skipped, because gradients are not finite: first that of 'b2' (shape [4])")
    assert "the loss scale is 1. Let it fall below 1 with loss_scale=DynamicLossScale(minimum=2**-14)" in told
    told = _warned(_trainer(loss_scale=None), large)
    assert told.startswith("weights are NaN, since steps with nonfinite gradients were applied: first that of 'b2'")


def test_predictions_of_all_rows_come_in_their_order() -> None:
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
        ({"w9": np.ones(3)}, "weight 'w9' of the step is not trained; pass what get_weights gives"),
        ({"b1": np.ones(3)}, r"weight 'b1' of the step has shape \(16,\), not \(3,\); pass what get_weights gives"),
        ([np.ones(3)], "weights of Trainer.set_weights is .*; pass a mapping"),
    ):
        with pytest.raises(TrainingError, match=message):
            second.set_weights(weights)  # type: ignore[arg-type]
