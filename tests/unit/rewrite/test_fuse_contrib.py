"""Fusion into onnxruntime's own operators: fused forms, refused forms and reasons, and equal results."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto, NodeProto, helper, numpy_helper

import amp_rewrite
from amp_rewrite.errors import PolicyError
from amp_rewrite.ir.shapes import declared_dims
from amp_rewrite.rewrite import equivalence, reference
from amp_rewrite.rewrite.equivalence import UNIT
from amp_rewrite.rewrite.reference import FORMULAS, contrib_results
from amp_rewrite.runtime.kernels import load_kernels
from amp_rewrite.runtime.providers import CUDA_ONLY
from support.contrib_models import (
    ATTENDED,
    BIASED,
    EDGES,
    ERF,
    HIDDEN,
    INFINITE,
    LAYER_NORM,
    MASKED,
    MERGED,
    NORM,
    NOTHING_SEEN,
    ONE,
    OUT,
    REST,
    RMS_NORM,
    SCORES,
    SOFTMAX,
    SPLIT,
    SQUARE,
    SUM,
    TANH,
    TURNED,
    TWO,
    Arrays,
    agree,
    attention_of,
    fused,
    model_of,
    random_feed,
)
from support.fusing import kinds, outputs_of


@pytest.mark.parametrize(
    ("body", "inputs", "opset", "expected"),
    [
        (SUM + NORM, TWO, 17, ["SkipLayerNormalization"]),
        (SUM + LAYER_NORM, TWO, 13, ["SkipLayerNormalization"]),
        (SUM + LAYER_NORM, TWO, 18, ["SkipLayerNormalization"]),
        ("t = Add (x, z)  y = LayerNormalization (t, gain)", TWO, 17, ["SkipLayerNormalization"]),
        ("r = Add (bias, x)  t = Add (r, z)  " + NORM, TWO, 17, ["SkipLayerNormalization"]),
        ("r = Add (z, bias)  t = Add (x, r)  " + NORM, TWO, 17, ["SkipLayerNormalization"]),
        (SUM + NORM, "float[2,3,4] x, float[3,4] z", 17, ["SkipLayerNormalization"]),
        ("t = Add (z, x)  " + NORM, "float[2,3,4] x, float[1,3,4] z", 17, ["SkipLayerNormalization"]),
        ("s0 = Add (x, z)  t = Cast <to = 1> (s0)  " + NORM, TWO, 17, ["SkipLayerNormalization"]),
        (SUM + RMS_NORM, TWO, 18, ["SkipSimplifiedLayerNormalization"]),
        (SUM + "y = RMSNormalization (t, gain)", TWO, 23, ["SkipSimplifiedLayerNormalization"]),
        ("r = Add (bias, x)  t = Add (r, z)  " + RMS_NORM, TWO, 18, ["SkipSimplifiedLayerNormalization"]),
        (BIASED + ERF, ONE, 13, ["BiasGelu"]),
        (BIASED + ERF, ONE, 20, ["BiasGelu"]),
        (BIASED + "y = Gelu (t)", ONE, 20, ["BiasGelu"]),
        (BIASED + TANH, ONE, 18, ["FastGelu"]),
        ("t = Relu (x)  " + ERF, ONE, 18, ["Relu", "Gelu"]),
        ("t = Relu (x)  " + TANH, ONE, 18, ["Relu", "FastGelu"]),
        ("s = Sigmoid (x)  y = Mul (x, s)", ONE, 18, ["QuickGelu"]),
        ("r = Sigmoid (x)  s = Sigmoid (r)  y = Mul (r, s)", ONE, 18, ["Sigmoid", "QuickGelu"]),
        ("t = Mul (steep, x)  s = Sigmoid (t)  y = Mul (s, x)", ONE, 18, ["QuickGelu"]),
    ],
)
def test_ops_become_an_operator_of_onnxruntime(body: str, inputs: str, opset: int, expected: list[str]) -> None:
    model = model_of(body, inputs, opset=opset)
    result, notes = fused(model)
    assert kinds(result) == expected
    assert {kind for kind, _, _ in notes} == {"fused"}
    assert (result.graph.node[-1].name, result.graph.node[-1].output[0]) == ("the_y", "y")
    assert [(o.domain, o.version) for o in result.opset_import] == [("", opset), ("com.microsoft", 1)]
    agree(model, result)


@pytest.mark.parametrize("reader", ["o = Neg (t)", "o = MatMul (t, w)"])
def test_a_sum_with_other_readers_comes_from_the_same_node(reader: str) -> None:
    model = model_of(SUM + reader + "  " + NORM, outputs=OUT + ", float[2,3,4] o")
    result, _ = fused(model)
    assert kinds(result)[0] == "SkipLayerNormalization"
    assert list(result.graph.node[0].output) == ["y", "", "", "t"]
    assert declared_dims(next(info for info in result.graph.value_info if info.name == "t")) == (2, 3, 4)
    agree(model, result)


def test_shapes_computed_for_a_reshape_are_known_from_opset_13_on() -> None:
    """As exported by torch: a residual sum after a Reshape to the computed shape of another value."""
    reshaped = """f = Flatten <axis = 2> (x)  size = Shape (x)  r = Reshape (f, size)  t = Add (r, x)  """
    model = model_of(reshaped + LAYER_NORM, "float[B,S,4] x", "float[B,S,4] y", opset=13)
    assert kinds(fused(model)[0])[-1] == "SkipLayerNormalization"


UNEQUAL = "its summands are not known to have the same shape, except for a missing batch in the second"


ROWS = "float[3,4] x, float[3,4] z"
SKIPPED: dict[str, tuple[str, str]] = {
    "not all of it is float32": ("n = Add (x, z)  t = Cast <to = 1> (n)  " + NORM, "int64[2,3,4] x, int64[2,3,4] z"),
    "its input is not known to have two or three axes, with a last axis of known size": (
        SUM + NORM,
        "float[5,2,3,4] x, float[5,2,3,4] z",
    ),
    "its scale or bias does not have one number for each of the 4 normalized elements": (
        SUM + "y = LayerNormalization <axis = 1> (t, z, z)",
        ROWS,
    ),
    "it normalizes axes other than the last": (SUM + "y = LayerNormalization <axis = 0> (t, gain)", ROWS),
    "other ops read the sum before scale is computed": (
        SUM + "o = Neg (t)  scale = Add (gain, late)  y = LayerNormalization (t, scale)",
        TWO + ", float[4] late",
    ),
    "its mean or deviation is also read": (SUM + "y, mean = LayerNormalization (t, gain)  o = Neg (mean)", TWO),
    "its statistics are not float32": (SUM + "y = LayerNormalization <stash_type = 11> (t, gain)", TWO),
}
SHAPES = ("float[A,3,4] x, float[B,3,4] z", "float[A,S,4] x, float[1,1,4] z", "float[2,3,4] x, float[4] z")


@pytest.mark.parametrize(
    ("why", "body", "inputs"),
    [*((why, *row) for why, row in SKIPPED.items()), *((UNEQUAL, SUM + NORM, shapes) for shapes in SHAPES)],
)
def test_near_misses_of_a_sum_and_norm_stay(why: str, body: str, inputs: str) -> None:
    rank = inputs.count(",") and len(re.findall(r"\[(.*?)\]", inputs)[0].split(","))
    outputs = f"float[{','.join('PQRST'[:rank])}] y"
    model = model_of(body, inputs, outputs)
    result, notes = fused(model)
    assert notes == [("not_fused", "skip_layer_normalization", f"1 match is not fused (it ends at the_y): {why}")]
    assert result.SerializeToString() == model.SerializeToString()


@pytest.mark.parametrize(
    ("body", "inputs", "reads"),
    [
        ("r = Add (x, bias)  t = Add (z, r)  ", TWO, ["x", "z"]),
        ("r = Add (x, bias)  t = Add (r, z)  ", TWO, ["x", "z"]),
        ("r = Add (z, bias)  t = Add (x, r)  ", "float[2,3,4] x, float[3,4] z", ["x", "z"]),  # a skip without a batch
    ],
)
def test_a_bias_is_added_first_to_the_operand_that_had_it(body: str, inputs: str, reads: list[str]) -> None:
    """The kernel rounds this sum, and a residual stream, which grows, would lose more digits."""
    (node,) = fused(model_of(body + NORM, inputs))[0].graph.node
    assert list(node.input) == [*reads, "gain", "shift", "bias"]


@pytest.mark.parametrize(
    ("body", "inputs"),
    [
        ("t = Add (x, z)  y = Gelu (t)", TWO),  # a sum, not a bias
        ("t = Add (x, z)  y = Gelu (t)", "float[A,B,C] x, float[4] z"),  # may broadcast to a larger shape
        ("t = Add (x, bias)  y0 = Gelu (t)  y = Mul (y0, t)", ONE),  # the activated value has another reader
        ("s = Sigmoid (x)  y = Mul (s, s)", ONE),
        ("s = Sigmoid (z)  y = Mul (x, s)", TWO),
        ("s = Sigmoid (x)  o = Mul (x, s)  y = Add (o, s)", ONE),
        ("t = Mul (bias, x)  s = Sigmoid (t)  y = Mul (s, x)", ONE),
        ("t = Transpose <perm = [0,2,1]> (z)  p = MatMul (x, t)  y = Mul (p, half)", TWO),  # fused by the runtime
        ("t = Relu (x)  y = Gelu (t)", ONE),  # the standard's operator is enough
    ],
)
def test_lookalikes_stay(body: str, inputs: str) -> None:
    outputs = "float[P,Q,R] y"
    model = model_of(body, inputs, outputs, opset=20)
    result, notes = fused(model)
    assert notes == []
    assert result.SerializeToString() == model.SerializeToString()


def test_only_operators_with_a_kernel_on_the_target_are_created() -> None:
    """In both low types, or on request only; also in float32, if the operator may stay float32."""
    lacking = {"GroupQueryAttention": "float", **dict.fromkeys(CUDA_ONLY, "bfloat16")}
    for op_type in FORMULAS:
        for name in ("float", "float16", "bfloat16"):
            why = load_kernels().refusal("com.microsoft", op_type, 1, {"T": f"tensor({name})"})
            assert (why is not None) == (lacking.get(op_type) == name)


WRONG = {
    "SkipLayerNormalization": (SUM + NORM, "epsilon", 0.0011),
    "SkipSimplifiedLayerNormalization": (SUM + RMS_NORM, "epsilon", 1.1e-5),
    "QuickGelu": ("t = Mul (steep, x)  s = Sigmoid (t)  y = Mul (s, x)", "alpha", 1.70201),
}


@pytest.mark.parametrize("op_type", WRONG)
def test_a_node_with_another_constant_fails_the_trial(op_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node is correct except for one attribute, so the proof must fail."""
    body, attribute, number = WRONG[op_type]

    def distorted(node: NodeProto, feed: Arrays) -> dict[str, np.ndarray[Any, Any]]:
        copy = NodeProto()
        copy.CopyFrom(node)
        (altered,) = (a for a in copy.attribute if a.name == attribute)
        altered.f = number
        return contrib_results(copy, feed)

    monkeypatch.setattr(reference, "contrib_results", distorted)
    monkeypatch.setattr(equivalence, "_VERIFIED", set())
    model = model_of(body, TWO if "z" in body else ONE)
    (refusal,) = (message for kind, _, message in fused(model)[1] if "differ" in message)
    assert (
        refusal.rpartition(" by ")[0] == "1 match is not fused (it ends at the_y): on random inputs the results differ"
    )


