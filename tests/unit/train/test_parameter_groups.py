"""Parameter groups: rate, decay and freeze by pattern, in a step, in an optimizer object, and beside PyTorch's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from amp_rewrite.errors import TrainingError
from amp_rewrite.settings.loss_scale import serialize
from amp_rewrite.train.keras.loss_scale_optimizer import LossScaleOptimizer
from amp_rewrite.train.keras.optimizer import StatefulOptimizer
from amp_rewrite.train.keras.variables import Variable
from amp_rewrite.train.step.step import training_step
from amp_rewrite.train.step.step_file import load_step, save_step
from amp_rewrite.train.step.trainer import Trainer
from amp_rewrite.train.update.optimizers import SGD, Adam, AdamW, deserialize
from amp_rewrite.train.update.parameter_group import ParameterGroup, is_bias_or_norm
from support.train.nets import F32, parsed

NET = """net (float[N, 2] x) => (float[N, 3] logits)
    <float[2, 3] weight = {1, -1, 2, 0.5, 1, -2}, float[3] bias = {0.5, 0, -0.5}> {
    product = MatMul (x, weight)
    logits = Add (product, bias)
}"""
BATCH = {"x": np.array([[1, 2], [-1, 1]], F32), "label": np.array([0, 2])}


def stepped(optimizer: Any, steps: int = 3) -> dict[str, Any]:
    """Weights after float32 steps."""
    step = training_step(parsed(NET), loss="cross_entropy(logits, label)", optimizer=optimizer, policy="float32")
    trainer = Trainer(step, threads=1)
    trainer.fit([BATCH] * steps)
    return trainer.get_weights()


def test_a_group_multiplies_the_rate_of_its_parameters() -> None:
    slow, fast = stepped(SGD(0.1), 1), stepped(SGD(0.1, groups=[ParameterGroup("bias", rate=4.0)]), 1)

    assert fast["weight"].tobytes() == slow["weight"].tobytes()
    start = np.array([0.5, 0, -0.5])
    assert fast["bias"] - start == pytest.approx(4 * (slow["bias"] - start), rel=1e-5)


def test_a_rate_of_0_and_a_freeze_leave_the_same_values() -> None:
    still, frozen = (
        stepped(SGD(0.1, groups=[ParameterGroup("bias", rate=0.0)])),
        stepped(SGD(0.1, groups=[ParameterGroup("bias", frozen=True)])),
    )

    assert still["bias"].tolist() == [0.5, 0, -0.5] and "bias" not in frozen
    assert still["weight"].tobytes() == frozen["weight"].tobytes()


def test_the_first_group_that_matches_holds() -> None:
    optimizer = SGD(groups=[ParameterGroup("b*", rate=2.0), ParameterGroup("*", frozen=True)])

    assert optimizer.group_of("bias").rate == 2 and optimizer.group_of("weight").frozen


def test_the_report_lists_frozen_parameters_and_no_gradient_is_made_for_them() -> None:
    step = training_step(
        parsed(NET), loss="cross_entropy(logits, label)", optimizer=SGD(groups=[ParameterGroup("weight", frozen=True)])
    )

    assert step.parameters == ("bias",) and step.report is not None
    assert [row.role for row in step.report.parameters if row.name == "weight"] == ["frozen"]


def test_a_group_without_a_parameter_is_an_error_with_the_names() -> None:
    with pytest.raises(TrainingError, match=r"parameter group 'wieght' matches none.*'weight'"):
        training_step(
            parsed(NET),
            loss="cross_entropy(logits, label)",
            optimizer=SGD(groups=[ParameterGroup("wieght", frozen=True)]),
        )


def test_biases_and_norms_decay_only_when_asked() -> None:
    moved, spared = (stepped(SGD(0.1, weight_decay=0.5, decay_biases_and_norms=flag), 1) for flag in (True, False))
    plain = stepped(SGD(0.1), 1)

    assert spared["bias"].tobytes() == plain["bias"].tobytes() != moved["bias"].tobytes()
    assert spared["weight"].tobytes() == moved["weight"].tobytes() != plain["weight"].tobytes()


def test_the_weight_decay_of_a_group_is_kept_for_biases() -> None:
    optimizer = AdamW(decay_biases_and_norms=False, groups=[ParameterGroup("bias", weight_decay=0.5)])

    assert optimizer.for_parameter("bias", (3,)).weight_decay == 0.5
    assert optimizer.for_parameter("scale", (3,)).weight_decay == 0
    assert optimizer.for_parameter("weight", (3, 3)) is optimizer


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("norm.weight", (8,), True),
        ("scale", (), True),
        ("group_norm", (8, 1, 1), True),
        ("fc.bias", (1, 8), True),
        ("dense/bias:0", (1, 8), True),
        ("unbiased", (4, 8), False),
        ("fc.weight", (1, 8), False),
        ("fc.weight", (8, 1), False),
        ("conv.weight", (1, 8, 1, 1), False),
    ],
)
def test_a_bias_or_norm_is_told_by_shape_and_name(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert is_bias_or_norm(name, shape) is expected


def test_an_optimizer_object_goes_the_steps_of_the_graph() -> None:
    rule = AdamW(
        0.1, groups=[ParameterGroup("weight", rate=0.5), ParameterGroup("bias", weight_decay=0.25)], global_clipnorm=0.1
    )
    start = {"weight": np.arange(6, dtype=F32).reshape(2, 3), "bias": np.ones(3, F32)}
    variables = [Variable(value, name=name) for name, value in start.items()]
    StatefulOptimizer(rule).apply_gradients([(np.ones_like(v.numpy()), v) for v in variables])

    factor = [0.1 * 0.5 * 0.01, 0.1 * 0.25]
    for variable, decay, rate in zip(variables, factor, (0.05, 0.1), strict=True):
        expected = start[variable.name] * (1 - decay) - rate
        assert np.asarray(variable.numpy()) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_a_frozen_variable_has_no_slots_and_its_gradient_skips_no_step() -> None:
    free, frozen = Variable(np.ones(2, F32), name="free"), Variable(np.ones(2, F32), name="frozen")
    optimizer = LossScaleOptimizer(Adam(0.1, groups=[ParameterGroup("frozen", frozen=True)]), 8.0)
    dynamic = LossScaleOptimizer(SGD(0.1, groups=[ParameterGroup("frozen", frozen=True)]), "dynamic")
    for each in (optimizer, dynamic):
        each.apply_gradients([(np.ones(2, F32), free), (np.full(2, np.nan, F32), frozen)])

    assert frozen.numpy().tolist() == [1, 1] and optimizer.slots()["frozen"] == {}
    assert (optimizer.iterations, dynamic.iterations) == (1, 1) and free.numpy()[0] < 0.9


def test_groups_survive_configurations_and_step_files(tmp_path: Path) -> None:
    rule = AdamW(0.5, groups=[ParameterGroup("b*", 2.0, 0.0), ParameterGroup("w*")], decay_biases_and_norms=False)
    step = training_step(parsed(NET), loss="cross_entropy(logits, label)", optimizer=rule)
    save_step(step, tmp_path / "step.onnx")

    assert deserialize(json.loads(json.dumps(serialize(rule)))) == rule
    assert load_step(tmp_path / "step.onnx").optimizer == rule


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([ParameterGroup], "not parameter groups"),
        (3, "not parameter groups"),
        ([{"pattern": "a", "lr": 1}], "not parameter groups"),
        ("*.bias frozen", "not parameter groups"),
        ([{"pattern": "a", "rate": -1}], "rate of parameter group 'a' must be at least 0"),
        ([{"pattern": "a", "weight_decay": np.inf}], "weight_decay of parameter group 'a' must be at least 0"),
        ([{"pattern": "a", "frozen": 1}], "frozen of parameter group 'a' is 1"),
        ([{"pattern": ""}], "pattern of a parameter group is ''"),
    ],
)
def test_groups_that_make_no_sense_are_refused(groups: Any, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        SGD(groups=groups)


@pytest.mark.torch
def test_groups_go_the_steps_of_pytorch_with_param_groups() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(5)
    start = {name: np.array(rng.normal(size=(4, 3)), F32) for name in ("body", "head")}
    theirs = {name: torch.nn.Parameter(torch.tensor(value.copy())) for name, value in start.items()}
    groups = [{"params": [theirs["body"]]}, {"params": [theirs["head"]], "lr": 0.1, "weight_decay": 0.2}]
    torch_optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-7, weight_decay=0.01)
    ours = [Variable(value, name=name) for name, value in start.items()]
    optimizer = StatefulOptimizer(AdamW(0.01, groups=[ParameterGroup("head", rate=10.0, weight_decay=0.2)]))
    for _ in range(100):
        gradients = {name: np.array(rng.normal(size=(4, 3)), F32) for name in start}
        for name, parameter in theirs.items():
            parameter.grad = torch.tensor(gradients[name])
        torch_optimizer.step()
        optimizer.apply_gradients([(gradients[v.name], v) for v in ours])

    for variable in ours:
        assert np.abs(variable.numpy() - theirs[variable.name].detach().numpy()).max() < 2e-4
