"""Weights that were inputs: bound, trained, and the same as PyTorch trains them."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnx.parser
import pytest

from amp_rewrite.errors import TrainingError
from amp_rewrite.runtime.runner import Runner
from amp_rewrite.train.step.assembly import bind
from amp_rewrite.train.step.step import training_step
from amp_rewrite.train.step.trainer import Trainer

TEXT = """
<ir_version: 10, opset_import: ["": 20]> net (float[N,2] x, float[2,2] a, float[2,2] b) => (float[N,2] y) {
  h = MatMul (x, a)
  y = MatMul (h, b)
}
"""
ONES = np.ones((2, 2), np.float32)


def test_bound_inputs_are_initializers_and_equal_ones_stay_apart() -> None:
    model = onnx.parser.parse_model(TEXT)
    before = model.SerializeToString(deterministic=True)
    bound = bind(model, {"a": ONES, "b": ONES})
    found: Any = Runner.open(bound).run({"x": ONES[:1]})["y"]

    assert found.tolist() == [[4.0, 4.0]]
    assert [v.name for v in bound.proto.graph.input] == ["x"]
    assert training_step(bound, loss="mean_squared_error(y)").parameters == ("a", "b")
    assert model.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"w": ONES}, "'w' is not an input of the model; its inputs are 'x', 'a', 'b'"),
        ({"a": ONES[:1]}, "the value of 'a' is float32 [1, 2], but the input is float32 [2, 2]; convert the value"),
        (
            {"a": ONES.astype(np.float64)},
            "the value of 'a' is float64 [2, 2], but the input is float32 [2, 2]; convert the value",
        ),
        ({"a": 1.0}, "the value of 'a' is float64 [], but the input is float32 [2, 2]; convert the value"),
    ],
)
def test_what_is_no_value_of_an_input_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError) as error:
        bind(onnx.parser.parse_model(TEXT), values)
    assert str(error.value) == message


@pytest.mark.torch
def test_a_transformer_of_pytorch_is_trained_as_pytorch_trains_it() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    nn = torch.nn
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    net = nn.Sequential(nn.Embedding(20, 16), layer, nn.Flatten(), nn.Linear(6 * 16, 4))
    names, values = zip(*net.named_parameters(), strict=True)

    class Functional(nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any, *parameters: Any) -> Any:
            return torch.func.functional_call(net, dict(zip(names, parameters, strict=True)), (x,))

    x, t = torch.randint(0, 20, (8, 6)), torch.randint(0, 4, (8,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            Functional(), (x, *values), input_names=["x", *names], output_names=["y"], opset_version=20, verbose=False
        )
    model = bind(program, {name: value.detach().numpy() for name, value in zip(names, values, strict=True)})
    step = training_step(model, loss="cross_entropy(y, t)", optimizer="sgd,lr=0.1", policy="float32", parameters=names)
    history = Trainer(step, providers=("CPUExecutionProvider",)).fit([{"x": x.numpy(), "t": t.numpy()}], epochs=10)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    expected = []
    for _ in range(10):
        loss = nn.functional.cross_entropy(net(x), t)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))

    assert sorted(step.parameters) == sorted(names)
    # ten steps of float32 sums of up to 96 products in another order
    assert history.losses == pytest.approx(expected, abs=10 * 96 * 2.0**-24)


@pytest.mark.torch
def test_what_is_learned_and_what_is_a_constant_of_a_norm_is_said_by_name() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    nn = torch.nn
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.PReLU(), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 2))
    names, values = zip(*net.named_parameters(), strict=True)

    class Functional(nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any, *parameters: Any) -> Any:
            return torch.func.functional_call(net, dict(zip(names, parameters, strict=True)), (x,))

    x = torch.randn(2, 1, 4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            Functional(), (x, *values), input_names=["x", *names], output_names=["y"], opset_version=20, verbose=False
        )
    model = bind(program, {name: value.detach().numpy() for name, value in zip(names, values, strict=True)})
    guessed = training_step(model, loss="cross_entropy(y, t)", policy="float32").parameters
    step = training_step(model, loss="cross_entropy(y, t)", policy="float32", parameters=names)

    assert set(guessed) != set(names)
    assert set(step.parameters) == set(names)
