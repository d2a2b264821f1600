"""Operators of onnxruntime between shifted values: the same bits, whatever the exponents are."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from amp_rewrite.files.model import Model
from amp_rewrite.ir.op_classes import COPIES
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.shift.laws import kinds
from support.shifting import bits, sandwiched, shifted_at_random, shifted_to

RNG = np.random.default_rng(3)


def floats(*shape: int) -> NDArray[np.float32]:
    return RNG.standard_normal(shape).astype(np.float32)


def integers(*numbers: int, dtype: type = np.int32) -> NDArray[Any]:
    return np.array(numbers, dtype)


class Node(NamedTuple):
    """One op: its inputs in order, what it gives, attributes. `weights`: those inputs that are constants."""

    kind: str
    inputs: Mapping[str, Any]
    outputs: str = "y"
    attributes: Mapping[str, Any] = {}
    weights: str = ""


def qkv() -> dict[str, Any]:
    return {"q": floats(2, 3, 8), "k": floats(2, 3, 8), "v": floats(2, 3, 8)}


def grouped(more: Mapping[str, Any] = {}, *, packed: bool = False) -> dict[str, Any]:
    """Queries of four heads, keys and values of two, caches, lengths; `more` are the inputs that follow."""
    q = {"q": floats(1, 1, 64 + 64), "k": None, "v": None} if packed else {"q": floats(1, 1, 64), "k": floats(1, 1, 32)}
    q = q if packed else {**q, "v": floats(1, 1, 32)}
    caches = {"past_k": floats(1, 2, 4, 16), "past_v": floats(1, 2, 4, 16)}
    return {**q, **caches, "lengths": integers(3), "total": np.array(4, np.int32), **more}


ROTATED = {"cos": np.cos(floats(8, 8)), "sin": np.sin(floats(8, 8))}
GROUPED = {"num_heads": 4, "kv_num_heads": 2}
CACHED = "y,present_k,present_v"
NODES = {
    "attention of several heads": Node("MultiHeadAttention", qkv(), CACHED, {"num_heads": 2}),
    "a mask and a scale of its own": Node(
        "MultiHeadAttention",
        {**qkv(), "bias": None, "padding": integers(2, 3), "mask": floats(2, 2, 3, 3)},
        "y",
        {"num_heads": 2, "scale": 0.3},
    ),
    "a scale of zero": Node("MultiHeadAttention", qkv(), "y", {"num_heads": 2, "scale": 0.0, "unidirectional": 1}),
    "a bias": Node("MultiHeadAttention", {**qkv(), "b": floats(24)}, "y", {"num_heads": 2}, "b"),
    "a cache": Node(
        "MultiHeadAttention",
        {**qkv(), "b": None, "p": None, "m": None, "past_k": floats(2, 2, 5, 4), "past_v": floats(2, 2, 5, 4)},
        CACHED,
        {"num_heads": 2},
    ),
    "grouped queries": Node("GroupQueryAttention", grouped(ROTATED), CACHED, {**GROUPED, "do_rotary": 1}),
    "grouped queries, packed": Node(
        "GroupQueryAttention", grouped(ROTATED, packed=True), CACHED, {**GROUPED, "do_rotary": 1, "scale": 0.0}
    ),
    "a softcap and sinks": Node(
        "GroupQueryAttention",
        grouped({"cos": None, "sin": None, "positions": None, "mask": None, "sink": floats(4)}),
        CACHED,
        {**GROUPED, "softcap": 5.0},
    ),
    "experts": Node(
        "MoE",
        {"x": floats(3, 8), "router": floats(3, 4), "w1": floats(4, 6, 8), "b1": floats(4, 6), "w2": floats(4, 8, 6),
         "b2": floats(4, 8)},
        "y",
        {"k": 2, "activation_type": "silu", "normalize_routing_weights": 1},
        "w1 b1 w2 b2",
    ),
    "quantized experts": Node(
        "QMoE",
        {"x": floats(3, 32), "router": floats(3, 4), "w1": RNG.integers(0, 255, (4, 32, 16)).astype(np.uint8),
         "s1": np.abs(floats(4, 32)), "b1": floats(4, 32), "w2": RNG.integers(0, 255, (4, 32, 16)).astype(np.uint8),
         "s2": np.abs(floats(4, 32)), "b2": floats(4, 32)},
        "y",
        {"k": 2, "activation_type": "gelu", "expert_weight_bits": 4},
        "w1 s1 b1 w2 s2 b2",
    ),
    "a scaled product": Node("FusedMatMul", {"x": floats(4, 8), "w": floats(8, 3)}, "y", {"alpha": 0.3}),
    "weights of four bits": Node(
        "MatMulNBits",
        {"x": floats(4, 32), "w": RNG.integers(0, 255, (3, 1, 16)).astype(np.uint8), "s": np.abs(floats(3))},
        "y",
        {"K": 32, "N": 3, "bits": 4, "block_size": 32},
        "w s",
    ),
    "a sum and its norm": Node(
        "SkipLayerNormalization",
        {"x": floats(2, 3, 8), "z": floats(2, 3, 8), "g": floats(8), "b": floats(8), "c": floats(8)},
        "y,,,sum",
        {},
        "g b c",
    ),
    "a sum and its norm of RMS": Node(
        "SkipSimplifiedLayerNormalization",
        {"x": floats(2, 3, 8), "z": floats(2, 3, 8), "g": floats(8)},
        "y,,,sum",
        {"epsilon": 1e-6},
        "g",
    ),
    "a rotation": Node(
        "RotaryEmbedding",
        {"x": floats(1, 2, 3, 16), "at": np.array([[0, 1, 2]]), **ROTATED},
    ),
    "steps": Node("QuantizeLinear", {"x": floats(4, 8), "s": np.abs(floats(1))[0], "z": np.uint8(3)}, "y", {}, "s z"),
    "from steps": Node("DequantizeLinear", {"x": integers(3, 4, dtype=np.uint8), "s": np.float32(0.3)}, "y", {}, "s"),
}  # fmt: skip
ELSEWHERE = {
    "packed queries, keys and values": Node("MultiHeadAttention", {"q": floats(2, 3, 2, 3, 4)}, "y", {"num_heads": 2}),
    "packed keys and values": Node(
        "MultiHeadAttention", {"q": floats(2, 3, 8), "k": floats(2, 3, 2, 2, 4)}, "y", {"num_heads": 2}
    ),
    "norms of queries and keys": Node(
        "GroupQueryAttention",
        grouped({**ROTATED, **dict.fromkeys(("at", "mask", "sink", "ks", "vs")), "qn": floats(16), "kn": floats(16)}),
        CACHED,
        {**GROUPED, "do_rotary": 1, "qk_norm_epsilon": 1e-4},
        "qn kn",
    ),
}
"""Forms without a kernel for CPUs."""


def built(one: Node) -> tuple[ModelProto, dict[str, NDArray[Any]]]:
    arrays = {name: np.asarray(array) for name, array in one.inputs.items() if array is not None}
    node = helper.make_node(
        one.kind, [name if array is not None else "" for name, array in one.inputs.items()], one.outputs.split(","),
        domain="com.microsoft", **one.attributes,
    )  # fmt: skip
    weights = one.weights.split()
    types = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in arrays.items()}
    inputs = [helper.make_tensor_value_info(n, types[n], a.shape) for n, a in arrays.items() if n not in weights]
    made = {"QuantizeLinear": TensorProto.UINT8}.get(one.kind, TensorProto.FLOAT)
    outputs = [helper.make_tensor_value_info(n, made, None) for n in node.output if n]
    tensors = [numpy_helper.from_array(arrays[name], name) for name in weights]
    graph = helper.make_graph([node], "g", inputs, outputs, tensors)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8)
    return model, {name: array for name, array in arrays.items() if name not in weights}


@pytest.mark.parametrize("name", NODES)
def test_no_operator_of_onnxruntime_changes_a_bit_by_a_shift(name: str) -> None:
    model, feeds = built(NODES[name])
    model = sandwiched(model)
    view = View.of(Model.load(model))
    before, shifted = bits(model, feeds), False
    for seed in range(8):
        shift = shifted_at_random(view, seed)
        after = shift.view.model.to_proto()
        (node,) = (node for node in after.graph.node if node.domain)
        origins = (shift.origins.get(value) for value in (*node.input, *node.output))
        shifted |= any(origin is not None and origin.exponent for origin in origins)
        assert bits(after, feeds) == before, seed
    assert shifted


@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_attribute_takes_the_shift_of_packed_or_normed_queries(name: str) -> None:
    view = View.of(Model.load(sandwiched(built(ELSEWHERE[name])[0])))
    shift = shifted_to(view, {"q_inner": 4, "k_inner": 4})
    (node,) = (node for node in shift.view.model.proto.graph.node if node.domain)
    numbers = {a.name: a.f for a in node.attribute}
    if "qk_norm_epsilon" in numbers:
        assert numbers["qk_norm_epsilon"] == np.float32(1e-4) / 256
    else:
        assert numbers["scale"] == 0.5 * 256
    assert not shift.muls.keys() & {op.id for op in view.ops if op.domain}


def test_every_record_of_onnxruntimes_operators_is_run() -> None:
    recorded = {kind.partition("::")[2] for kind in kinds() - COPIES.keys() if kind.startswith("com.microsoft::")}
    assert recorded == {one.kind for one in NODES.values()}
