"""Attention whose keys and values, or queries too, are one tensor of three axes: one node gives it its head axis."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, numpy_helper

from amp_rewrite.pipeline.convert import convert
from support import objections

SCORES = "t = Transpose <perm = [0, 2, 1]> (kv)  s = MatMul (q, t)  d = Mul (s, c)  p = Softmax <axis = -1> (d)"
PROJECTED = "kv = MatMul (x, w)  q = MatMul (x, v)"
OUTPUT = "y = MatMul (p, kv)"
X, Y = "float[2,4,8] x", "float[2,4,8] y"
CASES = {
    "keys and values": ("float[2,4,8] q, float[2,4,8] kv", Y, f"{SCORES} {OUTPUT}"),
    "projected keys and values": (X, Y, f"{PROJECTED} {SCORES} {OUTPUT}"),
    "queries, keys and values": (X, Y, f"q = Identity (x)  kv = Identity (x) {SCORES} {OUTPUT}"),
    "a cache": (
        "float[2,1,8] x, float[2,5,8] past",
        "float[2,1,8] y, float[2,6,8] kv",
        f"n = MatMul (x, w)  kv = Concat <axis = 1> (past, n)  q = MatMul (x, v) {SCORES} {OUTPUT}",
    ),
    "two attentions over one tensor": (
        X,
        "float[2,4,8] z",
        f"{PROJECTED} {SCORES} {OUTPUT} e = MatMul (y, t)  f = Mul (e, c)  g = Softmax <axis = -1> (f)"
        "z = MatMul (g, kv)",
    ),
    "batch and heads in one axis": (
        "float[2,3,4,8] a, float[2,3,4,8] b",
        "float[2,3,4,8] y",
        f"q = Reshape (a, flat)  kv = Reshape (b, flat) {SCORES} o = MatMul (p, kv)  y = Reshape (o, whole)",
    ),
    "names that are taken": (X, f"{Y}, float[2,4,8] kv_head", f"{PROJECTED} kv_head = Neg (kv) {SCORES} {OUTPUT}"),
}


def model(inputs: str, outputs: str, body: str) -> ModelProto:
    held = "float c = {0.35}, int64[3] flat = {6, 4, 8}, int64[4] whole = {2, 3, 4, 8}"
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> g ({inputs}) => ({outputs}) <{held}> {{ {body} }}'
    )
    rng = np.random.default_rng(5)
    weights = (numpy_helper.from_array(rng.normal(size=(8, 8)).astype(np.float32) / 3, name) for name in ("w", "v"))
    proto.graph.initializer.extend(weights)
    return proto


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("opset", ["auto", 23])
def test_one_tensor_read_as_several_operands_is_split_once(case: str, opset: str | int) -> None:
    proto = model(*CASES[case])
    result = convert(proto, opset=opset).model
    assert "Attention" in {node.op_type for node in result.graph.node}
    names = [name for node in result.graph.node for name in node.output]
    assert len(names) == len(set(names))
    rng = np.random.default_rng(6)
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in proto.graph.input}
    feeds = {name: rng.uniform(-1, 1, shape).astype(np.float32) for name, shape in shapes.items()}
    assert objections.of_outputs(objections.run(proto, feeds), objections.run(result, feeds), bound=2**-7) == []
