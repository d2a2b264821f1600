"""Weighted means that are divided last: both long sums stay float32, with the quotient and what lies between."""

from __future__ import annotations

import onnx.parser
import pytest

from amp_rewrite.decide.hazards.means import weighted_means
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View

HEAD = '<ir_version: 8, opset_import: ["": 18]>'
START = "a = MatMul (x, wq) b = MatMul (x, wk) v = MatMul (x, wv) q = Softplus (a) k = Softplus (b)"
SUMS = """kt = Transpose <perm = [1, 0]> (k) s = MatMul (kt, v) n = MatMul (q, s)
    t = ReduceSum (k, keys) c = Transpose <perm = [1, 0]> (t) d = MatMul (q, c) """
SIMPLE = "p = Mul (w, v) s = ReduceSum (p, keys) t = ReduceSum (w, keys) y = Div (s, t)"
PARTS = "z = MatMul (q, s) n, d = Split <axis = 1, num_outputs = 2> (z)"


def held(body: str, keys: int | str = "N", to: DType = DType.FLOAT16) -> str:
    """The results of the ops held, of queries, keys and values that are products of inputs."""
    text = f"""{HEAD} g (float[{keys},8] x, float[8,8] wq, float[8,8] wk, float[8,8] wv) => (float[{keys},8] y)
        <int64[1] keys = {{0}}, int64[1] last = {{1}}, int64 first = {{0}}, float one = {{1}}, float eps = {{0.01}}>
        {{ {START} {body} }}"""
    view = View.of(Model.load(onnx.parser.parse_model(text)))
    return " ".join(sorted({view.ops[hold.op].node.output[0] for hold in weighted_means(view, to)}))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (SUMS + "y = Div (n, d)", "c d kt n s t y"),
        (SUMS + "r = Reciprocal (d) y = Mul (n, r)", "c d kt n r s t y"),
        (SUMS + "r = Div (one, d) y = Mul (n, r)", "c d kt n r s t y"),
        (SUMS + "e = Add (d, eps) y = Div (n, e)", "c d e kt n s t y"),
        (SUMS + "e = Max (d, eps) y = Div (n, e)", "c d e kt n s t y"),
        (SUMS + "e = Add (d, d) y = Div (n, e)", ""),
        (SUMS + "u = MatMul (q, q) y = Div (u, d)", ""),
        (SIMPLE.replace("w", "k"), "p s t y"),
        (SIMPLE.replace("w", "k").replace("t = ReduceSum", "t = ReduceMean"), ""),
        ("w = Exp (b) " + SIMPLE, "p s t y"),
        ("w = Sigmoid (b) " + SIMPLE, ""),
        ("m = ReduceMax (b, keys) l = Sub (b, m) w = Exp (l) " + SIMPLE, ""),
        ("m = ReduceMin (b, keys) l = Sub (b, m) w = Exp (l) " + SIMPLE, "p s t y"),
        ("z = Mul (k, v) n, d = Split <axis = 1, num_outputs = 2> (z) y = Div (n, d)", ""),
        (f"kt = Transpose <perm = [1, 0]> (k) s = MatMul (kt, v) {PARTS} y = Div (n, d)", ""),
    ],
)
def test_two_long_sums_of_the_same_unbounded_weights_are_held(body: str, expected: str) -> None:
    assert held(body) == expected
    assert held(body, to=DType.BFLOAT16) == ""


@pytest.mark.parametrize(("body", "most"), [(SUMS + "y = Div (n, d)", 31), (SIMPLE.replace("w", "k"), 255)])
def test_sums_of_few_terms_fit(body: str, most: int) -> None:
    """Terms of 32, each of which is a product of 8, in a product of 8 again, or not."""
    assert held(body, most) == ""
    assert held(body, most + 1) == held(body)


def test_a_running_sum_has_any_number_of_terms() -> None:
    body = "p = Mul (k, v) s = CumSum (p, first) t = CumSum (k, first) y = Div (s, t)"
    assert held(body, 2) == "p s t y"