NODES: Mapping[str, tuple[dict[str, Any], list[tuple[int, ...] | None]]] = {
    "BiasGelu": ({}, [(2, 3, 8), (8,)]),
    "FastGelu": ({}, [(2, 3, 8), (8,)]),
    "FusedMatMul": ({"alpha": 0.3, "transA": 1, "transB": 1}, [(2, 5, 3), (2, 4, 5)]),
    "Gelu": ({}, [(2, 3, 8)]),
    "MultiHeadAttention": (
        {"num_heads": 2, "scale": 0.3, "unidirectional": 1},
        [(2, 5, 8), (2, 2, 5, 4), (2, 2, 5, 4), None, None, (1, 2, 5, 5)],
    ),
    "GroupQueryAttention": (
        {"num_heads": 4, "kv_num_heads": 2, "scale": 0.3, "do_rotary": 1},
        [(2, 5, 64), (2, 5, 32), (2, 5, 32), None, None, np.int32([4, 4]), np.int32([5]), (6, 8), (6, 8)],
    ),
    "RotaryEmbedding": ({"num_heads": 4}, [(2, 5, 64), np.int64([2]), (7, 8), (7, 8)]),
    "QuickGelu": ({"alpha": 1.7}, [(2, 3, 8)]),
    "SkipLayerNormalization": ({"epsilon": 0.1}, [(2, 3, 8), (2, 3, 8), (8,), (8,), (8,)]),
    "SkipSimplifiedLayerNormalization": ({"epsilon": 0.1}, [(2, 3, 8), (2, 3, 8), (8,), (8,)]),
}


