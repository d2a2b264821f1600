"""Weights that were inputs: bound, trained, and the same as PyTorch trains them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import pytest

from amp_rewrite.errors import TrainingError
from amp_rewrite.runtime.runner import Runner
from amp_rewrite.train.step.assembly import bind
from amp_rewrite.train.step.step import training_step

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
