"""What cannot be made a training step, with the exact words and the way out."""

from __future__ import annotations

from typing import Any

import onnx.parser
import pytest

from amp_rewrite.errors import GradientError, PolicyError, TrainingError
from amp_rewrite.train.step.step import training_step
from support.train.nets import CROSS_ENTROPY, mlp, parsed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"loss": "y"},
            "the loss 'y' has shape ['N', 4], but a loss is one number; reduce it to its mean first",
        ),
        (
            {"loss": "perplexity"},
            "the model has no value 'perplexity' that could be the loss; its outputs are 'y', or use"
            " cross_entropy(…), categorical_cross_entropy(…), binary_cross_entropy(…), kl_divergence(…),"
            " mean_squared_error(…), mean_absolute_error(…), huber(…)",
        ),
        ({"loss": "cross_entrpy(y)"}, "unknown loss 'cross_entrpy'; did you mean 'cross_entropy'?"),
        (
            {"loss": "hinge(y)"},
            "unknown loss 'hinge'; use one of cross_entropy, categorical_cross_entropy, binary_cross_entropy,"
            " kl_divergence, mean_squared_error, mean_absolute_error, huber",
        ),
        ({"loss": "cross_entropy(z9)"}, "the model has no value 'z9'; its outputs are 'y'"),
        (
            {"loss": "cross_entropy(y, a)"},
            "the target 'a' is a value of the model, but not an input; use an input or a new name",
        ),
        ({"loss": "cross_entropy(y, x)"}, "the target 'x' is float32; this loss needs int64"),
        (
            {"loss": "huber(y, x)"},
            "the target 'x' is an input of shape ['N', 8], but this loss needs ['N', 4]; use another"
            " input, or a new name",
        ),
        (
            {"parameters": ["w1", "w3"]},
            "parameter 'w3' is not an initializer of the model; it has 'w1', 'b1', 'w2', 'b2'",
        ),
        ({"parameters": ["x"]}, "parameter 'x' is not an initializer of the model; it has 'w1', 'b1', 'w2', 'b2'"),
        ({"freeze": ["*"]}, "every parameter is frozen, so there is nothing to train; freeze fewer"),
        ({"micro_batches": 0}, "micro_batches is 0; use a whole number ≥ 1"),
        ({"optimizer": 3}, "not an optimizer: 3; pass an Optimizer such as SGD(0.1), or its name"),
        ({"loss_scale": 0.5}, "invalid loss scale 0.5; use a finite number ≥ 1"),
    ],
)
def test_what_can_not_be_trained_is_refused_with_the_way_out(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError) as error:
        training_step(mlp(), **{"loss": CROSS_ENTROPY, **options})
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            "float16",
            "policy 'float16' does not keep parameters and results in float32, as a training step"
            " must; use mixed_float16, mixed_bfloat16 or float32",
        ),
        (
            "p=f32,c=f64,o=f32",
            (
                "policy 'p=float32,c=float64,o=float32' computes in a type that a training step does not"
                " have; use float16"
            ),
        ),
    ],
)
def test_a_policy_without_float32_masters_is_refused(policy: str, message: str) -> None:
    with pytest.raises(PolicyError) as error:
        training_step(mlp(), loss=CROSS_ENTROPY, policy=policy)
    assert str(error.value) == message


def test_how_to_lower_is_refused_where_nothing_is_lowered() -> None:
    with pytest.raises(PolicyError) as error:
        training_step(mlp(), loss=CROSS_ENTROPY, policy="float32", keep=["op=Relu"])
    assert str(error.value) == (
        "keep configures lowering, but policy 'float32' lowers nothing; remove the options, or use mixed_float16"
    )


def test_what_must_be_float32_can_not_be_lowered_by_a_pattern() -> None:
    with pytest.raises(PolicyError) as error:
        training_step(mlp(), loss=CROSS_ENTROPY, lower=["op=Sub"])
    assert str(error.value).startswith("lower 'op=Sub' matches node 'amp.update/Sub_")
    assert str(error.value).endswith("which a training step computes in float32; narrow the pattern")


def test_the_report_says_why_the_update_is_float32() -> None:
    step = training_step(mlp(), loss=CROSS_ENTROPY)
    assert step.report is not None
    told = {(row.name.split("/")[0], row.rule) for row in step.report.rows if row.name.startswith("amp.")}

    assert {("amp.update", "update"), ("amp.update", "running_sum"), ("amp.loss", "loss")} <= told
    assert "updates the state of a training step, in float32" in step.report.text()


def test_a_loss_in_half_precision_is_refused() -> None:
    model = parsed(
        "net (float16[3] x) => (float16 y) <float16[3] w = {1, 2, 3}>"
        " { p = Mul (x, w) y = ReduceMean <keepdims = 0> (p) }"
    )
    with pytest.raises(TrainingError) as error:
        training_step(model, loss="y")
    assert str(error.value) == "the loss 'y' is float16, but a training step needs a float32 loss; cast it"


def test_a_model_without_weights_is_refused() -> None:
    model = parsed("net (float[3] x) => (float loss) { loss = ReduceMean <keepdims = 0> (x) }")
    with pytest.raises(TrainingError) as error:
        training_step(model, loss="loss")
    assert str(error.value) == (
        "the loss 'loss' does not depend on a trainable float32 initializer; export the model"
        " with its weights as initializers, or name them in `parameters`"
    )


def test_a_half_weight_is_refused_by_name() -> None:
    model = parsed(
        "net (float[3] x) => (float loss) <float16[3] w = {1, 2, 3}>"
        " { v = Cast <to = 1> (w) p = Mul (x, v) loss = ReduceMean <keepdims = 0> (p) }"
    )
    with pytest.raises(TrainingError) as error:
        training_step(model, loss="loss", parameters=["w"])
    assert str(error.value) == "parameter 'w' is float16, but trained weights must be float32; cast it"


def test_an_op_without_a_gradient_is_named_with_the_way_through_it() -> None:
    model = parsed(
        "net (float[3] x) => (float loss) <float[3] w = {1, 2, 3}>"
        " { p = Mul (x, w) [det] d = my.own.Odd (p) loss = ReduceMean <keepdims = 0> (d) }"
    )
    model.graph.node[1].domain, model.graph.node[1].op_type = "my.own", "Odd"
    model.opset_import.append(onnx.helper.make_opsetid("my.own", 1))
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("d", onnx.TensorProto.FLOAT, [3]))
    with pytest.raises(GradientError) as error:
        training_step(model, loss="loss")
    assert "'det' (my.own::Odd)" in str(error.value) and "w → " in str(error.value)


def test_an_old_opset_is_refused() -> None:
    model = parsed(
        "net (float[3] x) => (float loss) <float[3] w = {1, 2, 3}>"
        " { p = Mul (x, w) loss = ReduceMean <keepdims = 0> (p) }",
        opset=11,
    )
    with pytest.raises(
        GradientError, match=r"the model imports ai.onnx opset 11, and gradients are made from opset 12 on"
    ):
        training_step(model, loss="loss")
