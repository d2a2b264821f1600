"""New names of several replacements: equal contents are written once, others get names of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto, numpy_helper

import amp_rewrite
from support.fusing import kinds, outputs_of

RNG = np.random.default_rng(0)
QKV = "float[2,2,6,8] q, float[2,2,6,8] k, float[2,2,6,8] v"
PAIR = "=> (float[2,2,6,8] a, float[2,2,6,8] b) <float low={-3.4e38}>"
TWICE = """{ t=Transpose<perm=[0,1,3,2]>(k) s=MatMul(q,t) s1=SHOWN p1=Softmax(s1) a=MatMul(p1,v)
    u=MatMul(q,t) s2=SECOND p2=Softmax(s2) b=MatMul(p2,v) }"""


def model(text: str, opset: int, **constants: Any) -> ModelProto:
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> g {text}')
    stored = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    proto.graph.initializer.extend(stored)
    return proto


def error(proto: ModelProto, feed: dict[str, Any], **options: Any) -> tuple[float, ModelProto]:
    """The largest difference of emulated outputs, as a part of the largest number, and the converted model."""
    converted = amp_rewrite.convert(proto, **options).model
    twin = amp_rewrite.emulate(converted).to_proto()
    pairs = zip(outputs_of(proto, feed), outputs_of(twin, feed), strict=True)
    return max(float(np.abs(x - y).max() / np.abs(x).max()) for x, y in pairs), converted


def two_attentions(second: str, *, constant: bool, opset: int) -> tuple[ModelProto, dict[str, Any]]:
    mask = np.broadcast_to(RNG.random((2, 1, 6, 6)) < 0.5, (2, 1, 6, 6)).copy()
    mask[..., 0], mask[..., 1] = True, False
    text = f"({QKV}{'' if constant else ', bool[2,1,6,6] m'}) {PAIR} {TWICE}"
    text = text.replace("SHOWN", "Where(m,s,low)").replace("SECOND", second)
    feed = {name: RNG.standard_normal((2, 2, 6, 8)).astype(np.float32) for name in "qkv"}
    return model(text, opset, **({"m": mask} if constant else {})), feed if constant else {**feed, "m": mask}


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize(
    ("options", "opset", "op_type"), [({}, 17, "MultiHeadAttention"), ({"target": "onnx"}, 23, "Attention")]
)
def test_one_mask_in_both_senses(options: dict[str, Any], opset: int, op_type: str, constant: bool) -> None:
    proto, feed = two_attentions("Where(m,low,u)", constant=constant, opset=opset)
    off, converted = error(proto, feed, **options)
    assert kinds(converted).count(op_type) == 2
    assert off < 5e-3


@pytest.mark.parametrize(("second", "times"), [("Where(m,u,low)", 1), ("Where(m,low,u)", 2)])
def test_the_rows_of_one_mask_in_one_sense_are_counted_once(second: str, times: int) -> None:
    proto, feed = two_attentions(second, constant=False, opset=17)
    off, converted = error(proto, feed)
    assert kinds(converted).count("ReduceSum") == times
    assert off < 5e-3


GEMMS = "(float[3,768] x) => (float[3,4] y, float[3,4] z) { y=Gemm(x,w,c) z=Gemm<beta=BETA>(x,w,c) }"


@pytest.mark.parametrize(("beta", "biases"), [("0.5", 2), ("1.0", 1)])
def test_one_large_bias_of_two_products(beta: str, biases: int) -> None:
    weights = {"w": (RNG.standard_normal((768, 4)) * 0.02).astype(np.float32), "c": np.full(4, 1200, np.float32)}
    feed = {"x": RNG.standard_normal((3, 768)).astype(np.float32)}
    off, converted = error(model(GEMMS.replace("BETA", beta), 17, **weights), feed)
    assert sum("_split" in tensor.name for tensor in converted.graph.initializer) == biases
    assert off < 1e-4
