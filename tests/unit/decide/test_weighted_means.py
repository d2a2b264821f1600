"""Weighted means that are divided last: both long sums stay float32, with the quotient and what lies between."""

from __future__ import annotations

import onnx.parser
import pytest

from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from support.held import held

HEAD = '<ir_version: 8, opset_import: ["": 18]>'
WEIGHTS = ", ".join(f"float[8,8] {name} = {{{', '.join(['0.5', '-0.5'] * 32)}}}" for name in ("wq", "wk", "wv"))
START = "a = MatMul (x, wq) b = MatMul (x, wk) v = MatMul (x, wv) q = Softplus (a) k = Softplus (b)"
SUMS = """kt = Transpose <perm = [1, 0]> (k) s = MatMul (kt, v) n = MatMul (q, s)
    t = ReduceSum (k, keys) c = Transpose <perm = [1, 0]> (t) d = MatMul (q, c) """
PARTS = """kt = Transpose <perm = [1, 0]> (k) s = MatMul (kt, v) z = MatMul (q, s)
    n, d = Split <axis = 1, num_outputs = 2> (z) y = Div (n, d)"""
GUARDED = SUMS + "e = Add (d, eps) y = Div (n, e)"
SIMPLE = "p = Mul (w, v) s = ReduceSum (p, keys) t = ReduceSum (w, keys) e = Add (t, eps) y = Div (s, e)"
RUNNING = "p = Mul (k, v) s = CumSum (p, first) t = CumSum (k, first) e = Add (t, eps) y = Div (s, e)"


def holds(body: str, keys: int | str = "N", to: DType = DType.FLOAT16) -> set[str]:
    """The results of the ops held, of queries, keys and values that layers make."""
    text = f"""{HEAD} g (float[{keys},8] x) => (float[{keys},8] y)
        <{WEIGHTS}, int64[1] keys = {{0}}, int64 first = {{0}}, float one = {{1}}, float eps = {{0.01}}>
        {{ {START} {body} }}"""
    return set(held(View.of(Model.load(onnx.parser.parse_model(text))), to))


@pytest.mark.parametrize(
    ("body", "ops"),
    [
        (SUMS + "y = Div (n, d)", "c d n s t y"),
        (SUMS + "r = Reciprocal (d) y = Mul (n, r)", "c d n r s t y"),
        (SUMS + "r = Div (one, d) y = Mul (n, r)", "c d n r s t y"),
        (GUARDED, "c d e n s t y"),
        (SUMS + "e = Max (d, eps) y = Div (n, e)", "c d e n s t y"),
        (PARTS, "n s y z"),
        (SIMPLE.replace("w", "k"), "s t e y"),
        ("w = Exp (b) " + SIMPLE, "s t e y"),
        ("m = ReduceMin (b, keys) l = Sub (b, m) w = Exp (l) " + SIMPLE, "s t e y"),
        (RUNNING, "s t e y"),
    ],
)
def test_two_long_sums_of_unbounded_weights_are_held_with_the_quotient(body: str, ops: str) -> None:
    assert set(ops.split()) <= holds(body)


@pytest.mark.parametrize(
    "body",
    [
        SIMPLE.replace("w", "k").replace("t = ReduceSum", "t = ReduceMean"),
        "w = Sigmoid (b) " + SIMPLE,
        "m = ReduceMax (b, keys) l = Sub (b, m) w = Exp (l) " + SIMPLE,
        "z = Mul (k, v) n, d = Split <axis = 1, num_outputs = 2> (z) y = Div (n, d)",
    ],
)
def test_a_quotient_by_no_long_sum_of_unbounded_weights_is_not(body: str) -> None:
    assert holds(body) == set()


@pytest.mark.parametrize("body", [GUARDED, SIMPLE.replace("w", "k"), RUNNING])
def test_bfloat16_holds_the_sums(body: str) -> None:
    assert holds(body, to=DType.BFLOAT16) == set()


@pytest.mark.parametrize(("body", "most"), [(GUARDED, 255), (SIMPLE.replace("w", "k"), 2047), (RUNNING, 2047)])
def test_sums_of_few_terms_fit(body: str, most: int) -> None:
    """Terms of 32; the divisor with queries is a product of 8 such sums."""
    assert holds(body, most) == set()
    assert holds(body, most + 1) == holds(body)
