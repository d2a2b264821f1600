"""Constants that lose digits in the low type, biases that outweigh their product, and fills that are compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.dataflow import outweighs
from amp_rewrite.ir.view import View
from support import cases
from support.held import held

WEIGHTS = np.random.default_rng(0).standard_normal((8, 8))
FEW = np.where(np.arange(64).reshape(8, 8) % 9 == 0, 1e-9, WEIGHTS)


def view_of(text: str, **constants: Any) -> View:
    shapes = {"x": (1, 8, 8, 8)} if "Conv" in text else {}
    return View.of(Model.load(cases.build(text, ["y"], types={"seen": "bool"}, shapes=shapes, constants=constants)))


@pytest.mark.parametrize(
    ("text", "w"),
    [
        ("y=MatMul(w,x)", WEIGHTS * 2e-7),
        ("y=Gemm(x,w)", WEIGHTS * 2e-7),
        ("y=Conv(x,w)", WEIGHTS.reshape(8, 8, 1, 1) * 2e-7),
        ("y=Mul(x,w)", 1e-6),  # 17 steps of 2⁻²⁴, off by 1.3 %
        ("y=Div(x,w)", 1e-6),
    ],
)
def test_a_product_whose_weights_lose_digits_is_held_in_float16_alone(text: str, w: Any) -> None:
    view = view_of(text, w=w)
    assert (list(held(view)), list(held(view, DType.BFLOAT16))) == (["y"], [])


@pytest.mark.parametrize(
    ("text", "w"),
    [
        ("y=MatMul(x,w)", WEIGHTS),
        ("y=MatMul(x,w)", FEW),  # single small elements
        ("y=MatMul(x,w)", np.zeros((8, 8))),
        ("y=Mul(x,w)", np.full(8, 1e-6)),  # a layer scale
        ("y=Mul(x,w)", 2.0**-20),  # to the bit
        ("a=MatMul(x,v);y=Add(a,w)", 1e-6),
    ],
)
def test_single_small_elements_and_layer_scales_are_left_alone(text: str, w: Any) -> None:
    assert held(view_of(text, w=w)) == {}


@pytest.mark.parametrize(
    ("number", "by", "heavier"), [(1e5, 2048, True), (np.inf, 2048, False), (4, 11, True), (4, 12, False)]
)
def test_a_bias_outweighs_weights_by_its_norm(number: float, by: float, heavier: bool) -> None:
    view = view_of("y=Gemm(x,w,b)", w=np.diag([1.0, *[0.0] * 7]), b=np.full(8, number * 1.0))
    weight, bias = view.ops[0].inputs[1:]
    assert outweighs(view, bias, weight, DType.FLOAT16, by=by) is heavier


@pytest.mark.parametrize(
    ("bias", "expected"),
    [(np.full(8, 40.0), []), (np.full(8, 4000.0), ["h", "y"]), (np.linspace(4000.0, 8000.0, 8), ["h", "y"])],
)
def test_a_bias_that_outweighs_its_product_is_added_in_float32_up_to_the_norm(bias: Any, expected: list[str]) -> None:
    view = view_of("a=MatMul(x,w);h=Add(a,b);y=LayerNormalization(h,g)", w=WEIGHTS / 30, b=bias, g=np.ones(8))
    assert list(held(view)) == expected


@pytest.mark.parametrize(
    ("reader", "expected"), [("y=Less(f,bound)", ["f", "y"]), ("y=Less(f,far)", []), ("y=Relu(f)", [])]
)
def test_a_saturated_fill_never_meets_a_constant_beyond_the_range(reader: str, expected: list[str]) -> None:
    view = view_of(f"s=MatMul(x,w);f=Where(seen,s,least);{reader}", w=WEIGHTS, least=-3.4e38, bound=-1e30, far=-1e4)
    assert list(held(view)) == expected
