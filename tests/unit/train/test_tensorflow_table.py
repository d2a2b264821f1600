"""TensorFlow's mixed-precision API as documented: each test covers one line of it.

`docs/reference/tensorflow.md` lists all lines, with the tests elsewhere that cover the others.
"""

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx.helper
import onnx.parser
import pytest

from amp_rewrite.deploy.session import Session
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import PolicyError, TrainingError
from amp_rewrite.files.model import Model
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.runner import Runner
from amp_rewrite.settings.op_lists import load_lists
from amp_rewrite.train.keras.loss_scale_optimizer import (
    LossScaleOptimizer,
    disable_mixed_precision_graph_rewrite,
    enable_mixed_precision_graph_rewrite,
)
from amp_rewrite.train.keras.metrics import Metrics
from amp_rewrite.train.keras.network import GradientTape, Losses, Network
from amp_rewrite.train.keras.optimizer import StatefulOptimizer
from amp_rewrite.train.keras.variables import Variable
from amp_rewrite.train.loss_scale import DynamicLossScale, FixedLossScale, LossScale
from amp_rewrite.train.policy import Policy, policy_scope, set_policy
from amp_rewrite.train.replicas import SingleReplica, strategy_supports_loss_scaling
from amp_rewrite.train.step.model_loss import ModelLoss
from amp_rewrite.train.step.step import training_step
from amp_rewrite.train.step.trainer import Trainer
from amp_rewrite.train.update.optimizer import Optimizer
from amp_rewrite.train.update.optimizers import SGD, Adam, RMSprop
from support.train.nets import CROSS_ENTROPY, F32, PLACE, batches, fresh_process, mlp, parsed, square

__all__ = ["fresh_process"]
pytestmark = pytest.mark.usefixtures("fresh_process")


@pytest.mark.parametrize(
    ("given", "scale"),
    [
        ((), DynamicLossScale()),
        (("dynamic",), DynamicLossScale()),
        ((128,), FixedLossScale(128.0)),
        ((DynamicLossScale(4.0),), DynamicLossScale(4.0)),
    ],
)
def test_enabling_accepts_dynamic_a_number_or_a_loss_scale(given: tuple[Any, ...], scale: LossScale) -> None:
    opt = enable_mixed_precision_graph_rewrite(SGD(0.5), *given)
    assert isinstance(opt, LossScaleOptimizer) and opt.loss_scale == scale
    assert not isinstance(given[-1] if given else None, LossScale) or opt.loss_scale is given[-1]


@pytest.mark.filterwarnings("ignore:a GPU")
def test_only_open_sessions_do_not_count_as_opened_before(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(mlp(), providers=["CPUExecutionProvider"])
    closed = Session(mlp(), providers=["CPUExecutionProvider"])
    del closed
    with pytest.warns(UserWarning, match="^2 sessions were opened before"):
        enable_mixed_precision_graph_rewrite()
    later = Session(mlp(), providers=["CPUExecutionProvider"], ignore_performance=True)
    disable_mixed_precision_graph_rewrite()
    last = Session(mlp(), providers=["CPUExecutionProvider"])
    assert (session.converted, later.converted, last.converted) == (False, True, False)


@pytest.mark.parametrize("to", [DType.FLOAT16, DType.BFLOAT16])
def test_softmax_is_gray_and_stays_float32_between_logits_and_loss(to: DType) -> None:
    assert load_lists(to).classify("", "Softmax", {}, 2).color.value == "gray"
    ended = mlp()
    ended.graph.node.append(onnx.helper.make_node("Softmax", ["y"], ["p"], name="end", axis=-1))
    ended.graph.output[0].name = "p"
    loss = ModelLoss.of(ended, "mean_squared_error(p, t)", policy=f"mixed_{to.spelling}")
    dtypes = {row.name: row.dtype for row in loss.report.rows}
    assert (dtypes["end"], dtypes["first"], dtypes["second"]) == ("float32", to.spelling, to.spelling)
    assert loss.predict({"x": np.ones((2, 8), F32)})["p"].dtype == F32


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        ("cross_entropy(y, t)", lambda t: t),
        ("categorical_cross_entropy(y, t)", lambda t: np.eye(4, dtype=F32)[t]),
        ("mean_squared_error(y, t)", lambda t: np.eye(4, dtype=F32)[t]),
    ],
)
def test_fit_after_the_rewrite_learns_with_each_loss_of_keras(loss: str, targets: Any) -> None:
    (data,) = batches(1, rows=256)
    rows = {"x": data["x"], "t": targets(data["t"])}
    step = training_step(mlp(), loss=loss, optimizer=Adam(0.02), policy="mixed_float16")
    history = Trainer(step, **PLACE).fit(rows, epochs=6)
    assert history.epochs[-1]["loss"] < 0.7 * history.epochs[0]["loss"] and history.skipped <= 1
    assert ("accuracy" in history.epochs[0]) == ("cross_entropy" in loss)


