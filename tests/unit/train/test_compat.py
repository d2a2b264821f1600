"""The TensorFlow interface, with the values of TensorFlow's tests, and the policies of a process."""

import warnings
from typing import Any

import numpy as np
import onnx.parser
import pytest

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import FeedError, PolicyError, TrainingError
from amp_rewrite.runtime.gpu import Gpu, Hardware
from amp_rewrite.train import policy as policies
from amp_rewrite.train.keras.loss_scale_optimizer import (
    LossScaleOptimizer,
    disable_mixed_precision_graph_rewrite,
    enable_mixed_precision_graph_rewrite,
)
from amp_rewrite.train.keras.optimizer import StatefulOptimizer
from amp_rewrite.train.keras.variables import Variable
from amp_rewrite.train.loss_scale import DynamicLossScale, FixedLossScale, Gradient, IndexedSlices
from amp_rewrite.train.policy import Policy, global_policy, policy_scope, set_policy
from amp_rewrite.train.step.model_loss import ModelLoss
from amp_rewrite.train.step.step import training_step
from amp_rewrite.train.update.optimizers import SGD, Adam
from support.train.nets import CROSS_ENTROPY, batches, fresh_process, mlp, square

__all__ = ["fresh_process"]
pytestmark = pytest.mark.usefixtures("fresh_process")


class Ramp:
    """A loss with slope `slope` in each variable; it records the gradients it returned."""

    def __init__(self, slope: float = 1.0) -> None:
        self.slope = slope
        self.seen: list[list[float]] = []

    def __call__(self) -> np.float32:
        return np.float32(self.slope)

    def gradients(self, variables: Any, seed: Any) -> list[Gradient]:
        found = [np.full(v.shape, self.slope, np.float32) * seed for v in variables]
        self.seen.append([float(g.reshape(-1)[0]) for g in found])
        return list(found)


def test_the_documentations_example_goes_from_1_to_a_half_to_a_quarter() -> None:
    loss = square()
    (v,) = loss.variables
    opt = LossScaleOptimizer(SGD(0.25), "dynamic")

    opt.minimize(loss, [v])
    assert v.numpy() == 0.5

    scaled = opt.get_scaled_loss(loss)
    assert scaled() == 0.25 * 2**15
    grads = opt.get_unscaled_gradients(scaled.gradients([v], np.array(1, np.float32)))
    opt.apply_gradients(zip(grads, [v], strict=True))
    assert (v.numpy(), opt.iterations) == (0.25, 2)


def test_an_update_succeeds_and_a_nan_then_changes_nothing() -> None:
    var = Variable([1.0, 2.0])
    opt = LossScaleOptimizer(SGD(1.0), DynamicLossScale(2, 1))
    opt.apply_gradients([(np.array([2.0, 2.0]), var)])
    assert (var.numpy().tolist(), opt.loss_scale()) == ([-1.0, 0.0], 4.0)

    opt.apply_gradients([(np.array([np.nan, 2.0]), var)])
    assert (var.numpy().tolist(), opt.loss_scale(), opt.iterations) == ([-1.0, 0.0], 2.0, 1)


def test_momentum_survives_changes_of_the_scale_and_can_be_enabled_late() -> None:
    var, loss = Variable([1.0, 2.0]), Ramp()
    opt = LossScaleOptimizer(SGD(1.0, momentum=1.0), DynamicLossScale(2, 1))
    seen = []
    for _ in range(2):
        opt.minimize(loss, [var])
        seen.append((var.numpy().tolist(), float(opt.loss_scale())))

    assert seen == [([0.0, 1.0], 4.0), ([-2.0, -1.0], 8.0)]
    assert (opt.get_slot_names(), opt.get_slot(var, "momentum").tolist()) == (["momentum"], [-2.0, -2.0])
    variable, optimizer = Variable([1.0, 2.0]), StatefulOptimizer(SGD(1.0))
    ones = np.ones(2, np.float32)
    optimizer.apply_gradients([(ones, variable)])
    optimizer.momentum = 0.5
    optimizer.apply_gradients([(ones, variable)])
    optimizer.apply_gradients([(ones, variable)])

    assert variable.numpy().tolist() == [1 - 1 - 1 - 1.5, 2 - 1 - 1 - 1.5]


