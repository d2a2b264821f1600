"""Tiny constants that are stored times a power of two: the same bits in float32, and all digits in float16."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.numpy_helper
import pytest
from onnx import ModelProto

import amp_rewrite
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.passes.balanced_factors import balance_factors
from amp_rewrite.rewrite.replace import run_round
from amp_rewrite.rewrite.replacement import Context
from support import cases
from support.fusing import outputs_of

WEIGHTS = np.random.default_rng(0).standard_normal((8, 8))
KERNEL = WEIGHTS.reshape(8, 8, 1, 1)
TINY, LARGE = WEIGHTS * 1e-7, WEIGHTS * 3000
BALANCED: dict[str, tuple[str, dict[str, Any]]] = {
    "weights, scale": ("h=MatMul(x,w);y=Mul(h,c)", {"w": TINY, "c": 3e6}),
    "scale on the left": ("h=MatMul(x,w);y=Mul(c,h)", {"w": TINY, "c": 3e6}),
    "weights, divisor": ("h=MatMul(x,w);y=Div(h,c)", {"w": TINY, "c": 3e-7}),
    "channel scales": ("h=MatMul(x,w);y=Mul(h,c)", {"w": TINY, "c": np.arange(1.0, 9.0) * 1e6}),
    "a bias": ("h=Gemm[alpha=0.5,beta=2.0](x,w,b);y=Mul(h,c)", {"w": TINY, "c": 3e6, "b": TINY[0]}),
    "Conv": ("h=Conv(x,w,b);y=Mul(h,c)", {"w": KERNEL * 1e-7, "c": 3e6, "b": TINY[0]}),
    "Relu and copies between": ("h=MatMul(x,w);r=Relu(h);t=Transpose(r);y=Mul(t,c)", {"w": TINY, "c": 3e6}),
    "a negative scale": ("h=MatMul(x,w);r=Relu(h);y=Mul(r,c)", {"w": TINY, "c": -3e6}),
    "scale, weights": ("g=MatMul(x,u);h=Mul(g,c);y=MatMul(h,w)", {"u": WEIGHTS, "c": 2.5e-7, "w": LARGE}),
    "scale, weights, bias": (
        "g=MatMul(x,u);h=Mul(g,c);y=Gemm(h,w,b)",
        {"u": WEIGHTS, "c": 2.5e-7, "w": LARGE, "b": WEIGHTS[0]},
    ),
}


def model(text: str, constants: dict[str, Any], outputs: str = "y") -> ModelProto:
    return cases.build(text, outputs.split(), shapes={"x": (1, 8, 8, 8)} if "Conv" in text else {}, constants=constants)


def balanced(proto: ModelProto, to: DType = DType.FLOAT16) -> ModelProto:
    return run_round(View.of(Model.load(proto)), (balance_factors,), Context(to))[0].model.to_proto()


def feed(proto: ModelProto) -> dict[str, Any]:
    dims = [dim.dim_value for dim in proto.graph.input[0].type.tensor_type.shape.dim]
    return {"x": np.random.default_rng(1).standard_normal(dims).astype(np.float32)}


@pytest.mark.parametrize("name", BALANCED)
def test_constants_are_balanced_and_no_bit_of_a_float32_result_changes(name: str) -> None:
    proto = model(*BALANCED[name])
    after = balanced(proto)
    sizes = [abs(onnx.numpy_helper.to_array(t)).max() for t in after.graph.initializer if t.name[0] in "wc"]
    assert [t.name for t in after.graph.initializer if t.name[0] in "wc"].count("w_scaled") == 1
    assert all(2.0**-7 < size < 2.0**7 for size in sizes)
    assert outputs_of(after, feed(proto))[0].tobytes() == outputs_of(proto, feed(proto))[0].tobytes()


@pytest.mark.parametrize("name", BALANCED)
def test_in_float16_both_are_low_and_near_float32(name: str) -> None:
    text, constants = BALANCED[name]
    proto = model(f"{text};z=MatMul(y,v)", {**constants, "v": WEIGHTS}, "z")
    converted = amp_rewrite.convert(proto)
    assert {row.dtype for row in converted.report.rows} == {"float16"}
    assert [f.kind for f in converted.report.findings].count("scaled") == 2
    found, exact = (outputs_of(m, feed(proto))[0] for m in (amp_rewrite.emulate(converted.model).to_proto(), proto))
    assert np.abs(found - exact).max() <= 2e-3 * np.abs(exact).max()
    assert amp_rewrite.convert(converted.model).model == converted.model


@pytest.mark.parametrize(
    ("text", "constants", "outputs"),
    [
        ("h=MatMul(x,w);y=Mul(h,c)", {"w": TINY, "c": 0.5}, "y"),  # the result is tiny
        ("h=MatMul(x,w);y=Mul(h,c)", {"w": WEIGHTS, "c": 3e6}, "y"),  # it loses no digits
        ("h=MatMul(x,w);y=Mul(h,c)", {"w": TINY, "c": 3e6}, "y h"),
        ("h=MatMul(x,w);y=Mul(h,c);z=Neg(h)", {"w": TINY, "c": 3e6}, "y z"),
        ("h=MatMul(x,w);g=Gelu(h);y=Mul(g,c)".replace("Gelu", "Sigmoid"), {"w": TINY, "c": 3e6}, "y"),
        ("h=MatMul(x,w);y=Div(c,h)", {"w": TINY, "c": 3e6}, "y"),
        ("h=MatMul(x,w);y=Add(h,c)", {"w": TINY, "c": 3e6}, "y"),
        ("h=MatMul(x,w);y=Mul(h,c)", {"w": TINY, "c": np.array([1e6] * 7 + [1.0])}, "y"),  # a small one would be lost
        ("h=MatMul(x,w);y=Mul(h,c)", {"w": TINY, "c": np.inf}, "y"),
        ("h=MatMul(x,w);y=MatMul(h,c)", {"w": TINY, "c": WEIGHTS * 3e6}, "y"),
        ("h=Mul(x,c);y=MatMul(h,w)", {"c": np.full(8, 1e-6), "w": LARGE}, "y"),  # a layer scale
        ("h=Mul(x,c);y=MatMul(h,w)", {"c": 2.0**-20, "w": LARGE}, "y"),  # to the bit
    ],
)
def test_other_factors_are_left_alone(text: str, constants: dict[str, Any], outputs: str) -> None:
    proto = model(text, constants, outputs)
    assert balanced(proto).SerializeToString() == proto.SerializeToString()


def test_a_computed_bias_leaves_its_product_alone() -> None:
    proto = model("h=Gemm(x,w,x);y=Mul(h,c)", {"w": TINY, "c": 3e6})
    assert balanced(proto).SerializeToString() == proto.SerializeToString()


def test_bfloat16_has_the_range_for_tiny_constants() -> None:
    proto = model(*BALANCED["weights, scale"])
    assert balanced(proto, DType.BFLOAT16).SerializeToString() == proto.SerializeToString()
