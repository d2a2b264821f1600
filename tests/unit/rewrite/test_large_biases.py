"""Biases that outweigh their product: split off or dropped, with the same numbers, and what stays as it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto

import amp_rewrite
from support import cases
from support.fusing import kinds, outputs_of

WEIGHTS = np.random.default_rng(0).standard_normal((8, 8)) / 30
NUMBERS = {"w": WEIGHTS, "g": np.ones(8), "z": np.zeros(8)}
NORM = "h=Gemm(x,w,b);y=LayerNormalization(h,g,z)"
INSTANCE = "h=Conv(x,k,b);y=InstanceNormalization(h,g,z)"


def model(text: str, bias: float = 4000.0, outputs: str = "y") -> ModelProto:
    shapes = {"x": (1, 8, 8, 8)} if "Conv" in text else {}
    constants: dict[str, Any] = {**NUMBERS, "k": WEIGHTS.reshape(8, 8, 1, 1), "b": np.full(8, bias)}
    return cases.build(text, outputs.split(), shapes=shapes, constants=constants)


def findings(converted: Any) -> list[str]:
    return [found.message for found in converted.report.findings if found.kind == "bias"]


@pytest.mark.parametrize("text", [NORM, INSTANCE, "y=Gemm(x,w,b)", "h=Gemm(x,w,b);y=Identity(h)", "y=Conv(x,k,b)"])
def test_a_bias_is_split_off_and_added_behind(text: str) -> None:
    proto = model(text)
    converted = amp_rewrite.convert(proto)
    assert findings(converted) == ["its bias is far larger than its weights · added in float32 behind it"]
    assert kinds(converted.model).count("Add") == 1
    row = next(row for row in converted.report.rows if row.op == "Add")
    assert row.dtype == "float32"


@pytest.mark.parametrize(("text", "bias"), [(NORM, 4000.0), (INSTANCE, 4000.0), (INSTANCE, 40.0)])
def test_the_numbers_are_those_of_float32(text: str, bias: float) -> None:
    proto = model(text, bias)
    feeds = {"x": np.random.default_rng(1).standard_normal(shape_of_input(proto)).astype(np.float32)}
    twin = amp_rewrite.emulate(amp_rewrite.convert(proto).model).to_proto()
    (found,), (exact,) = outputs_of(twin, feeds), outputs_of(proto, feeds)
    # Beside a bias of 4000 float32 itself keeps 11 bits of a spread of 0.1.
    assert np.abs(found - exact).max() <= 2e-2 * np.abs(exact).max()


def shape_of_input(proto: ModelProto) -> list[int]:
    return [dim.dim_value for dim in proto.graph.input[0].type.tensor_type.shape.dim]


@pytest.mark.parametrize(
    ("text", "bias", "outputs"),
    [
        (NORM, 1.0, "y"),
        ("h=Gemm(x,w,b);r=Relu(h);y=MatMul(r,w)", 4000.0, "y"),  # not a copy
        ("h=Gemm(x,w,b);y=LayerNormalization(h,g,z);v=Exp(h)", 4000.0, "y v"),  # several readers
    ],
)
def test_other_biases_stay_where_they_are(text: str, bias: float, outputs: str) -> None:
    converted = amp_rewrite.convert(model(text, bias, outputs))
    assert findings(converted) == []
    first = converted.model.graph.node
    assert any(node.op_type in ("Gemm", "Conv") and len(node.input) == 3 for node in first)


def test_where_the_schema_needs_a_bias_or_weights_are_inputs_it_stays() -> None:
    for opset, ir in ((9, 3), (10, 5), (17, 3)):
        proto = cases.build("y=Gemm(x,w,b)", ("y",), constants={"w": WEIGHTS, "b": np.full(8, 4000.0)}, opset=opset)
        proto.ir_version = ir
        if ir == 3:
            held = [onnx.helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in proto.graph.initializer]
            proto.graph.input.extend(held)
        converted = amp_rewrite.convert(proto)
        assert findings(converted) == []
        onnx.checker.check_model(converted.model, full_check=True)
