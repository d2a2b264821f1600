"""Models that fuse into operators of onnxruntime, as ONNX text, and checks for their fusion."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from onnx import ModelProto, numpy_helper

from amp_rewrite.rewrite.equivalence import UNIT
from support.fusing import outputs_of, reducing, standard

Arrays = Mapping[str, np.ndarray[Any, Any]]

CONSTANTS = """float two = {2}, float three = {3}, float eps = {1e-5}, float one = {1}, float half = {0.5},
    float root2 = {1.41421354}, float k = {0.044715}, float c = {0.797884583}, float steep = {1.702}, float eight = {8},
    float zero = {0}, float[1,1,1,1] wide = {2},
    float[4] gain = {1.5, -2, 0.25, 1}, float[4] shift = {0.5, 0, -1, 3}, float[4] bias = {0.25, -1, 2, 0.125},
    int64[1] last = {-1}, float[4,4] w = {1, 2, 3, 4, 5, 6, 7, 8, -1, -2, -3, -4, -5, -6, -7, -8}"""
CENTERED = "m = ReduceMean (t, last)  d = Sub (t, m)  p = Pow (d, two)  v = ReduceMean (p, last)  e = Add (v, eps)  "
LAYER_NORM = CENTERED + "s = Sqrt (e)  n = Div (d, s)  g = Mul (n, gain)  y = Add (g, shift)"
RMS_NORM = "p = Mul (t, t)  v = ReduceMean (p, last)  e = Add (v, eps)  s = Sqrt (e)  n = Div (t, s)  y = Mul (n, gain)"
NORM = "y = LayerNormalization <epsilon = 0.001> (t, gain, shift)"
ERF = "q = Div (t, root2)  b = Erf (q)  o = Add (b, one)  g = Mul (t, o)  y = Mul (g, half)"
TANH = """u = Pow (t, three)  r = Mul (k, u)  a = Add (t, r)  i = Mul (c, a)  b = Tanh (i)  o = Add (b, one)
    h = Mul (half, t)  y = Mul (h, o)"""
SUM, BIASED = "t = Add (x, z)  ", "t = Add (bias, x)  "
TWO = "float[2,3,4] x, float[2,3,4] z"
ONE = "float[2,3,4] x"
OUT = "float[2,3,4] y"


def model_of(body: str, inputs: str = TWO, outputs: str = OUT, opset: int = 18) -> ModelProto:
    return reducing(f"g ({inputs}) => ({outputs}) <{CONSTANTS}>", body, opset)


def fused(model: ModelProto, **options: object) -> tuple[ModelProto, list[tuple[str, str, str]]]:
    """Return the model with operators of onnxruntime, and the findings."""
    return standard(model, **{"fuse": "contrib", **options})


def random_feed(model: ModelProto) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(7)
    shapes = {v.name: [d.dim_value or 2 for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def agree(a: ModelProto, b: ModelProto) -> None:
    """Check that two models agree up to some ten float32 roundings per result."""
    feed = random_feed(a)
    for first, second in zip(outputs_of(a, feed), outputs_of(b, feed), strict=True):
        np.testing.assert_allclose(second, first, rtol=0, atol=64 * UNIT * float(np.abs(first).max()))


SPLIT = """xs = Reshape (x, heads)  q = Transpose <perm = [0,2,1,3]> (xs)  ks = Reshape (z, heads)
    keys = Transpose <perm = [0,2,1,3]> (ks)  vs = Reshape (u, heads)  v = Transpose <perm = [0,2,1,3]> (vs)  """
SCORES = "kt = Transpose <perm = [0,1,3,2]> (keys)  p = MatMul (q, kt)  s = Mul (p, half)  "
SOFTMAX = "h = Softmax <axis = -1> (s)  "
NOTHING_SEEN = "h0 = Softmax <axis = -1> (s)  none = IsNaN (h0)  h = Where (none, zero, h0)  "
REST = "o = MatMul (h, v)  "
MERGED = "ot = Transpose <perm = [0,2,1,3]> (o)  y = Reshape (ot, flat)"
EDGES = "float[2,3,8] x, float[2,5,8] z, float[2,5,8] u"
ATTENDED = "float[2,3,8] y"
HIDDEN = SCORES.replace("s =", "s0 =") + "s = Where (mask, s0, lowest)  "
INFINITE = SCORES.replace("s =", "s0 =") + "s = Where (mask, s0, infinite)  "


def attention_of(body: str, inputs: str = EDGES, outputs: str = ATTENDED, opset: int = 18) -> ModelProto:
    model = model_of(body, inputs, outputs, opset)
    numbers = {"heads": np.array([0, 0, 2, 4]), "flat": np.array([0, 0, 8]), "zero": np.zeros((), np.float32)}
    numbers |= {"lowest": np.array(-3.4e38, np.float32), "infinite": np.array(-np.inf, np.float32)}
    numbers |= {"causal": np.where(np.tri(3), 0, np.float32(-3.4e38)).astype(np.float32)}
    numbers |= {"added": np.ones((1, 1, 3, 5), np.float32)}
    present = {t.name for t in model.graph.initializer}
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in numbers.items() if n not in present)
    return model


SQUARE = "float[2,3,8] x, float[2,3,8] z, float[2,3,8] u"
MASKED = EDGES + ", bool[2,1,3,5] mask"
TURNED = "xn = Neg (q)  kn = Neg (keys)  "  # like rotary embeddings
