"""onnxruntime opens every converted norm.

From opset 17 on it fuses a decomposed float32 normalization with its float32 scale across a Cast of a half-precision
input, and then refuses the types of the fused node.
"""

from typing import Any

import onnx
import onnx.parser
import pytest
from onnx import ModelProto

import amp_rewrite
from support import objections

WEIGHTS = "float[8,8] w = {" + ", ".join(["0.5"] * 64) + "}, float[8] gain = {1, 2, 1, 2, 1, 2, 1, 2}"
CONSTANTS = f"<{WEIGHTS}, float two = {{2}}, float eps = {{1e-5}}, int64[1] last = {{-1}}, float one = {{1}}>"
NORM = "m = ReduceMean {axes}  d = Sub (a, m)  p = Pow (d, two)  v = ReduceMean {axes2}  "
ENDS = {
    "divided": "e = Add (v, eps)  s = Sqrt (e)  n = Div (d, s)  h = Mul (n, gain)  g = Add (h, gain)  ",
    "bounded": "e = Max (v, eps)  s = Sqrt (e)  n = Div (d, s)  h = Mul (n, gain)  g = Add (h, gain)  ",
    "scaled first": "e = Add (v, eps)  s = Sqrt (e)  n = Div (d, s)  h = Add (n, gain)  g = Mul (h, gain)  ",
}


def norm(opset: int, end: str) -> ModelProto:
    new = opset >= 18
    axes, axes2 = ("(a, last)", "(p, last)") if new else ("<axes = [-1]> (a)", "<axes = [-1]> (p)")
    body = "a = MatMul (x, w)  " + NORM.format(axes=axes, axes2=axes2) + ENDS[end] + "y = MatMul (g, w)"
    head = f'<ir_version: 8, opset_import: ["": {opset}]> g (float[4,8] x) => (float[4,8] y) {CONSTANTS}'
    return onnx.parser.parse_model(f"{head} {{ {body} }}")


@pytest.mark.parametrize("fuse", ["basic", "none"])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("opset", [13, 17, 18, 20, 23])
@pytest.mark.parametrize("options", [{}, {"keep": ["op=Sqrt"]}, {"safety": "none"}, {"level": "lower-all"}], ids=str)
def test_no_fused_norm_is_refused_by_the_runtime(opset: int, end: str, fuse: str, options: dict[str, Any]) -> None:
    result = amp_rewrite.convert(norm(opset, end), fuse=fuse, **options)
    assert not result.plan.empty
    assert objections.of_loading(result.model, ["BASIC"]) == []


def test_a_fused_norm_is_lowered_between_products() -> None:
    result = amp_rewrite.convert(norm(17, "divided"), fuse="basic")
    kinds = [node.op_type for node in result.model.graph.node]
    assert kinds == ["Cast", "MatMul", "LayerNormalization", "MatMul", "Cast"]
    assert [row.dtype for row in result.report.rows] == ["float16"] * 3
    assert [(f.kind, f.subject) for f in result.report.findings] == [("fused", "Add_9")]


def test_patterns_match_the_model_before_fusion() -> None:
    result = amp_rewrite.convert(norm(17, "divided"), fuse="basic", keep=["op=MatMul,output=y"])
    assert {row.op: row.dtype for row in result.report.rows if row.outputs != ("a",)}["MatMul"] == "float32"
    assert "LayerNormalization" in [node.op_type for node in result.model.graph.node]