@pytest.mark.parametrize("clip", ["clipnorm", "clipvalue", "global_clipnorm"])
def test_inner_clipping_is_refused_and_the_scale_is_read_only(clip: str) -> None:
    with pytest.raises(ValueError, match=f"this one sets {clip}"):
        LossScaleOptimizer(SGD(**{clip: 1.0}), 2)
    opt = LossScaleOptimizer(SGD(), 2)
    with pytest.raises(AttributeError):
        opt.loss_scale = FixedLossScale(4)
    assert opt.loss_scale == FixedLossScale(2)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_a_scaled_loss_keeps_its_type_and_overflows_in_it(kind: Any) -> None:
    opt = LossScaleOptimizer(SGD(), 2.0**17)
    for given in (opt.get_scaled_loss(kind(2)), opt.get_scaled_loss(lambda: kind(2))()):
        assert given.dtype == kind
        assert given == (np.inf if kind is np.float16 else 2.0**18)


def test_get_gradients_are_unscaled_although_the_loss_is_scaled() -> None:
    seeds: list[float] = []

    class Slope:
        def __call__(self) -> Any:
            return F32(1)

        def gradients(self, variables: Any, seed: Any) -> Any:
            seeds.append(float(seed))
            return [np.full(v.shape, 3, F32) * seed for v in variables]

    v, opt = Variable([1.0, 2.0], "v"), LossScaleOptimizer(SGD(), 64)
    (gradient,) = opt.get_gradients(Slope(), v)
    assert (np.asarray(gradient).tolist(), seeds) == ([3, 3], [64.0])
    opt.inner.get_gradients(Slope(), [v])
    assert seeds == [64.0, 1.0] and opt.iterations == 0


@pytest.mark.parametrize("key", ["optimizer/iter/.ATTRIBUTES/VARIABLE_VALUE", "optimizer/loss_scale/good_steps"])
def test_checkpoint_keys_of_tensorflow_are_refused_without_any_change(key: str) -> None:
    opt = LossScaleOptimizer(SGD(1.0, momentum=0.5), "dynamic")
    opt.apply_gradients([(np.ones(1), Variable([1.0]))])
    before = opt.checkpoint()
    with pytest.raises(TrainingError, match=r"^the checkpoint "):
        opt.restore({"step": np.array(3), key: np.array(1)})
    assert opt.checkpoint() == before


@pytest.mark.parametrize("make", [lambda v: v, lambda v: [v], lambda v: (v,), lambda v: lambda: [v]])
@pytest.mark.parametrize("wrapped", [False, True])
def test_minimize_accepts_one_variable_several_or_a_function(make: Any, wrapped: bool) -> None:
    loss = square()
    (v,) = loss.variables
    opt = LossScaleOptimizer(SGD(0.25), "dynamic") if wrapped else StatefulOptimizer(SGD(0.25))
    opt.minimize(loss, var_list=make(v), name="step")
    assert (v.numpy(), opt.iterations) == (0.5, 1)


def test_grad_loss_multiplies_the_gradients() -> None:
    loss = square()
    (v,) = loss.variables
    opt = LossScaleOptimizer(SGD(0.25), 8)
    opt.minimize(loss, v, grad_loss=np.float32(2))
    assert v.numpy() == 0.0
    with pytest.raises(TrainingError, match=r"grad_loss has shape \(2,\), but the loss is one number"):
        opt.minimize(loss, v, grad_loss=np.ones(2))


def test_compute_gradients_and_get_updates_split_minimize() -> None:
    loss = square(3.0)
    (v,) = loss.variables
    opt = LossScaleOptimizer(SGD(0.25), 1024)
    ((gradient, variable),) = pairs = opt.compute_gradients(loss, v)
    assert gradient == 6.0 and variable is v
    opt.apply_gradients(pairs, name="apply", experimental_aggregate_gradients=False)
    assert v.numpy() == 1.5
    loss = square()
    (v,) = loss.variables
    (update,) = LossScaleOptimizer(SGD(0.25), 8).get_updates(loss, [v])
    assert v.numpy() == 1.0
    update()
    assert v.numpy() == 0.5


