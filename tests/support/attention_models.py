"""Decomposed attentions as ONNX text, and checks for their fusion.

Each mask that may hide every key of a row does so once: there a softmax of finite fills weighs all keys equally, the
operator returns 0, and runtimes have returned either.
"""

import numpy as np
import onnx
import onnx.parser
from onnx import ModelProto, NodeProto, numpy_helper

from amp_rewrite.rewrite.equivalence import UNIT
from support.fusing import outputs_of, parsed

Q, K, V = "float[2,2,3,4] q", "float[2,2,5,4] k", "float[2,2,5,6] v"
OPERANDS = f"{Q}, {K}, {V}"
SHOWN = ["1,1,0,1,1", "0,0,0,0,0", "1,0,1,0,1"]
"""Three rows of a mask; one hides every key."""
HALF_SHOWN = ",".join([SHOWN[0], SHOWN[2], SHOWN[0]])
TRIANGLE = ",".join("1" if key <= query else "0" for query in range(5) for key in range(5))
FILLED = ",".join("0" if bit == "1" else "-3.4e38" for bit in HALF_SHOWN.split(","))
BIAS = ",".join(str((i * 7 % 11) / 8 - 0.5) for i in range(15))
CONSTANTS = f"""float root = {{0.70710678}}, float half = {{0.5}}, float two = {{2}}, float fill = {{-3.4e38}},
    float zero = {{0}}, float one = {{1}}, float minus = {{-1}}, float modest = {{-10000}}, float billion = {{-1e9}},
    bool[1,1,3,5] some = {{{HALF_SHOWN}}}, bool[1,1,5,5] past = {{{TRIANGLE}}}, float[1,1,3,5] added = {{{FILLED}}},
    float[1,1,3,5] bias = {{{BIAS}}}, bool[1,1,3,5] every = {{{",".join("1" * 15)}}},
    int64[3] merged = {{4, 5, 4}}, int64[4] parted = {{2, 2, 4, 5}}, int64[5] repeated = {{2, 1, 2, 5, 4}},
    int64[4] grouped = {{2, 2, 5, 4}}, int64[1] second = {{2}}, int64[1] last = {{-1}}"""
KEYS = "t = Transpose <perm = [0, 1, 3, 2]> (k)  "
SCORES = KEYS + "s = MatMul (q, t)  z = Mul (s, half)  "
WEIGHTS = "p = Softmax <axis = -1> (m)  y = MatMul (p, v)"
GUARDED = "p = Softmax (m)  n = IsNaN (p)  w = Where (n, zero, p)  y = MatMul (w, v)"
HIDDEN = ["Cast", "ReduceSum", "Cast", "Not", "Or"]
"""The ops that find mask rows without a visible key and show every key in them."""
BIASED = SCORES + "b = Add (z, bias)  "
SUMMED = "a = Where (mask, zero, fill)  b = Add (bias, a)  "
OLD = "a = Cast <to = 1> (ids)  b = Sub (one, a)  c = Mul (b, modest)  m = Add (z, c)  "
OLD_KINDS = ["Cast", "Sub", "Mul"]
INVERTED = "a = Cast <to = 1> (ids)  b = Sub (one, a)  c = Mul (b, fill)  m = Add (z, c)  "
"""The padding mask of many older encoders: (1 − m) · −3.4e38 of integers."""
TESTED = "a = Cast <to = 1> (ids)  b = Sub (one, a)  d = Cast <to = 9> (b)  c = Where (d, fill, b)  m = Add (z, c)  "
"""The mask of many older decoders: 1 − m, replaced by −3.4e38 where it is not 0."""
ZEROED = ["Attention", "Where"]
MASK = ", bool[2,1,3,5] mask"


def model_of(body: str, more: str = "", opset: int = 23, **shapes: str) -> ModelProto:
    inputs = shapes.get("inputs", OPERANDS) + more
    head = f'<ir_version: 10, opset_import: ["": {opset}]> g ({inputs}) => ({shapes.get("output", "float[2,2,3,6] y")})'
    constants = CONSTANTS.replace("-3.4e38", "-3.4028234663852886e+38")
    model = parsed(f"{head} <{constants}> {{ {body} }}")
    if "inf" in body:
        model.graph.initializer.append(numpy_helper.from_array(np.array(-np.inf, np.float32), "inf"))
    return model


def attention(model: ModelProto) -> NodeProto:
    (node,) = [node for node in model.graph.node if node.op_type == "Attention"]
    return node


def feed_of(model: ModelProto, seed: int = 0) -> dict[str, np.ndarray]:
    """Return normally distributed inputs; masks repeat the three rows."""
    rng, feed = np.random.default_rng(seed), {}
    for value in model.graph.input:
        shape = [d.dim_value or {"b": 2, "n": 3}[d.dim_param] for d in value.type.tensor_type.shape.dim]
        feed[value.name] = rng.standard_normal(shape).astype(np.float32)
        if shape and value.type.tensor_type.elem_type == onnx.TensorProto.BOOL:
            rows = np.array([row.split(",") for row in SHOWN], int).astype(bool)
            feed[value.name] = np.resize(rows, (*shape[:-1], 5))[..., : shape[-1]]
        if value.type.tensor_type.elem_type == onnx.TensorProto.INT64:
            feed[value.name] = rng.integers(0, 2, shape)
            feed[value.name][-1] = 0
    return feed


def agree(before: ModelProto, after: ModelProto) -> None:
    """Check that two models agree up to some ten float32 roundings of scores up to ten, which scale the weights."""
    feed = feed_of(before)
    for first, second in zip(outputs_of(before, feed), outputs_of(after, feed), strict=True):
        assert not np.isnan(first).any()
        np.testing.assert_allclose(second, first, rtol=0, atol=128 * UNIT * float(np.abs(first).max()))


def unused(model: ModelProto) -> list[str]:
    """Return the unused initializers of the test models, which stay."""
    read = {name for node in model.graph.node for name in node.input}
    return [t.name for t in model.graph.initializer if t.name not in read]


PLAIN = KEYS + "m = MatMul (q, t)  " + WEIGHTS
