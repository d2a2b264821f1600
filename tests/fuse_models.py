"""Operators of the standard written out op by op, as ONNX text, and what tests ask of them once they are fused."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import onnx
import onnx.parser
import onnxruntime
from onnx import ModelProto

from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.fuse.canonical import canonical
from amp_rewrite.fuse.proof import UNIT
from amp_rewrite.policy import Target
from amp_rewrite.view import View

CONSTANTS = """float two = {2}, float three = {3}, float eps = {1e-5}, float one = {1}, float half = {0.5},
    float root2 = {1.41421354}, float k = {0.044715}, float c = {0.797884583}, float minus_half = {-0.5},
    float[4] gain = {1.5, -2, 0.25, 1}, float[4] shift = {0.5, 0, -1, 3}, float[1,1] wide = {1},
    int64[1] last = {-1}, int64[1] first = {0}, int64[2] both = {-2, -1}"""
CENTERED = "m = ReduceMean (x, last)  d = Sub (x, m)  p = Pow (d, two)  v = ReduceMean (p, last)  e = Add (v, eps)  "
LAYER_NORM = CENTERED + "s = Sqrt (e)  n = Div (d, s)  "
RMS_NORM = "p = Mul (x, x)  v = ReduceMean (p, last)  e = Add (v, eps)  s = Sqrt (e)  n = Div (x, s)  y = Mul (n, gain)"
ERF = "q = Div (x, root2)  b = Erf (q)  o = Add (b, one)  g = Mul (x, o)  y = Mul (g, half)"
TANH = """u = Pow (x, three)  r = Mul (k, u)  a = Add (x, r)  t = Mul (c, a)  b = Tanh (t)  o = Add (b, one)
    h = Mul (half, x)  y = Mul (h, o)"""
SOFTMAX = "m = ReduceMax (x, last)  d = Sub (x, m)  b = Exp (d)  s = ReduceSum (b, last)  y = Div (b, s)"


def model_of(body: str, opset: int = 18, outputs: str = "float[2,4] y", inputs: str = "float[2,4] x") -> ModelProto:
    if opset < 18:
        body = re.sub(r"(ReduceMean|ReduceMax) \((\w+), last\)", r"\1 <axes = [-1]> (\2)", body)
    head = f'<ir_version: 8, opset_import: ["": {opset}]>\ng ({inputs}) => ({outputs}) <{CONSTANTS}>'
    model = onnx.parser.parse_model(f"{head} {{ {body} }}")
    for node in model.graph.node:
        node.name = f"the_{node.output[0]}"
    return model


def standard(model: ModelProto, **options: object) -> tuple[ModelProto, list[tuple[str, str, str]]]:
    """The model in standard form, and what was said."""
    arguments = {"to": DType.FLOAT16, "target": Target.ORT_CUDA, **options}
    view, told = canonical(View.of(Model.load(model)), **arguments)  # type: ignore[arg-type]
    onnx.checker.check_model(view.model.proto, full_check=True)
    return view.model.to_proto(), [(f.kind, f.subject, f.message) for f in told]


def kinds(model: ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def outputs_of(model: ModelProto, feed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(feed)))


def agree(a: ModelProto, b: ModelProto, shape: tuple[int, ...] = (2, 4)) -> None:
    """Both compute in float32, in another order, each result a sum of some 10 roundings of at most its magnitude."""
    feed = {"x": np.random.default_rng(7).standard_normal(shape).astype(np.float32)}
    (first,), (second,) = outputs_of(a, feed), outputs_of(b, feed)
    np.testing.assert_allclose(second, first, rtol=0, atol=32 * UNIT * float(np.abs(first).max()))