@pytest.mark.parametrize(
    ("initializer", "expected"),
    [("zeros", 0), ("ones", 1), (3, 3), (np.full(2, 4), 4), (lambda shape: np.full(shape, 5.0), 5)],
)
def test_add_slot_creates_a_slot_used_by_steps_and_checkpoints(initializer: Any, expected: float) -> None:
    var, opt = Variable([1.0, 2.0], "v"), LossScaleOptimizer(SGD(1.0, momentum=0.5), 2)
    assert opt.add_slot(var, "mean", initializer).tolist() == [expected] * 2
    opt.apply_gradients([(np.ones(2), var)])
    opt.set_slot(var, "mean", [7, 8])
    assert opt.add_slot(var, "mean").tolist() == [7, 8]
    assert opt.get_slot_names() == ["mean", "momentum"]

    other = LossScaleOptimizer(SGD(1.0, momentum=0.5), 2)
    other.add_slot(var, "mean")
    other.restore(opt.checkpoint())
    assert other.get_slot(var, "mean").tolist() == [7, 8]


class _Half(Optimizer):
    """Gradient descent at half the rate."""

    learning_rate: float = 0.1

    def __init__(self, learning_rate: float = 0.1) -> None:
        super().__init__(learning_rate=learning_rate)

    def rule(self, by: Any, variable: Any, gradient: Any, slots: Any, rate: Any, step: Any) -> Any:
        return variable - rate * gradient * np.float32(0.5), {}

    def get_config(self) -> dict[str, Any]:
        return {"learning_rate": self.learning_rate}


class _Averaging(StatefulOptimizer):
    """An optimizer with the mean of a variable in a slot."""

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **words: Any) -> None:
        pairs = list(grads_and_vars)
        super().apply_gradients(pairs)
        for _, var in pairs:
            before = self.add_slot(var, "mean", var.numpy())
            self.set_slot(var, "mean", 0.5 * before + 0.5 * var.numpy())


class _Halving(LossScale):
    """A scale that halves in each step."""

    def __init__(self, start: float = 1024.0) -> None:
        self.start = self.now = start

    def __call__(self) -> Any:
        return np.array(self.now, np.float32)

    def update(self, grads: object) -> tuple[None, bool]:
        self.now /= 2
        return None, True

    def get_config(self) -> dict[str, Any]:
        return {"start": self.start}


def test_custom_optimizers_and_scales_train_and_serialize() -> None:
    loss = square()
    (v,) = loss.variables
    opt = LossScaleOptimizer(_Half(0.5), _Halving(64))
    opt.minimize(loss, v)
    assert (v.numpy(), float(opt.loss_scale())) == (0.5, 32.0)

    config = opt.get_config()
    assert config == {
        "optimizer": {"class_name": "_Half", "config": {"learning_rate": 0.5}},
        "loss_scale": {"class_name": "_Halving", "config": {"start": 64}},
    }
    again = LossScaleOptimizer.from_config(config, custom_objects={"_Half": _Half, "_Halving": _Halving})
    assert (again.get_config(), type(again.inner.rule), type(again.loss_scale)) == (config, _Half, _Halving)
    with pytest.raises(TrainingError, match="pass your own classes in custom_objects"):
        LossScaleOptimizer.from_config(config)


def test_custom_optimizers_are_wrapped_serialized_and_run_in_the_graph() -> None:
    loss = square()
    (v,) = loss.variables
    opt = LossScaleOptimizer(_Averaging(SGD(0.25)), 8)
    opt.minimize(loss, v)
    assert opt.get_slot(v, "mean") == 0.5
    again = LossScaleOptimizer.from_config(opt.get_config(), custom_objects={"_Averaging": _Averaging})
    assert type(again.inner) is _Averaging and again.learning_rate == 0.25
    step = training_step(mlp(), loss=CROSS_ENTROPY, optimizer=_Half(0.2), policy="float32")
    plain = training_step(mlp(), loss=CROSS_ENTROPY, optimizer=SGD(0.1), policy="float32")
    ours, theirs = (Trainer(s, **PLACE).fit(list(batches(3))).losses for s in (step, plain))
    assert ours == pytest.approx(theirs, rel=1e-6)
    with pytest.raises(TrainingError, match="_Halving is a custom loss scale, but a training step computes"):
        training_step(mlp(), loss=CROSS_ENTROPY, loss_scale=_Halving())


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        (
            "Adam",
            {"learning_rate": 0.5, "decay": 0.0, "beta_1": 0.8, "beta_2": 0.99, "epsilon": 1e-7, "amsgrad": False},
            Adam(0.5, beta_1=0.8, beta_2=0.99),
        ),
        ("RMSprop", {"lr": 0.5, "decay": 0.0, "rho": 0.9, "momentum": 0.0, "centered": False}, RMSprop(0.5)),
        ("SGD", {"learning_rate": 0.5, "decay": 0.0, "momentum": 0.5, "nesterov": True}, SGD(0.5, 0.5, nesterov=True)),
    ],
)
def test_configurations_written_by_keras_load(name: str, config: dict[str, Any], expected: Optimizer) -> None:
    inner = {"class_name": name, "config": {"name": name, **config}}
    scale = {"initial_loss_scale": 8.0, "increment_period": 7, "multiplier": 2.0}
    first = {"optimizer": inner, "loss_scale": {"class_name": "DynamicLossScale", "config": scale}}
    later = {"inner_optimizer": inner, "dynamic": True, "initial_scale": 8.0, "dynamic_growth_steps": 7}
    for written in (first, later):
        opt = LossScaleOptimizer.from_config(written)
        assert (opt.inner.rule, opt.loss_scale) == (expected, DynamicLossScale(8.0, 7))
    with pytest.raises(TrainingError, match=f"^{name} does not take 'decay'; it takes learning_rate, "):
        LossScaleOptimizer.from_config({**first, "optimizer": {"class_name": name, "config": {"decay": 0.1}}})


