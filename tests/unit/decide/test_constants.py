"""Ops that stay float32 because of a constant or as they are folded, and constants that saturate instead."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto

import amp_rewrite
from amp_rewrite.decide.needs.find import find_needs
from amp_rewrite.decide.reasons import MASK_FILL
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from support import cases
from support.held import held

F16, BF16 = DType.FLOAT16, DType.BFLOAT16
LOWEST = -3.4028234663852886e38
HEADS: dict[str, tuple[int, ...]] = {"q": (2, 4, 8, 64), "k": (2, 4, 64, 8), "kt": (2, 4, 8, 64), "m": (2, 1, 1, 8)}
SHAPES = {**HEADS, "image": (1, 2, 8, 8), "column": (8, 1)}
TYPES = {"seen": "bool", "ids": "int"}


def model_of(text: str, opset: int = 18, **constants: Any) -> ModelProto:
    domains = {"ai.onnx.ml": 4} if "ai.onnx.ml" in text else None
    return cases.build(text, ["y"], shapes=SHAPES, types=TYPES, constants=constants, opset=opset, domains=domains)


def view_of(text: str, opset: int = 18, **constants: Any) -> View:
    return View.of(Model.load(model_of(text, opset, **constants)))


def parsed(text: str) -> View:
    return View.of(Model.load(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> {text}')))


@pytest.mark.parametrize(("number", "expected"), [(1, []), (65504, ["y"]), (70000, ["y"]), (-1e9, ["y"]), (np.inf, [])])
def test_an_op_stays_float32_if_its_constant_reaches_the_end_of_the_range(number: float, expected: list[str]) -> None:
    view = view_of("y=Mul(x,c)", c=np.array([number * 1.0]))
    assert list(held(view)) == expected
    assert find_needs(view, F16).findings == ()


@pytest.mark.parametrize(
    ("level", "to", "expected"),
    [
        (np.full(8, 48.0), F16, []),
        (np.full(8, 48.0), BF16, ["h", "y"]),
        (np.full(8, 4800.0), F16, ["h", "y"]),
        (np.linspace(300.0, 4800.0, 8), F16, ["h", "y"]),
        (np.linspace(-4800.0, -300.0, 8), F16, ["h", "y"]),
        (np.array([0.0, -9999.0] * 4), F16, []),
    ],
)
def test_large_numbers_are_added_to_a_product_in_float32(level: Any, to: DType, expected: list[str]) -> None:
    view = view_of("b=MatMul(x,w);a=Mul(b,s);h=Add(a,m);y=Sub(h,m)", w=np.eye(8), s=np.array([2.0]), m=level)
    assert list(held(view, to)) == expected


@pytest.mark.parametrize(("least", "expected"), [(-65504.0, set()), (-1e6, {"u", "y"})])
def test_readers_of_a_label_encoders_numbers_stay_float32_where_they_overflow(least: float, expected: set[str]) -> None:
    stated = f"keys_int64s=1 2,values_floats=1.0 2.0,default_float={least}"
    view = view_of(f"l=ai.onnx.ml::LabelEncoder[{stated}](ids);u=Transpose(l);y=MatMul(u,w)", opset=20)
    assert (held(view).keys(), held(view, BF16)) == (expected, {})


@pytest.mark.parametrize(
    "text",
    [
        """g (float[1,1,2,2] x) => (float[1,1,H,W] y)
        <float[4] scales = {1, 1, 1e6, 1e6}, float[8] roi = {0, 0, 0, 0, 1, 1, 1e6, 1e6}> {
            y = Resize <coordinate_transformation_mode = "tf_crop_and_resize"> (x, roi, scales)
        }""",
        "g (float[N] x, float[1] c = {1e6}) => (float[N] y) { y = Mul (x, c) }",
        """g (float[B,H,Q,D] q, float[B,H,D,S] k) => (float[B,H,Q,S] y) <float eight = {8}> {
            raw = MatMul (q, k)  scaled = Div (raw, eight)  y = Softmax (scaled)
        }""",
    ],
    ids=["never_low", "overridable", "number_of_scores"],
)
def test_other_constants_are_no_reason(text: str) -> None:
    assert held(parsed(text)) == {}


@pytest.mark.parametrize(
    ("text", "opset"), [("s=Where(seen,x,far);y=Softmax(s)", 18), ("s=Where(seen,zero,far);y=Attention(q,kt,kt,s)", 23)]
)
def test_a_where_mask_saturates_and_its_softmax_is_free(text: str, opset: int) -> None:
    view = view_of(text, opset, zero=0.0, far=LOWEST)
    for to, bound in ((F16, "-65504"), (BF16, "-3.38953e+38")):
        found = find_needs(view, to)
        note = f"the fill value -3.40282e+38 becomes {bound} · harmless: it only selects"
        assert (found.pins, found.findings) == ({}, (Finding("saturated", "far", note),))
        assert {view.value_name(v) for v in found.saturate} == {"far", "s"}


@pytest.mark.parametrize(
    ("text", "opset"),
    [
        (
            "r=MatMul(x,w);s=Where(seen,r,far);m=ReduceMax[keepdims=1,axes=-1](s);d=Sub(s,m);e=Exp(d);"
            "t=ReduceSum[keepdims=1](e,last);y=Div(e,t)",
            17,
        ),
        ("y=Attention(q,kt,kt,mask)", 23),
    ],
    ids=["decomposed", "constant"],
)
def test_a_mask_is_free_with_the_fill_that_a_conversion_gives_it(text: str, opset: int) -> None:
    numbers = {"far": LOWEST, "mask": np.where(np.tri(8), 0, LOWEST), "last": np.array([-1])}
    report = amp_rewrite.convert(model_of(text, opset, **numbers), level="unsafe-force-all", fuse="none").report
    assert {row.dtype for row in report.rows} == {"float16"}


@pytest.mark.parametrize("to", [F16, BF16])
@pytest.mark.parametrize(
    "mask",
    [
        "n=Sub(one,m);bias=Mul(n,far)",
        "b=Cast[to=bool](m);bias=Where(b,zero,far)",
        "n=Sub(one,m);p=Mul(n,high);bias=Neg(p)",
    ],
)
def test_an_additive_mask_stays_float32_from_its_sum_to_its_softmax(mask: str, to: DType) -> None:
    text = f"{mask};raw=MatMul(q,k);scaled=Div(raw,eight);s=Add(scaled,bias);y=Softmax(s)"
    found = held(view_of(text, far=LOWEST, high=-LOWEST, one=1.0, zero=0.0, eight=8.0), to)
    assert set(found.values()) == {MASK_FILL}
    assert "s" in found
    assert not {"raw", "scaled", "n"} & found.keys()


def test_the_bounds_of_a_clip_saturate_and_carry_no_mask() -> None:
    view = view_of("c=Clip(x,far,high);a=MatMul(x,w);s=Add(a,c);y=Softmax(s)", far=LOWEST, high=1e6)
    found = find_needs(view, F16)
    assert [f.subject for f in found.findings] == ["far", "high"]
    assert found.pins == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=Add(column,eps);s=Sqrt(a);y=Div(x,s)", ["a", "s"]),  # the root of epsilon fits
        ("a=Add(column,eps);r=Pow(a,roots);y=Mul(x,r)", ["a", "r"]),
        ("a=Add(column,eps);r=Pow(a,squares);y=Mul(x,r)", []),
        ("a=Max(column,eps);y=Div(x,a)", ["a", "y"]),
        ("a=Where(seen,eps,column);y=Div(x,a)", ["a", "y"]),
        ("a=Add(column,eps);r=Reciprocal(a);y=Mul(x,r)", ["a", "r", "y"]),
        ("a=Add(column,eps);y=Div(a,x)", []),
        ("a=Add(column,eps);b=Pow(a,two);y=Mul(x,b)", []),
        ("a=Add(column,large);s=Sqrt(a);y=Div(x,s)", []),
    ],
)
def test_an_epsilon_below_the_normal_range_is_held_up_to_where_it_fits(text: str, expected: list[str]) -> None:
    numbers: dict[str, Any] = {
        "eps": 1e-5,
        "large": 1e-3,
        "roots": np.linspace(0.3, 1.5, 8),
        "squares": np.linspace(1.0, 2.0, 8),
        "two": 2.0,
    }
    view = view_of(text, **numbers)
    assert list(held(view)) == expected
    assert held(view, BF16) == {}


@pytest.mark.parametrize(
    ("number", "divided", "multiplied"), [(1e-9, True, True), (1e-5, True, False), (2.0**-13, False, False)]
)
def test_a_subnormal_divisor_is_held_and_a_factor_if_it_vanishes(
    number: float, divided: bool, multiplied: bool
) -> None:
    found = [list(held(view_of(f"y={op}(x,c)", c=number))) for op in ("Div", "Mul")]
    assert found == [["y"] * divided, ["y"] * multiplied]


@pytest.mark.parametrize(
    ("statistic", "eps", "expected"),
    [
        ({"var": [1, 1e-6]}, "1e-5", ["y"]),
        ({"var": [1, 1e6]}, "1e-5", ["y"]),
        ({"mean": [0, -1e6]}, "1e-5", ["y"]),
        ({"scale": [1, 7e4]}, "1e-5", ["y"]),
    ],
)
def test_batch_normalization_stays_float32_when_its_statistics_leave_the_range(
    statistic: dict[str, list[float]], eps: str, expected: list[str]
) -> None:
    numbers = {"scale": [1, 1], "bias": [0, 0], "mean": [0, 0], "var": [1, 1], **statistic}
    arrays: dict[str, Any] = {name: np.array(value, np.float32) for name, value in numbers.items()}
    view = view_of(f"y=BatchNormalization[epsilon={eps}](image,scale,bias,mean,var)", **arrays)
    assert list(held(view)) == expected


WEIGHTS = "<float[2,2] w = {1, 2, 3, 4}, float[2,2] table = {1, 2, 3, 4}, float[2] b = {1, 2}>"


def holds(body: str, head: str = "g (float[N,2] x) => (float[N,2] y)", weights: str = WEIGHTS) -> dict[str, str]:
    text = f'<ir_version: 8, opset_import: ["": 18]>\n{head} {weights} {{ {body} }}'
    return held(View.of(Model.load(onnx.parser.parse_model(text))))


@pytest.mark.parametrize(
    "body",
    [
        "i = Shape (x) f = Cast <to = 1> (i) m = Mul (f, b) y = Mul (x, m)",
        "r = RandomNormalLike (table) m = Mul (r, b) y = MatMul (x, m)",
        "d = DequantizeLinear (bytes, scale) m = Mul (d, b) y = MatMul (x, m)",
    ],
    ids=["a size", "random numbers", "a quantized weight"],
)
def test_what_is_not_folded_is_free(body: str) -> None:
    weights = f"{WEIGHTS[:-1]}, int8[2,2] bytes = {{1, 2, 3, 4}}, float scale = {{1}}>"
    assert holds(body, weights=weights) == {}


def test_a_weight_that_a_caller_may_replace_is_no_constant() -> None:
    head = "g (float[N,2] x, float[2,2] table) => (float[N,2] y)"
    assert holds("p = MatMul (table, w) y = MatMul (x, p)", head) == {}
