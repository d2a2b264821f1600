"""Standard operators decomposed into ops, as ONNX text, and checks for their fusion."""

import numpy as np
from onnx import ModelProto

from amp_rewrite.rewrite.equivalence import UNIT
from support.fusing import outputs_of, reducing

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
    return reducing(f"g ({inputs}) => ({outputs}) <{CONSTANTS}>", body, opset)


def agree(a: ModelProto, b: ModelProto, shape: tuple[int, ...] = (2, 4)) -> None:
    """Check that two models agree up to some ten float32 roundings per result."""
    feed = {"x": np.random.default_rng(7).standard_normal(shape).astype(np.float32)}
    (first,), (second,) = outputs_of(a, feed), outputs_of(b, feed)
    np.testing.assert_allclose(second, first, rtol=0, atol=32 * UNIT * float(np.abs(first).max()))