def test_optimizers_scales_policies_and_variables_can_be_copied_and_pickled() -> None:
    opt, v = LossScaleOptimizer(Adam(0.1), DynamicLossScale(4.0, 1)), Variable([1.0, 2.0], "v")
    opt.apply_gradients([(np.ones(2), v)])
    policy = Policy("mixed_float16", loss_scale=FixedLossScale(2.0))
    for copied in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        again, value, other = copied((opt, v, policy))
        assert (again.iterations, again.loss_scale(), again.get_config()) == (1, 8.0, opt.get_config())
        assert (again.get_slot(v, "m") == opt.get_slot(v, "m")).all() and (value.numpy() == v.numpy()).all()
        again.apply_gradients([(np.ones(2), value)])
        assert (opt.iterations, again.iterations, other) == (1, 2, policy)
        assert copied(policy.compute_dtype) == "float16"
    with pytest.raises(TrainingError, match="two variables are named 'v'; give each a unique name"):
        opt.apply_gradients([(np.ones(2), Variable([1.0, 2.0], "v"))])


def test_a_variable_is_a_numpy_array_that_can_be_changed_in_place() -> None:
    v = Variable([1.0, 2.0], "v")
    v.assign_add([1.0, 1.0])
    v.assign_sub(np.ones(2) * 0.5)
    assert (np.asarray(v).tolist(), np.sum(v), v.dtype, float(Variable(3.0))) == ([1.5, 2.5], 4.0, "float32", 3.0)
    np.asarray(v)[:] = 0
    assert v.numpy().tolist() == [1.5, 2.5]


def test_a_strategy_with_all_variables_per_replica_supports_loss_scaling() -> None:
    for supported, strategies in (
        (True, (None, SingleReplica(), "MirroredStrategy", "OneDeviceStrategy", "CollectiveAllReduceStrategy")),
        (False, ("TPUStrategy", "ParameterServerStrategy", "CentralStorageStrategy", 3)),
    ):
        assert all(strategy_supports_loss_scaling(strategy) is supported for strategy in strategies)


def test_a_policy_has_types_as_strings_and_keeps_its_loss_scale_object() -> None:
    policy = Policy("mixed_float16")
    assert (policy.compute_dtype, policy.variable_dtype) == ("float16", "float32")
    assert isinstance(Policy("mixed_float16").loss_scale, DynamicLossScale)
    assert isinstance(Policy("mixed_float16", loss_scale=1024).loss_scale, FixedLossScale)
    assert Policy("mixed_float16", loss_scale=1024).loss_scale() == 1024
    assert Policy("float32").loss_scale is None
    scale = DynamicLossScale(4.0, increment_period=3)
    policy = Policy("mixed_float16", loss_scale=scale)
    assert policy.loss_scale is scale
    assert Policy.from_config(policy.get_config()) == policy != Policy("mixed_float16")
    assert len({policy, Policy("mixed_float16", loss_scale=DynamicLossScale(4.0, 3))}) == 1
    step = training_step(mlp(), loss=CROSS_ENTROPY, policy=policy)
    assert step.loss_scale is scale and Trainer(step, **PLACE).loss_scale == 4.0
    with pytest.raises(PolicyError, match="loss scale must be a number from 1"):
        Policy("mixed_float16", loss_scale=0.5)


