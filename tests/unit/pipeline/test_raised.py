"""Models that are half already: what is named is raised to float32, and nothing else changes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.pipeline.convert import convert
from support.half_models import HALF, half, raised, rules, told, weights, written

# -- what changes, and what does not -------------------------------------------------------------------


def test_a_named_op_computes_in_float32_between_two_casts() -> None:
    model = half("a = Relu (x)  b = Exp (a)  y = Relu (b)")
    assert told(raised(model, "op=Exp").model) == [
        "a = Relu(x)",
        "a_float32 = Cast<float32>(a)",
        "b = Exp(a_float32)",
        "b_float16 = Cast<float16>(b)",
        "y = Relu(b_float16)",
    ]


def test_raised_ops_beside_each_other_are_joined_without_casts() -> None:
    model = half("a = Relu (x)  b = Exp (a)  c = Tanh (b)  y = Relu (c)")
    assert told(raised(model, "op=Exp", "op=Tanh").model) == [
        "a = Relu(x)",
        "a_float32 = Cast<float32>(a)",
        "b = Exp(a_float32)",
        "c = Tanh(b)",
        "c_float16 = Cast<float16>(c)",
        "y = Relu(c_float16)",
    ]


def test_one_cast_serves_all_who_read_a_value_in_a_type() -> None:
    model = half(
        "a = Exp (x)  b = Exp (x)  c = Relu (a)  d = Neg (a)  y = Sum (b, c, d)",
    )
    assert told(raised(model, "op=Exp").model) == [
        "x_float32 = Cast<float32>(x)",
        "a = Exp(x_float32)",
        "a_float16 = Cast<float16>(a)",
        "b = Exp(x_float32)",
        "b_float16 = Cast<float16>(b)",
        "c = Relu(a_float16)",
        "d = Neg(a_float16)",
        "y = Sum(b_float16, c, d)",
    ]


def test_without_keep_a_half_model_comes_back_as_it_is() -> None:
    model = half("a = MatMul (x, w)  b = Exp (a)  c = Cast <to = 1> (b)  y = Cast <to = 10> (c)")
    assert written(convert(model).model) == written(model)


def test_an_output_that_is_read_inside_too_is_read_before_it_is_rounded() -> None:
    model = half("a = Exp (x)  y = Tanh (a)", outputs=f"{HALF} y, {HALF} a")
    assert told(raised(model, "*").model) == [
        "x_float32 = Cast<float32>(x)",
        "a_float32 = Exp(x_float32)",
        "a = Cast<float16>(a_float32)",
        "y_float32 = Tanh(a_float32)",
        "y = Cast<float16>(y_float32)",
    ]


def test_bfloat16_ops_are_raised_where_their_model_is_to_stay_bfloat16() -> None:
    """To float16, its default, the whole model would change its type."""
    model = half("a = Relu (x)  b = Exp (a)  y = Relu (b)", "bfloat16[4,4] x", "bfloat16[4,4] y")
    result = raised(model, "op=Exp", to="bfloat16")
    assert told(result.model) == [
        "a = Relu(x)",
        "a_float32 = Cast<float32>(a)",
        "b = Exp(a_float32)",
        "b_bfloat16 = Cast<bfloat16>(b)",
        "y = Relu(b_bfloat16)",
    ]
    totals = result.report.totals
    assert (totals.casts_to_low, totals.casts_to_float32) == (1, 1)


def test_raising_and_lowering_meet_in_one_plan() -> None:
    """The float32 half of the model is lowered by the lists while an op of the other half is raised."""
    body = "a = MatMul (x, w)  b = Exp (a)  c = Cast <to = 1> (b)  d = MatMul (c, c)  y = Cast <to = 10> (d)"
    assert told(raised(half(body), "op=Exp").model) == [
        "a = MatMul(x, w)",
        "a_float32 = Cast<float32>(a)",
        "b = Exp(a_float32)",
        "c = Cast<float16>(b)",
        "d = MatMul(c, c)",
        "y = Identity(d)",
    ]


def test_lowered_ops_behind_a_cast_that_goes_read_a_cast_of_its_source() -> None:
    body = "a = Exp (x)  b = Cast <to = 1> (a)  c = MatMul (b, b)  y = ReduceSum (b)"
    assert told(raised(half(body, outputs="float[1,1] y, float[8,8] c"), "op=Exp").model) == [
        "x_float32 = Cast<float32>(x)",
        "a = Exp(x_float32)",
        "a_float16 = Cast<float16>(a)",
        "c_float16 = MatMul(a_float16, a_float16)",
        "c = Cast<float32>(c_float16)",
        "y = ReduceSum(a)",
    ]


def test_shape_takes_a_raised_value_as_it_comes() -> None:
    result = raised(
        half("a = Exp (x)  s = Shape (a)  y = Tanh (a)", outputs=f"{HALF} y, int64[2] s"), "op=Exp", "op=Tanh"
    )
    assert told(result.model) == [
        "x_float32 = Cast<float32>(x)",
        "a = Exp(x_float32)",
        "s = Shape(a)",
        "y_float32 = Tanh(a)",
        "y = Cast<float16>(y_float32)",
    ]
    assert rules(result)["Shape_1"] == ("float32", "shape_follows")


# -- weights -------------------------------------------------------------------------------------------


def test_a_weight_that_others_read_keeps_its_low_version() -> None:
    result = raised(half("a = MatMul (x, w)  y = Add (a, w)"), "op=MatMul").model
    assert weights(result) == {"w": "float16", "w_float32": "float32"}
    assert told(result)[1:] == [
        "a = MatMul(x_float32, w_float32)",
        "a_float16 = Cast<float16>(a)",
        "y = Add(a_float16, w)",
    ]


def test_a_constant_is_widened_for_its_readers_even_if_it_is_named_itself() -> None:
    model = half("k = Constant <value = float16[1] {15360}> ()  a = Mul (x, k)  y = Relu (a)")
    result = raised(model, "op=Constant", "op=Mul")
    assert result.plan.bakes[0].to is DType.FLOAT
    (constant,) = [node for node in result.model.graph.node if node.op_type == "Constant"]
    assert numpy_helper.to_array(constant.attribute[0].t) == np.float32(1)
    assert raised(model, "op=Constant").plan.empty


# -- the model's own Casts -----------------------------------------------------------------------------


def test_a_cast_to_float16_that_only_raised_ops_read_goes_with_its_rounding() -> None:
    model = half("a = Tanh (x)  b = Cast <to = 10> (a)  c = Exp (b)  y = Relu (c)", inputs="float[4,4] x")
    assert told(raised(model, "op=Exp").model) == [
        "a = Tanh(x)",
        "c = Exp(a)",
        "c_float16 = Cast<float16>(c)",
        "y = Relu(c_float16)",
    ]


# -- types in attributes -------------------------------------------------------------------------------


def test_ops_that_move_a_cast_value_to_raised_ops_are_raised_so_nothing_is_rounded() -> None:
    body = "a = Cast <to = 10> (i)  b = Transpose (a)  c = Identity (b)  d = Exp (c)  y = Relu (d)"
    result = raised(half(body, "int64[8,8] i"), "op=Exp")
    assert told(result.model)[:4] == ["a = Cast<float32>(i)", "b = Transpose(a)", "c = Identity(b)", "d = Exp(c)"]
    assert rules(result)["Transpose_1"] == ("float32", "raised")


def test_what_moves_a_cast_value_to_low_ops_too_or_no_cast_value_stays_low() -> None:
    read_low = "a = Cast <to = 10> (i)  b = Transpose (a)  c = Exp (b)  y = Sum (b, c)"
    assert told(raised(half(read_low, "int64[8,8] i"), "op=Exp").model)[:2] == [
        "a = Cast<float16>(i)",
        "b = Transpose(a)",
    ]
    low_already = "b = Transpose (x)  y = Exp (b)"
    assert told(raised(half(low_already), "op=Exp").model)[:2] == ["b = Transpose(x)", "b_float32 = Cast<float32>(b)"]


# -- types in attributes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "inputs"),
    [
        ("a = RandomNormal <dtype = 10, shape = [8, 8], seed = 1.0> ()  y = Neg (a)", f"{HALF} x"),
        ("a = RandomNormalLike <dtype = 10, seed = 1.0> (i)  y = Neg (a)", "int64[8,8] i"),
        ("a = RandomNormalLike <seed = 1.0> (x)  y = Neg (a)", f"{HALF} x"),
        ("a = EyeLike <dtype = 10> (x)  y = Neg (a)", f"{HALF} x"),
        ("a = EyeLike (x)  y = Neg (a)", f"{HALF} x"),
        ("s = Shape (x)  a = ConstantOfShape <value = float16[1] {15360}> (s)  y = Neg (a)", f"{HALF} x"),
        ("a = Cast <to = 10> (i)  y = Neg (a)", "int64[8,8] i"),
    ],
)
def test_an_attribute_that_states_a_type_follows(body: str, inputs: str) -> None:
    result = raised(half(body, inputs), "*").model
    onnx.checker.check_model(result, full_check=True)
    view = View.of(Model.load(result))
    made = next(value.id for value in view.values if value.name == "a")
    assert view.dtype(made) is DType.FLOAT