@pytest.mark.parametrize("op_type", sorted(FORMULAS.keys() - CUDA_ONLY))
def test_the_formulas_match_the_runtimes_kernels(op_type: str) -> None:
    """Up to float32's roundings, in sums of at most 10 terms."""
    attributes, shapes = NODES[op_type]
    rng = np.random.default_rng(5)
    reads = [f"i{n}" if shape is not None else "" for n, shape in enumerate(shapes)]
    arrays = [
        s if isinstance(s, np.ndarray) else rng.standard_normal(s).astype(np.float32) for s in shapes if s is not None
    ]
    feed = dict(zip(filter(None, reads), arrays, strict=True))
    outputs = ["o", "", "", "total"] if op_type.startswith("Skip") else ["o"]
    node = helper.make_node(op_type, reads, outputs, domain="com.microsoft", **attributes)
    codes = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in feed.items()}
    inputs = [helper.make_tensor_value_info(name, codes[name], a.shape) for name, a in feed.items()]
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None] * 3) for name in outputs if name]
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "g", inputs, values), opset_imports=imports, ir_version=8)
    expected = contrib_results(node, {n: a.astype(np.float64) if a.dtype.kind == "f" else a for n, a in feed.items()})
    for value, actual in zip(values, outputs_of(model, feed), strict=True):
        # FastGelu's kernel rounds its two constants to float32, as does the CPU's tanh: both errors are within 1e-6.
        bound = 1e-5 if op_type == "FastGelu" else 32 * UNIT * float(np.abs(actual).max())
        np.testing.assert_allclose(actual, expected[value.name], rtol=0, atol=bound)