def test_the_policy_and_the_rewrite_reach_losses() -> None:
    def compute(loss: ModelLoss) -> str:
        return "float32" if loss.report.conversion is None else str(loss.report.conversion.model.to)

    assert compute(ModelLoss.of(mlp(), CROSS_ENTROPY)) == "float32"
    with policy_scope("mixed_bfloat16"):
        assert compute(ModelLoss.of(mlp(), CROSS_ENTROPY)) == "bfloat16"
    enable_mixed_precision_graph_rewrite()
    assert compute(ModelLoss.of(mlp(), CROSS_ENTROPY)) == "float16"
    disable_mixed_precision_graph_rewrite()
    assert compute(ModelLoss.of(mlp(), CROSS_ENTROPY)) == "float32"
    set_policy("mixed_float16")
    assert compute(ModelLoss.of(mlp(), CROSS_ENTROPY, policy="float32")) == "float32"


@pytest.mark.parametrize(
    "make", [ModelLoss.of, lambda model, loss, **options: training_step(model, loss=loss, **options)]
)
def test_single_layers_stay_float32_on_request(make: Any) -> None:
    report = make(mlp(), CROSS_ENTROPY, policy="mixed_float16", keep=["second"]).report
    assert {row.name: row.dtype for row in report.rows if row.name in ("first", "second")} == {
        "first": "float16",
        "second": "float32",
    }


def test_the_guides_train_step_and_test_step_run_verbatim() -> None:
    model = Network(mlp(), policy="mixed_float16")
    optimizer = LossScaleOptimizer(Adam(0.01), "dynamic")
    loss_object = Losses.SparseCategoricalCrossentropy(from_logits=True)

    def train_step(x: Any, y: Any) -> Any:
        with GradientTape() as tape:
            predictions = model(x)
            loss = loss_object(y, predictions)
            scaled_loss = optimizer.get_scaled_loss(loss)
        scaled_gradients = tape.gradient(scaled_loss, model.trainable_variables)
        gradients = optimizer.get_unscaled_gradients(scaled_gradients)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def test_step(x: Any) -> Any:
        return model(x, training=False)

    data = list(batches(8))
    losses = [float(train_step(batch["x"], batch["t"])) for batch in data]
    trainer = Trainer(training_step(mlp(), loss=CROSS_ENTROPY, optimizer=Adam(0.01)), **PLACE)
    assert losses == list(trainer.fit(data).losses)

    predictions = np.asarray(test_step(data[0]["x"]))
    assert (predictions.argmax(1) == data[0]["t"]).mean() > 0.2
    exported = {t.name: t.raw_data for t in model.export().proto.graph.initializer}
    assert exported == {t.name: t.raw_data for t in trainer.export().proto.graph.initializer}


def test_values_use_the_weights_at_the_call() -> None:
    model, (batch,) = Network(mlp(), policy="float32"), batches(1)
    start = [v.numpy() for v in model.trainable_variables]
    first = model(batch["x"])
    loss = Losses.SparseCategoricalCrossentropy(from_logits=True)(batch["t"], first)
    optimizer, again = StatefulOptimizer(SGD(1.0)), Network(mlp(), policy="float32")
    before = GradientTape().gradient(loss, model.trainable_variables)
    optimizer.minimize(loss)
    assert (first.numpy() == again(batch["x"]).numpy()).all() and (model(batch["x"]).numpy() != first).any()
    assert float(loss) == float(Losses.SparseCategoricalCrossentropy(from_logits=True)(batch["t"], again(batch["x"])))
    after = GradientTape().gradient(loss, model.trainable_variables)
    assert all((np.asarray(a) == b).all() for a, b in zip(before, after, strict=True))
    assert any((v.numpy() != s).any() for v, s in zip(model.trainable_variables, start, strict=True))


def test_predictions_are_arrays_and_losses_add_up_as_numbers() -> None:
    predictions = Network(mlp(), policy="float32")(np.ones((3, 8), F32))
    numbers = predictions.numpy()
    assert predictions.shape == (3, 4) == np.asarray(predictions).shape and predictions.dtype == "float32"
    assert (predictions[0] == numbers[0]).all() and ((2 * predictions - numbers) == numbers).all()
    assert (predictions.argmax(1) == np.argmax(predictions, 1)).all() and len(predictions) == 3
    assert (predictions["y"] == numbers).all() and [*predictions][2].shape == (4,)
    loss, total = square(3.0), 0.0
    for _ in range(2):
        total += loss
    assert total == 18 == loss + loss and loss > 8
    with pytest.raises(TrainingError, match="has no gradients; use a ModelLoss"):
        GradientTape().gradient(loss + loss, loss.variables)