def test_gradients_of_any_type_are_unscaled_by_any_scale_and_none_is_kept() -> None:
    opt = LossScaleOptimizer(SGD(), 2)
    sparse = IndexedSlices(np.array([[8.0]], np.float32), np.array([3]), (4, 1))
    three, none, half, rows = opt.get_unscaled_gradients([np.float32(3), None, np.array(-4, np.float16), sparse])

    assert (three, none, half) == (1.5, None, -2.0)
    assert isinstance(half, np.ndarray) and half.dtype == np.float16
    assert isinstance(rows, IndexedSlices)
    assert (rows.values.tolist(), rows.indices.tolist(), rows.dense_shape) == ([[4.0]], [3], (4, 1))
    opt = LossScaleOptimizer(SGD(), 2.0**26)
    (gradient,) = opt.get_unscaled_gradients([np.array(2.0**14, np.float16)])

    assert gradient == 2.0**-12


def test_sparse_gradients_change_their_rows_and_repeated_rows_add_up() -> None:
    var = Variable([[1.0], [2.0], [3.0]])
    grads = IndexedSlices(np.array([[2.0], [2.0], [4.0]]), np.array([0, 0, 2]))
    LossScaleOptimizer(SGD(1.0), 2).apply_gradients([(grads, var)])

    assert var.numpy().tolist() == [[-3.0], [2.0], [-1.0]]


def test_hyperparameters_and_iterations_delegate_to_the_inner_optimizer() -> None:
    opt = LossScaleOptimizer(SGD(1.0, momentum=0.5), 2)
    opt.lr = 0.25
    opt.momentum = 0.75
    opt.iterations = 7

    assert (opt.learning_rate, opt.inner.rule) == (0.25, SGD(0.25, momentum=0.75))
    assert (opt.iterations, opt.inner.iterations) == (7, 7)
    assert {"lr", "learning_rate", "momentum", "nesterov", "loss_scale"} <= set(dir(opt))
    with pytest.raises(AttributeError, match=r"^SGD has no hyperparameter 'beta_1'; it has clipnorm, "):
        opt.beta_1 = 0.5
    with pytest.raises(AttributeError):
        opt.beta_1  # noqa: B018


def test_weights_delegate_to_the_inner_optimizer() -> None:
    var = Variable([1.0])
    opt = LossScaleOptimizer(Adam(), 2)
    opt.apply_gradients([(np.array([1.0]), var)])
    other = LossScaleOptimizer(Adam(), 2)
    other.apply_gradients([(np.array([5.0]), Variable([1.0]))])
    other.set_weights(opt.get_weights())

    assert [w.tolist() for w in other.weights] == [w.tolist() for w in opt.inner.weights]
    assert len(opt.variables()) == 3


def test_a_checkpoint_restores_scale_and_good_steps() -> None:
    opt = LossScaleOptimizer(SGD(1.0, momentum=1.0), DynamicLossScale(1, 2))
    var = Variable([1.0])
    step = [(np.array([1.0]), var)]
    opt.apply_gradients(step)
    saved = opt.checkpoint()
    state = opt.loss_scale.state  # type: ignore[union-attr]
    assert (state.scale, state.good_steps) == (1.0, 1)

    opt.apply_gradients(step)
    assert opt.loss_scale() == 2.0

    opt.restore(saved)
    state = opt.loss_scale.state  # type: ignore[union-attr]
    assert (state.scale, state.good_steps, opt.iterations) == (1.0, 1, 1)
    assert list(saved) == ["step", "slot/Variable/momentum", "loss_scale", "good_steps"]


@pytest.mark.parametrize("saves_scale", [True, False])
@pytest.mark.parametrize("loads_scale", [True, False])
def test_a_checkpoint_loads_with_and_without_loss_scaling(saves_scale: bool, loads_scale: bool) -> None:
    def made(scaled: bool) -> StatefulOptimizer:
        inner = StatefulOptimizer(SGD(1.0, momentum=1.0))
        return LossScaleOptimizer(inner, DynamicLossScale(8, 1)) if scaled else inner

    source, target = made(saves_scale), made(loads_scale)
    source.apply_gradients([(np.array([1.0]), Variable([1.0]))])
    target.restore(source.checkpoint())

    assert (target.iterations, target.get_slot(Variable([1.0]), "momentum").tolist()) == (1, [-1.0])
    if isinstance(target, LossScaleOptimizer):
        assert target.loss_scale() == (16.0 if saves_scale else 8.0)


def test_the_configuration_is_that_of_2020_and_the_later_one_loads() -> None:
    opt = LossScaleOptimizer(SGD(0.5), DynamicLossScale(4, 7))
    config = opt.get_config()
    again = LossScaleOptimizer.from_config(config)
    inner = config["optimizer"]
    later = {"inner_optimizer": inner, "dynamic": True, "initial_scale": 4, "dynamic_growth_steps": 7}

    assert list(config) == ["optimizer", "loss_scale"]
    for made in (again, LossScaleOptimizer.from_config(later)):
        assert (made.get_config(), made.loss_scale()) == (config, 4.0)
    fixed = LossScaleOptimizer.from_config({**later, "dynamic": False, "dynamic_growth_steps": None})
    assert fixed.loss_scale == FixedLossScale(4.0)


