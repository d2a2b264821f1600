"""What a runtime computes once, when it loads a model, stays float32: it has no kernels to do so in half precision."""

from __future__ import annotations

import onnx.parser
import pytest

from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.pipeline.convert import convert
from support.held import held

WEIGHTS = "<float[2,2] w = {1, 2, 3, 4}, float[2,2] table = {1, 2, 3, 4}, float[2] b = {1, 2}>"


def holds(body: str, head: str = "g (float[N,2] x) => (float[N,2] y)", weights: str = WEIGHTS) -> dict[str, str]:
    text = f'<ir_version: 8, opset_import: ["": 18]>\n{head} {weights} {{ {body} }}'
    return held(View.of(Model.load(onnx.parser.parse_model(text))))


def test_arithmetic_on_constants_is_held_through_copies_and_what_reads_data_is_not() -> None:
    body = """
        t = Transpose (table)
        p = MatMul (t, w)
        s = Add (p, b)
        k = Transpose (s)
        q = MatMul (x, w)
        y = MatMul (q, k)
    """
    assert holds(body) == {"p": "folded", "s": "folded"}


def test_a_constant_node_counts_as_a_weight() -> None:
    found = holds("c = Constant <value_floats = [2.0, 3.0]> () m = Mul (table, c) y = MatMul (x, m)")
    assert found == {"m": "folded"}


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


def test_a_product_of_two_weights_is_cast_once_and_one_with_data_is_lowered() -> None:
    text = """<ir_version: 8, opset_import: ["": 18]>
    g (float[N,8] x) => (float[N,1] y) <float[8,1] w = {1, 2, 3, 4, 5, 6, 7, 8}, float[1,1] scale = {2}>
    { p = MatMul (w, scale) y = MatMul (x, p) }"""
    converted = convert(onnx.parser.parse_model(text))
    found = [(row.dtype, row.rule) for row in converted.report.rows]
    assert found == [("float32", "folded"), ("float16", "allow_root")]
    assert [cast.value for cast in converted.report.casts] == ["x", "p", "y"]
