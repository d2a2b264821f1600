"""A sum over a handful of numbers is lowered between lowered ops; one over many, or over an unknown number, is not."""

from __future__ import annotations

import onnx.parser
import pytest
from onnx import TensorProto, helper

from amp_rewrite.pipeline.convert import convert


def dtype_of_sum(shape: tuple[int | str, ...], axes: str, made: str = "v = Relu (a)") -> str:
    """The type of a ReduceSum of a value of this shape, between two products."""
    text = f"""<ir_version: 8, opset_import: ["": 18]>
    g (float[N,8] x, float[8,64] w, float[M,5] u) => (float[K,5] y) <int64[{axes.count(",") + 1}] axes = {{{axes}}}> {{
        a = MatMul (x, w)
        {made}
        s = ReduceSum <keepdims = 1> (v, axes)
        y = MatMul (s, u)
    }}"""
    model = onnx.parser.parse_model(text)
    if shape:
        model.graph.value_info.append(helper.make_tensor_value_info("v", TensorProto.FLOAT, shape))
    return next(row.dtype for row in convert(model).report.rows if row.op == "ReduceSum")


@pytest.mark.parametrize(
    ("shape", "axes", "dtype"),
    [
        (("N", 8), "1", "float16"),
        (("N", 8), "-1", "float16"),
        ((2, 4), "0, 1", "float16"),
        (("N", 9), "1", "float32"),
        ((3, 3), "0, 1", "float32"),
        (("N", 8), "0", "float32"),
        (("N", 8), "2", "float32"),
        ((), "1", "float32"),
    ],
)
def test_a_sum_is_small_if_the_model_states_at_most_eight_terms(
    shape: tuple[int | str, ...], axes: str, dtype: str
) -> None:
    assert dtype_of_sum(shape, axes) == dtype


@pytest.mark.parametrize("made", ["v = Mul (a, a)", "two = Constant <value_float = 2.0> ()  v = Pow (a, two)"])
def test_a_sum_of_squares_is_not(made: str) -> None:
    assert dtype_of_sum(("N", 4), "1", made) == "float32"