def test_missing_gradients_are_refused_before_the_scale_changes() -> None:
    opt = LossScaleOptimizer(SGD(), DynamicLossScale(2, 1))
    with pytest.raises(TrainingError) as error:
        opt.apply_gradients([(None, Variable(1.0, "v"))])
    assert str(error.value) == "no variable has a gradient ('v'); pass variables that the loss depends on"
    assert opt.loss_scale() == 2.0


def test_a_loss_accepts_batches_like_a_trainer() -> None:
    (batch,) = batches(1)
    loss = ModelLoss.of(mlp(), CROSS_ENTROPY, policy="float32")
    same = loss.on({"x": batch["x"].astype(np.float64).tolist(), "t": batch["t"].astype(np.int32)})
    assert same() == loss.on(batch)()
    doubles = loss.predict({"x": batch["x"].astype(np.float64)})["y"]
    assert (doubles == loss.predict({"x": batch["x"]})["y"]).all()
    for wrong, message in (
        ({"t": batch["t"] + 4}, "input 't' of batch 0 has class"),
        ({"t": batch["t"][1:]}, "in batch 0, dimension 'N' has size 16 in 'x' but 15 in 't'"),
        ({"x": batch["x"][:, 1:]}, r"input 'x' of batch 0 has the shape \[16, 7\], but the input takes \[N, 8\]"),
    ):
        with pytest.raises((FeedError, TrainingError), match=message):
            loss.on({**batch, **wrong})()


def test_a_loss_has_no_gradient_for_a_variable_of_no_model() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]> net (float x) => (float loss) <float[1] w = {2}>'
        " { p = Mul (x, w)  loss = ReduceSum <keepdims = 0> (p) }"
    )
    loss = ModelLoss.of(model, "loss", parameters=["w"])
    three = loss.on({"x": np.array(3, np.float32)})
    grads = three.gradients([*loss.variables, Variable(1.0)], np.array(4, np.float32))
    assert (three(), np.array(grads[0]).tolist(), grads[1]) == (6.0, [12.0], None)


def test_enabling_wraps_the_optimizer_and_starts_the_rewrite_and_disabling_stops_it() -> None:
    opt = enable_mixed_precision_graph_rewrite(SGD(0.5))
    assert (opt.loss_scale(), policies.state.rewriting) == (2.0**15, True)
    disable_mixed_precision_graph_rewrite()
    assert not policies.state.rewriting
    assert opt.loss_scale() == 2.0**15
    with pytest.warns(UserWarning, match=": the graph rewrite is not enabled$"):
        disable_mixed_precision_graph_rewrite()


@pytest.mark.parametrize(
    ("opt", "message"),
    [
        (LossScaleOptimizer(SGD(), 2), "the optimizer already has a loss scale; pass its inner optimizer"),
        (object, f"{object!r} is not an optimizer; pass an Optimizer such as SGD(0.1)"),
    ],
)
def test_an_unsupported_optimizer_does_not_enable_the_rewrite(opt: Any, message: str) -> None:
    with pytest.raises(TrainingError) as error:
        enable_mixed_precision_graph_rewrite(opt)
    assert str(error.value) == message
    assert not policies.state.rewriting


def test_any_policy_excludes_the_rewrite_and_is_checked_first() -> None:
    set_policy("float32")
    with pytest.raises(PolicyError) as error:
        enable_mixed_precision_graph_rewrite(object)  # type: ignore[arg-type]
    assert str(error.value) == (
        "cannot enable the mixed precision graph rewrite: the policy is set to 'float32', and"
        " only one of the two can be active; call set_policy(None) first"
    )
    assert isinstance(error.value, ValueError)


F32, F16, BF16 = DType.FLOAT, DType.FLOAT16, DType.BFLOAT16


@pytest.mark.parametrize(
    ("name", "types", "scale"),
    [
        ("mixed_float16", (F32, F16), "dynamic"),
        ("mixed_bfloat16", (F32, BF16), None),
        ("float32", (F32, F32), None),
        ("f16", (F16, F16), None),
        ("_infer", (None, None), None),
    ],
)
def test_a_policy_has_two_types_and_a_loss_scale(name: str, types: tuple[DType | None, ...], scale: str) -> None:
    policy = Policy(name)
    assert ((policy.param, policy.compute), policy.loss_scale) == (types, scale)


