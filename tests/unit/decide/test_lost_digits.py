"""Constants that lose digits in the low type, biases that outweigh their product, and fills that are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from amp_rewrite.decide.hazards.constants import large_constants, outweighs, overflow, underflow
from amp_rewrite.decide.hazards.rule import HeldOp
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from support import cases
from support.held import pins_of

WEIGHTS = np.random.default_rng(0).standard_normal((8, 8))
FEW = np.where(np.arange(64).reshape(8, 8) % 9 == 0, 1e-9, WEIGHTS)


def view_of(text: str, types: dict[str, str] | None = None, **constants: Any) -> View:
    shapes = {"x": (1, 8, 8, 8)} if "Conv" in text else None
    return View.of(Model.load(cases.build(text, ["y"], types=types, shapes=shapes, constants=constants)))


def pinned(rule: Callable[[View, DType], Iterable[HeldOp]], view: View, to: DType = DType.FLOAT16) -> str:
    return " ".join(view.ops[op].node.output[0] for op in sorted({pin.op for pin in pins_of(rule(view, to), view)}))


@pytest.mark.parametrize(
    ("text", "w"),
    [
        ("y=MatMul(x,w)", WEIGHTS * 2e-7),
        ("y=MatMul(w,x)", WEIGHTS * 2e-7),
        ("y=Gemm(x,w)", WEIGHTS * 2e-7),
        ("y=Conv(x,w)", WEIGHTS.reshape(8, 8, 1, 1) * 2e-7),
        ("y=Mul(x,w)", 1e-6),  # 17 steps of 2⁻²⁴, off by 1.3 %
        ("y=Div(x,w)", 1e-6),
    ],
)
def test_a_product_whose_weights_lose_digits_is_pinned_to_float16_alone(text: str, w: Any) -> None:
    view = view_of(text, w=w)
    assert (pinned(underflow, view), pinned(underflow, view, DType.BFLOAT16)) == ("y", "")


@pytest.mark.parametrize(
    ("text", "w"),
    [
        ("y=MatMul(x,w)", WEIGHTS),
        ("y=MatMul(x,w)", FEW),  # single small elements
        ("y=MatMul(x,w)", np.zeros((8, 8))),
        ("y=Mul(x,w)", np.full(8, 1e-6)),  # a layer scale
        ("y=Mul(x,w)", 2.0**-20),  # to the bit
        ("y=Add(x,w)", 1e-6),
    ],
)
def test_single_small_elements_and_layer_scales_are_left_alone(text: str, w: Any) -> None:
    assert pinned(underflow, view_of(text, w=w)) == ""


@pytest.mark.parametrize(("bias", "heavier"), [(1e5, True), (1.0, False), (np.inf, False)])
def test_a_bias_outweighs_weights_by_its_norm(bias: float, heavier: bool) -> None:
    view = view_of("y=Gemm(x,w,b)", w=np.eye(8), b=np.full(8, bias))
    op = view.ops[0]
    assert outweighs(view, op.inputs[2], op.inputs[1], DType.FLOAT16) is heavier


@pytest.mark.parametrize(("by", "heavier"), [(15.0, True), (17.0, False)])
def test_a_norm_grows_with_the_elements_of_a_bias(by: float, heavier: bool) -> None:
    view = view_of("y=Gemm(x,w,b)", w=np.eye(8, 16) * (np.arange(8) == 0)[:, None], b=np.full(16, 4.0))
    op = view.ops[0]
    assert outweighs(view, op.inputs[2], op.inputs[1], DType.FLOAT16, by=by) is heavier


def test_a_bias_that_outweighs_its_product_is_added_in_float32_up_to_the_norm() -> None:
    text = "a=MatMul(x,w);h=Add(a,b);y=LayerNormalization(h,g)"
    numbers = {"w": WEIGHTS / 30, "g": np.ones(8)}
    assert pinned(large_constants, view_of(text, b=np.full(8, 4000.0), **numbers)) == "h y"
    assert pinned(large_constants, view_of(text, b=np.full(8, 40.0), **numbers)) == ""


def test_a_saturated_fill_never_meets_a_constant_beyond_the_range() -> None:
    filled = "s=MatMul(x,w);f=Where(seen,s,least);"
    numbers = {"w": WEIGHTS, "least": -3.4e38, "bound": -1e30, "far": -1e4}
    seen = {"seen": "bool"}
    readers = ("y=Greater(f,bound)", "h=Mul(f,far);y=Less(h,bound)", "y=Greater(f,far)", "y=Relu(f)")
    told = [pinned(overflow, view_of(filled + reader, seen, **numbers)) for reader in readers]
    assert told == ["f y", "f h y", "", ""]