def test_minimize_needs_no_list_of_variables_and_counts_a_global_step() -> None:
    loss, steps = square(), Variable(0, "global_step")
    optimizer = LossScaleOptimizer(SGD(0.25), "dynamic")
    optimizer.minimize(loss, global_step=steps)
    optimizer.apply_gradients([(np.array(np.nan), loss.variables[0])], global_step=steps)
    assert (loss.variables[0].numpy(), float(steps), optimizer.iterations) == (0.5, 1.0, 1)
    optimizer.apply_gradients(optimizer.compute_gradients(loss), global_step=steps)
    assert (loss.variables[0].numpy(), float(steps)) == (0.25, 2.0)


def test_the_loop_of_the_guide_reads_its_metrics() -> None:
    mean, accuracy = Metrics.Mean(), Metrics.SparseCategoricalAccuracy(name="test_accuracy")
    model, (batch,) = Network(mlp(), policy="float32"), batches(1)
    loss = Losses.SparseCategoricalCrossentropy(from_logits=True)(batch["t"], model(batch["x"]))
    assert mean(loss) == pytest.approx(float(loss)) and f"{loss:.3f}" == f"{float(loss):.3f}"
    mean.update_state([1.0, 3.0], sample_weight=[1.0, 0.0])
    assert mean.result() == pytest.approx((float(loss) + 1) / 2)
    accuracy.update_state(batch["t"], model(batch["x"]))
    assert accuracy.result() == (model(batch["x"]).argmax(1) == batch["t"]).mean()
    for metric in (mean, accuracy):
        metric.reset_states()
        assert np.isnan(metric.result())
    rows = np.eye(4, dtype=F32)[batch["t"]]
    assert Metrics.CategoricalAccuracy()(rows, rows) == 1.0
    assert Metrics.BinaryAccuracy()(np.array([[0.0], [1.0]]), np.array([[0.2], [0.4]])) == 0.5


@pytest.mark.parametrize("optimizer", ["rmsprop", Adam(0.02), LossScaleOptimizer(Adam(0.02), 8)])
def test_compile_and_fit_train_the_network_used_by_calls(optimizer: Any) -> None:
    data = dict(next(batches(1, rows=256)))
    model = Network(mlp(), policy="float32")
    model.compile(
        loss=Losses.SparseCategoricalCrossentropy(from_logits=True), optimizer=optimizer, metrics=["accuracy"]
    )
    start = model.get_weights()
    history = model.fit(data["x"], data["t"], batch_size=64, epochs=4, validation_split=0.25, seed=0)
    loss, accuracy = model.evaluate(data["x"], data["t"], verbose=2)
    assert len(history.history["val_accuracy"]) == 4 and history.history["loss"][-1] < history.history["loss"][0]
    assert (model.predict(data["x"]).argmax(1) == data["t"]).mean() == pytest.approx(accuracy)
    assert model(data["x"]).numpy() == pytest.approx(model.predict(data["x"], batch_size=50).numpy(), rel=1e-5)
    now = Losses.SparseCategoricalCrossentropy(from_logits=True)(data["t"], model(data["x"]))
    assert float(now) == pytest.approx(loss, rel=1e-5)
    model.set_weights(start)
    assert model.evaluate(data["x"], data["t"])[0] != loss
    assert all((a == b).all() for a, b in zip(model.get_weights(), start, strict=True))
    with pytest.raises(TrainingError, match="set_weights takes 4 arrays, in this order: w1"):
        model.set_weights(start[:2])
    with pytest.raises(TrainingError, match=r"weight 'w1' has shape \(8, 16\), not \(2,\)"):
        model.set_weights([np.ones(2), *start[1:]])


def test_fractional_labels_are_refused() -> None:
    model, (batch,) = Network(mlp(), policy="float32"), batches(1)
    loss = Losses.SparseCategoricalCrossentropy(from_logits=True)
    assert float(loss(batch["t"].astype(F32), model(batch["x"]))) == float(loss(batch["t"], model(batch["x"])))
    with pytest.raises(TrainingError, match=r"the targets 'y_true' contain 0.5, but class indices must be whole"):
        loss(batch["t"] * 0 + 0.5, model(batch["x"]))


def test_a_tape_returns_gradients_in_the_structure_of_its_sources() -> None:
    model = Network(mlp(), policy="float32")
    batch = next(batches(1))
    with GradientTape(persistent=True) as tape:
        loss = Losses.SparseCategoricalCrossentropy(from_logits=True)(batch["t"], model(batch["x"]))
    every = tape.gradient(loss, model.trainable_variables)
    one = tape.gradient(loss, model.trainable_variables[1])
    assert isinstance(every, list) and isinstance(one, np.ndarray) and (one == every[1]).all()