MASKED_BY = SCORES.replace("s =", "s0 =") + "f = Cast <to = 1> (mask)  "


ADDED = SCORES.replace("s =", "s0 =")
MASK_FOUND = ["Cast", "ReduceSum", "Cast", "Squeeze", "Where"]
ATTENTIONS: dict[str, tuple[str, str, str, list[str]]] = {
    "plain": (SCORES + SOFTMAX, MERGED, EDGES, []),
    "causal": (ADDED + "s = Add (s0, causal)  " + SOFTMAX, MERGED, SQUARE, []),
    "a bias": (ADDED + "s = Add (s0, added)  " + SOFTMAX, MERGED, EDGES, []),
    "rotated queries and keys": (
        TURNED + SCORES.replace("(keys)", "(kn)").replace("(q,", "(xn,") + SOFTMAX,
        MERGED,
        EDGES,
        [*("Reshape", "Transpose") * 3, "Neg", "Neg", "Transpose", "Reshape"],
    ),
    "heads that stay separate": (SCORES + SOFTMAX, "", EDGES, []),
    "a mask": (HIDDEN + SOFTMAX, MERGED, MASKED, [*MASK_FOUND, "Where"]),
    "a multiplied mask": (
        MASKED_BY + "g = Sub (one, f)  a = Mul (g, lowest)  s = Add (s0, a)  " + SOFTMAX,
        MERGED,
        MASKED,
        ["Cast", "Sub", "Mul", "Greater", *MASK_FOUND],
    ),
    "two biases": (MASKED_BY + "a = Add (s0, added)  s = Add (a, f)  " + SOFTMAX, MERGED, MASKED, ["Cast", "Add"]),
    "rows without keys": (INFINITE + NOTHING_SEEN, MERGED, MASKED, MASK_FOUND),
}
"""By name: scores and weights, the merge of heads, inputs, and the ops before the fused node."""


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("opset", [13, 22])
def test_attention_becomes_one_node(name: str, opset: int) -> None:
    weights, merged, inputs, before = ATTENTIONS[name]
    body = SPLIT + weights + (REST + merged if merged else "y = MatMul (h, v)")
    outputs = ATTENDED if merged else "float[2,2,3,4] y"
    after = [] if merged else ["Reshape", "Transpose"]
    expected = [*before, "MultiHeadAttention", *after, *(["Where"] if "none" in weights else [])]
    model = attention_of(body, inputs, outputs, opset)
    result, notes = fused(model)
    assert kinds(result) == expected
    assert {kind for kind, _, _ in notes} == {"fused"}
    feed: dict[str, Any] = random_feed(model)
    if "mask" in feed:
        feed["mask"] = feed["mask"] > 0
        feed["mask"][:, :, 0] = False  # a token without keys
    for first, second in zip(outputs_of(model, feed), outputs_of(result, feed), strict=True):
        np.testing.assert_allclose(second, first, rtol=0, atol=64 * UNIT * float(np.abs(first).max()))