def test_unknown_policies_are_refused_and_equivalent_spellings_are_equal() -> None:
    assert Policy("half") == Policy("float16")
    assert Policy("mixed_float16") != Policy("mixed_float16", loss_scale=8)
    with pytest.raises(TypeError, match=r"must be a string, not .*; for an element type use Policy\('float16'\)"):
        Policy(F16)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^a policy's name must be a string, not 3$"):
        Policy(3)  # type: ignore[arg-type]


def test_a_useless_loss_scale_is_warned_of() -> None:
    with pytest.warns(
        UserWarning, match="^policy 'mixed_bfloat16' has a loss scale, but computes in bfloat16; "
    ) as warned:
        assert Policy("mixed_bfloat16", loss_scale=2).loss_scale == 2.0
    assert warned[0].filename == __file__  # the caller


def test_a_policy_prints_as_in_keras() -> None:
    assert repr(Policy("float32")) == '<Policy "float32", loss_scale=None>'
    assert repr(Policy("float16", loss_scale=8)) == '<Policy "float16", loss_scale=FixedLossScale(8.0)>'
    assert repr(Policy("mixed_float16")) == (
        '<Policy "mixed_float16", loss_scale=DynamicLossScale(current_loss_scale=32768.0, num_good_steps=0,'
        " initial_loss_scale=32768.0, increment_period=2000, multiplier=2.0)>"
    )


@pytest.mark.parametrize(
    ("policy", "plain"),
    [
        (Policy("_infer"), {"name": "_infer"}),
        (Policy("mixed_float16"), {"name": "mixed_float16"}),
        (Policy("mixed_float16", loss_scale=None), {"name": "mixed_float16", "loss_scale": None}),
        (Policy("float16", loss_scale=8), {"name": "float16", "loss_scale": 8.0}),
    ],
)
def test_a_policy_round_trips_through_its_configuration(policy: Policy, plain: dict[str, Any]) -> None:
    assert policy.get_config() == plain
    assert Policy.from_config(plain) == policy


def test_a_policy_holds_until_withdrawn_and_in_a_scope_until_its_end() -> None:
    assert (global_policy(), policies.state.policy is not None) == (Policy("float32"), False)
    set_policy("mixed_float16")
    assert (global_policy(), policies.state.policy is not None) == (Policy("mixed_float16"), True)
    set_policy(None)
    assert (global_policy(), policies.state.policy is not None) == (Policy("float32"), False)
    set_policy("float64")
    with pytest.raises(ZeroDivisionError), policy_scope("mixed_bfloat16"):
        assert global_policy() == Policy("mixed_bfloat16")
        raise ZeroDivisionError
    assert global_policy() == Policy("float64")


def test_a_mixed_policy_excludes_the_rewrite_and_float64_does_not() -> None:
    policies.state.rewriting = True
    with pytest.raises(PolicyError) as error:
        set_policy("mixed_float16")
    assert str(error.value) == (
        "cannot set policy 'mixed_float16': the mixed precision graph rewrite is enabled, and only one of the two"
        " can be active; call disable_mixed_precision_graph_rewrite() first"
    )
    set_policy("float64")
    assert global_policy() == Policy("float64")


def test_a_gpu_without_fast_low_types_is_named_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "query_hardware", lambda: Hardware((Gpu("P100", (6, 0)), Gpu("V100", (7, 0)))))
    set_policy("mixed_bfloat16")  # only float16 queries the hardware
    message = "this one is P100, compute capability 6.0$"
    with pytest.warns(UserWarning, match=message) as warned:
        set_policy("mixed_float16")
    assert [warning.filename for warning in warned] == [__file__]
    set_policy("mixed_float16")
    monkeypatch.setattr(policies, "state", policies.ProcessSettings())
    monkeypatch.setattr(policies, "query_hardware", lambda: Hardware(unavailable_reason="no GPU"))
    with pytest.warns(UserWarning, match="^no GPU; on a CPU, float16") as warned, policy_scope("mixed_float16"):
        pass
    assert [warning.filename for warning in warned] == [__file__]


def test_steps_follow_the_rewrite_and_the_policy_like_sessions() -> None:
    seen = [policies.policy_of_steps().name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from a machine without a GPU
        enable_mixed_precision_graph_rewrite()
        seen.append(training_step(mlp(), loss=CROSS_ENTROPY).policy.name)
        disable_mixed_precision_graph_rewrite()
        seen.append(training_step(mlp(), loss=CROSS_ENTROPY).policy.name)
        set_policy("mixed_bfloat16")
        seen.append(training_step(mlp(), loss=CROSS_ENTROPY).policy.name)

    assert seen == ["mixed_float16", "mixed_float16", "float32", "mixed_bfloat16"]