def test_a_loss_times_a_number_is_a_loss() -> None:
    model = Network(mlp(), policy="float32")
    optimizer = LossScaleOptimizer(SGD(0.1), 8)
    batch = next(batches(1))
    loss = Losses.SparseCategoricalCrossentropy(from_logits=True)(batch["t"], model(batch["x"]))
    whole = loss.gradients(model.trainable_variables, np.array(1, F32))
    for part in (loss / 4, loss * 0.25, 0.25 * loss, np.float32(0.25) * loss, (loss / 2) / 2):
        scaled = optimizer.get_scaled_loss(part)
        found = optimizer.get_unscaled_gradients(scaled.gradients(model.trainable_variables, np.array(1, F32)))
        assert (float(part), float(scaled())) == (float(loss) / 4, 2 * float(loss))
        assert all((np.asarray(g) == np.asarray(w) / 4).all() for g, w in zip(found, whole, strict=True))


def test_classes_of_keras_are_on_the_last_axis() -> None:
    square = parsed(
        "net (float[N,3,3] x) => (float[N,3,3] y) <float[3,3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}> { y = MatMul (x, w) }"
    )
    model = Network(square, policy="float32")
    x, t = np.random.default_rng(0).normal(size=(2, 3, 3)).astype(F32), np.array([[0, 1, 2], [2, 2, 1]])
    logits = x @ np.arange(1, 10, dtype=F32).reshape(3, 3)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(logs, t[..., None], -1).mean()
    assert float(Losses.SparseCategoricalCrossentropy(from_logits=True)(t, model(x))) == pytest.approx(
        expected, rel=1e-5
    )
    rows = np.eye(3, dtype=F32)[t]
    assert float(Losses.CategoricalCrossentropy(from_logits=True)(rows, model(x))) == pytest.approx(expected, rel=1e-5)
    doubled = Losses.SparseCategoricalCrossentropy(from_logits=True)(t, model(x), sample_weight=np.full(len(t), 2.0))
    assert float(doubled) == pytest.approx(2 * expected, rel=1e-5)