WIDER = SPLIT.replace("v =", "v0 =") + "v = Concat <axis = 3> (v0, v0)  " + SCORES + SOFTMAX


@pytest.mark.parametrize(
    ("body", "inputs", "why"),
    [
        (HIDDEN, EDGES + ", bool[3,5] mask", "its mask does not have axes for batch and heads"),
        (HIDDEN, EDGES + ", bool[2,2,3,5] mask", "a row of its mask may hide every key, but not in every head"),
        # refused by the kernel
        (WIDER, EDGES, "its values have separate heads, and a different width from its keys"),
    ],
)
def test_near_misses_of_an_attention_stay(body: str, inputs: str, why: str) -> None:
    wider = body == WIDER
    outputs = "float[2,2,3,8] y" if wider else ATTENDED
    body = WIDER + "o = MatMul (h, v)  y = Neg (o)" if wider else SPLIT + HIDDEN + SOFTMAX + REST + MERGED
    result, notes = fused(attention_of(body, inputs, outputs))
    assert "MultiHeadAttention" not in kinds(result)
    assert ("not_fused", "multi_head_attention", f"1 match is not fused (it ends at the_o): {why}") in notes


@pytest.mark.parametrize("axis", ["", "<axis = 1>", "<axis = 3>", "<axis = -1>"])
def test_below_opset_13_a_softmax_is_over_all_axes_from_one_on(axis: str) -> None:
    body = SPLIT + SCORES + SOFTMAX.replace("<axis = -1>", axis) + REST + MERGED
    model = attention_of(body, opset=11)
    result, _ = fused(model)
    assert ("MultiHeadAttention" in kinds(result)) is (axis in ("<axis = 3>", "<axis = -1>"))
    agree(model, result)


def between_products(body: str) -> ModelProto:
    body = "x0 = MatMul (x, v0)  " + body.replace("Add (x,", "Add (x0,") + "  y1 = MatMul (y, w)"
    return model_of(body, "float[2,3,8] x, float[8,4] v0, float[2,3,4] z", OUT1)


OUT1 = "float[2,3,4] y1"


def test_no_cast_separates_a_sum_from_its_norm() -> None:
    result = amp_rewrite.convert(between_products(SUM + LAYER_NORM), fuse="contrib")
    assert kinds(result.model)[-4:] == ["MatMul", "SkipLayerNormalization", "MatMul", "Cast"]
    assert {row.op: row.dtype for row in result.report.rows} == {
        "MatMul": "float16",
        "com.microsoft::SkipLayerNormalization": "float16",
    }


@pytest.mark.parametrize("target", ["onnx", "tensorrt"])
def test_another_target_refuses_operators_of_onnxruntime(target: str) -> None:
    message = (
        f"fuse 'contrib' creates operators that only onnxruntime supports, but the target is '{target}'; use target"
        " 'ort-cuda', or fuse 'basic'"
    )
    with pytest.raises(PolicyError, match=f"^{re.escape(message)}$"):
        amp_rewrite.convert(model_of(SUM + NORM), fuse="contrib", target=target)


def test_other_parts_of_the_model_stay() -> None:
    """Metadata, docs, sparse weights, value_info."""
    model = between_products(SUM + LAYER_NORM)
    model.metadata_props.add(key="made by", value="hand")
    model.doc_string = "words"
    model.graph.node[1].metadata_props.add(key="scope", value="block")
    model.graph.node[-2].metadata_props.add(key="scope", value="block/norm")
    sparse = model.graph.sparse_initializer.add(dims=[8, 8])
    sparse.values.CopyFrom(numpy_helper.from_array(np.ones(1, np.float32), "few"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.array([19]), "few_at"))
    model.graph.node.append(helper.make_node("MatMul", ["x", "few"], ["f"], "the_f"))
    model.graph.output.append(helper.make_tensor_value_info("f", onnx.TensorProto.FLOAT, [2, 3, 8]))
    result = amp_rewrite.convert(model, fuse="contrib").model
    assert "SkipLayerNormalization" in kinds(result)
    assert [s.values.name for s in result.graph.sparse_initializer] == ["few"]
    assert result.metadata_props[0].value == "hand"
    assert result.doc_string == "words"
    (norm,) = (n for n in result.graph.node if n.op_type == "SkipLayerNormalization")
    assert [p.value for p in norm.metadata_props] == ["block/norm"]
