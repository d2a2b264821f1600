"""What people give to training: numbers that float32 does not hold, odd names, models that are half already."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

import amp_rewrite
from amp_rewrite.errors import AmpRewriteError, FeedError, TrainingError
from amp_rewrite.settings.loss_scale import IndexedSlices
from amp_rewrite.train.interchange.external_gradients import scale_gradients
from amp_rewrite.train.keras.optimizer import StatefulOptimizer
from amp_rewrite.train.keras.variables import Variable
from amp_rewrite.train.step.step import training_step
from amp_rewrite.train.step.trainer import Trainer
from amp_rewrite.train.update.optimizers import SGD
from support.train.nets import CROSS_ENTROPY, batches, mlp, parsed

BATCH = next(batches(1))


def trainer(model: ModelProto | None = None, loss: str = CROSS_ENTROPY) -> Trainer:
    step = training_step(mlp() if model is None else model, loss=loss, policy="float32")
    return Trainer(step, providers=("CPUExecutionProvider",), threads=1)


def message(call: Any, kind: type[AmpRewriteError] = TrainingError) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


def renamed(**names: str) -> ModelProto:
    """The two layers with other names for some values."""
    model = mlp()
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for formal in (*model.graph.input, *model.graph.output):
        formal.name = names.get(formal.name, formal.name)
    return model


# -- numbers ---------------------------------------------------------------------------------------------------


def test_a_named_dimension_with_two_sizes_is_refused_before_gradients_are_wrong() -> None:
    wrong = {"x": BATCH["x"], "t": np.zeros((1, 4), np.float32)}
    made = trainer(loss="mean_squared_error(y, t)")
    for call in (made.fit, made.evaluate):
        assert message(lambda call=call: call([wrong]), FeedError) == (
            "batch 0 has size 16 for 'N' in 'x', but 1 in 't'; use inputs of one size, or export the"
            " model with two dimension names"
        )


# -- names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["my logits", "f(x)", "y:0"])
def test_a_prediction_of_any_name_can_be_compared(name: str) -> None:
    made = trainer(renamed(y=name), f"cross_entropy({name}, t)")
    assert made.fit([BATCH]).losses == trainer().fit([BATCH]).losses


def test_one_gradient_named_twice_is_one_output() -> None:
    model = parsed(
        "net (float[3] x, float seed, float[3] w) => (float loss, float[3] g)"
        " { p = Mul (x, w) loss = ReduceSum <keepdims = 0> (p) g = Mul (x, seed) }"
    )
    made = scale_gradients(model, loss="loss", grads=["g", "g"], seed="seed")
    assert ([o.name for o in made.model.proto.graph.output].count("g"), made.grads) == (1, ("g",))


# -- models ----------------------------------------------------------------------------------------------------


def test_a_converted_model_is_refused_instead_of_trained_in_part() -> None:
    half = amp_rewrite.convert(mlp(), safety="none").model
    assert message(lambda: training_step(half, loss=CROSS_ENTROPY)) == (
        "'w1', 'w2' of the model are in half precision, but trained weights must be float32;"
        " pass the float32 model (training_step lowers it), widen this one with convert(model,"
        " keep=['*']), or name the trained initializers in `parameters`"
    )
    assert training_step(half, loss=CROSS_ENTROPY, parameters=["b2"]).parameters == ("b2",)
    widened = amp_rewrite.convert(half, keep=["*"]).model
    assert training_step(widened, loss=CROSS_ENTROPY).parameters == ("w1", "b1", "w2", "b2")


def test_weights_that_only_a_body_reads_are_trained_too() -> None:
    model = parsed(
        "net (float[N,2] x, bool c) => (float[N,2] y) <float[2,2] w = {1, 2, 3, 4}, float[2,2] v = {1, 2, 3, 4}>"
        " { y = If (c) <then_branch = a () => (float[N,2] p) { p = MatMul (x, w) },"
        " else_branch = b () => (float[N,2] q) { q = MatMul (x, v) }> }"
    )
    step = training_step(model, loss="mean_squared_error(y, t)", policy="float32")
    made = Trainer(step, providers=("CPUExecutionProvider",), threads=1)
    ones = np.ones((3, 2), np.float32)
    before = made.step.initial_state()
    made.fit([{"x": ones, "t": ones, "c": np.array(True)}])

    assert step.parameters == ("w", "v")
    assert [np.array_equal(before[name], made.state[name]) for name in ("w", "v")] == [False, True]


@pytest.mark.parametrize(
    ("attribute", "fact"),
    [
        ("", "input 't' of batch 0 has class 3, but the model has classes 0 to 2; correct the targets"),
        ("<ignore_index = 3>", None),
    ],
)
def test_classes_of_a_loss_in_the_model_are_checked(attribute: str, fact: str | None) -> None:
    model = parsed(
        "net (float[N,2] x, int64[N] t) => (float loss) <float[2,3] w = {1, 2, 3, 4, 5, 6}>"
        f" {{ y = MatMul (x, w) loss = SoftmaxCrossEntropyLoss {attribute} (y, t) }}"
    )
    made = trainer(model, "loss")
    batch = {"x": np.ones((2, 2), np.float32), "t": np.array([0, 3])}
    if fact is None:
        assert np.isfinite(made.fit([batch]).losses).all()
    else:
        assert message(lambda: made.fit([batch])) == fact


# -- TensorFlow's door -----------------------------------------------------------------------------------------


def test_momentum_can_be_turned_on_after_steps_without() -> None:
    variable, optimizer = Variable([1.0, 2.0]), StatefulOptimizer(SGD(1.0))
    ones = np.ones(2, np.float32)
    optimizer.apply_gradients([(ones, variable)])
    optimizer.momentum = 0.5
    optimizer.apply_gradients([(ones, variable)])
    optimizer.apply_gradients([(ones, variable)])

    assert variable.numpy().tolist() == [1 - 1 - 1 - 1.5, 2 - 1 - 1 - 1.5]


@pytest.mark.parametrize("row", [2, -1])
def test_a_sparse_gradient_of_no_row_is_refused(row: int) -> None:
    sparse = IndexedSlices(np.ones(2, np.float32), np.array([0, row]))
    optimizer = StatefulOptimizer(SGD(1.0))
    assert message(lambda: optimizer.apply_gradients([(sparse, Variable([1.0, 2.0]))])) == (
        f"a sparse gradient has row {row}, out of range for a variable of shape (2,); correct its indices"
    )


def test_a_slot_of_another_shape_is_refused() -> None:
    optimizer = StatefulOptimizer(SGD(1.0, momentum=0.5))
    optimizer.restore({"step": np.array(1), "slot/v/momentum": np.zeros(3)})
    assert message(lambda: optimizer.apply_gradients([(np.ones(2), Variable([1.0, 2.0], "v"))])) == (
        "slot 'momentum' of variable 'v' has shape (3,), but the variable has (2,); restore a"
        " checkpoint of this variable"
    )