def test_a_loop_in_training_mode_updates_statistics_drops_and_exports() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]> net (float[N,3] x) => (float[N,3] y)
        <float[3] s = {1, 2, 3}, float[3] b = {0, 0, 1}, float[3] mean = {0, 0, 0}, float[3] var = {1, 1, 1},
         float half = {0.5}> {
          n = BatchNormalization <momentum = 0.5> (x, s, b, mean, var)  y = Dropout (n, half) }"""
    )
    loss = ModelLoss.of(model, "mean_squared_error(y, t)", training_mode=True)
    x = np.array([[1, 2, 3], [3, 4, 5], [5, 9, 1]], F32)
    opt = StatefulOptimizer(Adam(0.01))
    seen = []
    for _ in range(3):
        here = loss.on({"x": x, "t": np.zeros_like(x)})
        before = float(here())
        opt.minimize(here, loss.variables)
        assert here.results["loss"] == before  # the same numbers were dropped
        seen.append(before)
    weights = {t.name: np.frombuffer(t.raw_data, F32) for t in loss.export().proto.graph.initializer if t.raw_data}

    assert len(set(seen)) == 3
    np.testing.assert_allclose(weights["mean"], x.mean(0) * (1 - 0.5**3), rtol=1e-5)
    assert (loss.predict({"x": x})["y"] != 0).all()
    assert (weights["s"] == next(v.numpy() for v in loss.variables if v.name == "s")).all()


def test_a_float16_step_names_sizes_padded_for_tensor_cores() -> None:
    report = training_step(mlp(), loss=CROSS_ENTROPY).report
    assert report is not None and report.notes == (
        "products in float16 have dimensions that are not multiples of 8: 4 (pad to 8); tensor cores run best on"
        " multiples of 8, and below 256 on powers of two",
    )
    plain = training_step(mlp(), loss=CROSS_ENTROPY, policy="float32").report
    assert plain is not None and plain.notes == ()


def test_objects_with_a_session_refuse_copies_with_a_remedy() -> None:
    trainer = Trainer(training_step(mlp(), loss=CROSS_ENTROPY), **PLACE)
    for made in (trainer, square()):
        for copying in (copy.deepcopy, pickle.dumps):
            with pytest.raises(
                TrainingError, match=r"cannot be copied or pickled, because it contains an open session; save"
            ):
                copying(made)


def test_numpy_numbers_are_loss_scales_and_loss_options_may_be_positional() -> None:
    assert LossScaleOptimizer(SGD(0.1), np.float32(128)).loss_scale == FixedLossScale(128)
    assert Policy("mixed_float16", loss_scale=np.int64(64)).loss_scale == FixedLossScale(64)
    assert Losses.CategoricalCrossentropy(True, 0.1) == Losses.CategoricalCrossentropy(
        from_logits=True, label_smoothing=0.1, reduction="auto", name="loss"
    )


@pytest.mark.parametrize("way", ["Softmax", "Sigmoid"])
def test_predictions_are_probabilities_unless_from_logits_says_otherwise(way: str) -> None:
    model = mlp()
    model.graph.node.append(onnx.helper.make_node(way, ["y"], ["p"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("p", 1, ["N", 4]))
    network, (batch,) = Network(model, policy="float32"), batches(1)
    kind = Losses.CategoricalCrossentropy if way == "Softmax" else Losses.BinaryCrossentropy
    targets, predictions = np.eye(4, dtype=F32)[batch["t"]], network(batch["x"])
    read, of_logits = (float(kind(**o)(targets, predictions[n])) for n, o in (("p", {}), ("y", {"from_logits": True})))
    p = np.clip(predictions["y"].numpy(), 1e-12, None)
    rest = np.clip(1 - predictions["y"].numpy(), 1e-12, None)
    each = -(targets * np.log(p)).sum(1) if way == "Softmax" else -np.where(targets == 1, np.log(p), np.log(rest))

    assert read == of_logits
    assert float(kind()(targets, predictions["y"])) == pytest.approx(each.mean(), rel=1e-5)


ROOT = Path(__file__).parents[3]
TABLE = ROOT / "docs" / "reference" / "tensorflow.md"
ROWS = [line for line in TABLE.read_text("utf-8").splitlines() if re.match(r"\| [^-]", line)]


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


@pytest.mark.parametrize("row", [r for r in ROWS if _cells(r)[2] != "tests"], ids=lambda row: _cells(row)[0][:40])
def test_each_line_of_the_table_names_its_tests_if_testable(row: str) -> None:
    _, here, tests = _cells(row)
    named = re.findall(r"`([^`]+)`", tests)
    assert named or here.startswith("not")
    for name in named:
        assert (ROOT / name if "/" in name else Path(__file__).with_name(name)).is_file()


LINES = [
    line for line in Path(__file__).with_name("tensorflow_rows.txt").read_text("utf-8").splitlines() if "|" in line
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.partition(" | ")[0])
def test_each_line_of_tensorflow_has_existing_tests_or_a_reason(line: str) -> None:
    tests = line.partition(" | ")[2]
    for part in () if tests.startswith("- ") else tests.split("; "):
        name, _, functions = part.partition(": ")
        path = ROOT / "tests" / f"{name}.py" if "/" in name else Path(__file__).with_name(f"{name}.py")
        defined = set(re.findall(r"^def (test_\w+)", path.read_text("utf-8"), re.MULTILINE))
        assert functions and set(functions.split(", ")) <= defined


@pytest.mark.parametrize(("value", "square"), [(256.0, np.inf), (1e-5, 0.0), (255.0, 65024.0)])
def test_squares_overflow_and_vanish_in_float16(value: float, square: float) -> None:
    text = '<ir_version: 10, opset_import: ["": 20]> g (float16[1] x) => (float16[1] y) { y = Mul (x, x) }'
    runner = Runner.open(emulate(Model(onnx.parser.parse_model(text))))
    (result,) = runner.run({"x": np.array([value], runner.inputs[0].dtype.numpy)}).values()
    with np.errstate(over="ignore", under="ignore"):
        assert np.float16(value) * np.float16(value) == np.asarray(result)[0] == square


@pytest.mark.parametrize(
    ("op_type", "color"),
    [("ArgMax", "clear"), ("Floor", "clear"), ("Conv", "allow"), ("Add", "gray"), ("AveragePool", "gray")],
)
def test_the_lists_match_the_classes_of_tensorflow(op_type: str, color: str) -> None:
    for to in (DType.FLOAT16, DType.BFLOAT16):
        assert load_lists(to).classify("", op_type, {}, 2).color.value == color


def test_restored_weights_train_as_before() -> None:
    trainer = Trainer(training_step(mlp(), loss=CROSS_ENTROPY, optimizer=SGD(0.1)), **PLACE)
    start, data = trainer.get_weights(), list(batches(4))
    first = trainer.fit(data).losses
    trainer.set_weights(start)
    assert trainer.fit(data).losses == first
