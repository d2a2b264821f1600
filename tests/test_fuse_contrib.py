"""What becomes an operator of onnxruntime, what does not and why, and that both compute the same."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import ModelProto, NodeProto, helper, numpy_helper

import amp_rewrite
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import PolicyError
from amp_rewrite.files.model import Model
from amp_rewrite.fuse import contrib, contrib_attention_proof
from amp_rewrite.fuse.canonical import Fuse, canonical
from amp_rewrite.fuse.contrib_formula import FORMULAS, computed
from amp_rewrite.fuse.proof import UNIT
from amp_rewrite.kernels import load_kernels
from amp_rewrite.policy import Target
from amp_rewrite.reports.report import Report
from amp_rewrite.view import View

MODELS = Path(__file__).parent / "models"
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
    if opset < 18:
        body = re.sub(r"ReduceMean \((\w+), last\)", r"ReduceMean <axes = [-1]> (\1)", body)
    head = f'<ir_version: 8, opset_import: ["": {opset}]>\ng ({inputs}) => ({outputs}) <{CONSTANTS}>'
    model = onnx.parser.parse_model(f"{head} {{ {body} }}")
    for node in model.graph.node:
        node.name = f"the_{node.output[0]}"
    return model


def fused(model: ModelProto, **options: object) -> tuple[ModelProto, list[tuple[str, str, str]]]:
    """The model with operators of onnxruntime, and what was said of them."""
    arguments = {"to": DType.FLOAT16, "target": Target.ORT_CUDA, "fuse": Fuse.CONTRIB, **options}
    view, told = canonical(View.of(Model.load(model)), **arguments)  # type: ignore[arg-type]
    onnx.checker.check_model(view.model.proto, full_check=True)
    return view.model.to_proto(), [(f.kind, f.subject, f.message) for f in told]


def kinds(model: ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def run(model: ModelProto, feed: Arrays) -> list[np.ndarray[Any, Any]]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(feed)))


def random_feed(model: ModelProto) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(7)
    shapes = {v.name: [d.dim_value or 2 for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def agree(a: ModelProto, b: ModelProto) -> None:
    """Both compute in float32, in another order, each result a sum of some 10 roundings of at most its magnitude."""
    feed = random_feed(a)
    for first, second in zip(run(a, feed), run(b, feed), strict=True):
        np.testing.assert_allclose(second, first, rtol=0, atol=64 * UNIT * float(np.abs(first).max()))


# -- what is found ------------------------------------------------------------------------------------


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
        ("t = Mul (steep, x)  s = Sigmoid (t)  y = Mul (s, x)", ONE, 18, ["QuickGelu"]),
        (
            "t = Transpose <perm = [0,2,1]> (z)  y = MatMul (x, t)",
            "float[2,3,5] x, float[2,4,5] z",
            18,
            ["FusedMatMul"],
        ),
        (
            "t = Transpose <perm = [0,2,1]> (x)  y = MatMul (t, z)",
            "float[2,5,3] x, float[2,5,4] z",
            18,
            ["FusedMatMul"],
        ),
        ("t = Mul (x, half)  y = MatMul (t, w)", ONE, 18, ["FusedMatMul"]),
        ("t = MatMul (x, w)  y = Div (t, eight)", ONE, 18, ["FusedMatMul"]),
        (
            """q = Mul (x, half)  t = Transpose <perm = [0,2,1]> (z)  s = Div (t, eight)  p = MatMul (q, s)
            y = Mul (p, three)""",
            "float[2,3,5] x, float[2,4,5] z",
            18,
            ["FusedMatMul"],
        ),
    ],
)
def test_ops_become_an_operator_of_onnxruntime(body: str, inputs: str, opset: int, expected: list[str]) -> None:
    model = model_of(body, inputs, opset=opset)
    made, told = fused(model)
    assert kinds(made) == expected
    assert {kind for kind, _, _ in told} == {"fused"}
    assert (made.graph.node[-1].name, made.graph.node[-1].output[0]) == ("the_y", "y")
    agree(model, made)


def test_a_fusion_says_what_became_what() -> None:
    made, told = fused(model_of(BIASED + ERF, ONE))
    (node,) = made.graph.node
    assert (node.domain, list(node.input), list(node.output)) == ("com.microsoft", ["x", "bias"], ["y"])
    parts = "the_t, the_q, the_b, the_o, the_g, the_y"
    assert told == [("fused", "the_y", f"bias gelu: one BiasGelu in place of {parts}")]
    assert [(o.domain, o.version) for o in made.opset_import] == [("", 18), ("com.microsoft", 1)]


def test_scales_on_all_sides_of_a_product_become_one_number() -> None:
    body = "q = Mul (x, half)  s = Div (z, eight)  p = MatMul (q, s)  y = Mul (p, three)"
    (node,) = fused(model_of(body, "float[2,3,5] x, float[2,5,4] z"))[0].graph.node
    stated = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    assert stated == {"alpha": 0.5 / 8 * 3, "transA": 0, "transB": 0}


@pytest.mark.parametrize("reader", ["o = Neg (t)", "o = MatMul (t, w)"])
def test_a_sum_that_others_read_comes_from_the_same_node(reader: str) -> None:
    model = model_of(SUM + reader + "  " + NORM, outputs=OUT + ", float[2,3,4] o")
    made, _ = fused(model)
    assert kinds(made)[0] == "SkipLayerNormalization"
    assert list(made.graph.node[0].output) == ["y", "", "", "t"]
    agree(model, made)


def test_a_sum_that_leaves_the_model_keeps_its_name() -> None:
    model = model_of(SUM + NORM, outputs=OUT + ", float[2,3,4] t")
    made, _ = fused(model)
    assert kinds(made) == ["SkipLayerNormalization"]
    agree(model, made)


def test_a_norm_in_a_branch_is_fused_there() -> None:
    then = f"then_branch = t () => (float[2,3,4] y) {{ {SUM + NORM} }}"
    body = f"y0 = If (flag) <{then}, else_branch = f () => (float[2,3,4] n) {{ n = Neg (x) }}>"
    made, _ = fused(model_of(body, TWO + ", bool flag", "float[2,3,4] y0"))
    branches = {a.name: [n.op_type for n in a.g.node] for a in made.graph.node[0].attribute}
    assert branches == {"then_branch": ["SkipLayerNormalization"], "else_branch": ["Neg"]}


def test_shapes_that_a_reshape_computes_are_known_from_opset_13_on() -> None:
    """As torch writes it: a residual sum after a Reshape to what Shape and Gather say of another value."""
    reshaped = """f = Flatten <axis = 2> (x)  size = Shape (x)  r = Reshape (f, size)  t = Add (r, x)  """
    model = model_of(reshaped + LAYER_NORM, "float[B,S,4] x", "float[B,S,4] y", opset=13)
    assert kinds(fused(model)[0])[-1] == "SkipLayerNormalization"


# -- attention ----------------------------------------------------------------------------------------

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
    held = {t.name for t in model.graph.initializer}
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in numbers.items() if n not in held)
    return model


SQUARE = "float[2,3,8] x, float[2,3,8] z, float[2,3,8] u"
MASKED = EDGES + ", bool[2,1,3,5] mask"
TURNED = "xn = Neg (q)  kn = Neg (keys)  "  # as rotary positions would


@pytest.mark.parametrize(
    ("body", "inputs", "outputs", "expected"),
    [
        (SPLIT + SCORES + SOFTMAX + REST + MERGED, EDGES, ATTENDED, ["MultiHeadAttention"]),
        (
            SPLIT + SCORES.replace("s =", "s0 =") + "s = Add (s0, causal)  " + SOFTMAX + REST + MERGED,
            SQUARE,
            ATTENDED,
            ["MultiHeadAttention"],
        ),
        (
            SPLIT + SCORES.replace("s =", "s0 =") + "s = Add (s0, added)  " + SOFTMAX + REST + MERGED,
            EDGES,
            ATTENDED,
            ["MultiHeadAttention"],
        ),
        (
            SPLIT + TURNED + SCORES.replace("(keys)", "(kn)").replace("(q,", "(xn,") + SOFTMAX + REST + MERGED,
            EDGES,
            ATTENDED,
            [*("Reshape", "Transpose") * 3, "Neg", "Neg", "Transpose", "Reshape", "MultiHeadAttention"],
        ),
        (
            SPLIT + SCORES + SOFTMAX + "y = MatMul (h, v)",
            EDGES,
            "float[2,2,3,4] y",
            ["MultiHeadAttention", "Reshape", "Transpose"],
        ),
        (
            SPLIT + HIDDEN + SOFTMAX + REST + MERGED,
            MASKED,
            ATTENDED,
            ["Cast", "ReduceMax", "Cast", "Squeeze", "Where", "Where", "MultiHeadAttention"],
        ),
        (
            SPLIT + INFINITE + NOTHING_SEEN + REST + MERGED,
            MASKED,
            ATTENDED,
            ["Cast", "ReduceMax", "Cast", "Squeeze", "Where", "MultiHeadAttention", "Where"],
        ),
    ],
)
@pytest.mark.parametrize("opset", [13, 18, 22])
def test_attention_becomes_one_node(body: str, inputs: str, outputs: str, expected: list[str], opset: int) -> None:
    model = attention_of(body, inputs, outputs, opset)
    made, told = fused(model)
    assert kinds(made) == expected
    assert {kind for kind, _, _ in told} == {"fused"}
    feed: dict[str, Any] = random_feed(model)
    if "mask" in feed:
        feed["mask"] = feed["mask"] > 0
        feed["mask"][:, :, 0] = False  # a token that sees nothing
    for first, second in zip(run(model, feed), run(made, feed), strict=True):
        np.testing.assert_allclose(second, first, rtol=0, atol=64 * UNIT * float(np.abs(first).max()))


@pytest.mark.parametrize(
    ("body", "inputs", "why"),
    [
        (
            SPLIT + HIDDEN + SOFTMAX + REST + MERGED,
            EDGES + ", bool[3,5] mask",
            "its mask does not state batch, heads, every query and every key",
        ),
        (
            SPLIT + HIDDEN + SOFTMAX + REST + MERGED,
            EDGES + ", bool[2,2,3,5] mask",
            "a row of its mask may hide every key, and not in each head alike",
        ),
    ],
)
def test_an_attention_that_the_operator_does_not_quite_say_stays(body: str, inputs: str, why: str) -> None:
    made, told = fused(attention_of(body, inputs))
    assert "MultiHeadAttention" not in kinds(made)
    assert ("not_fused", "multi_head_attention", f"the one that ends in the_o: {why}") in told


def test_an_attention_with_another_number_is_refused_by_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """A must-fail twin of the proof."""

    def distorted(node: NodeProto, feed: Arrays) -> dict[str, np.ndarray[Any, Any]]:
        copy = NodeProto()
        copy.CopyFrom(node)
        next(a for a in copy.attribute if a.name == "scale").f *= 1.0001
        return computed(copy, feed)

    monkeypatch.setattr(contrib_attention_proof, "computed", distorted)
    told = fused(attention_of(SPLIT + SCORES + SOFTMAX + REST + MERGED))[1]
    assert [message.split(" by ")[0] for kind, subject, message in told if subject == "multi_head_attention"] == [
        "the one that ends in the_o: on random inputs the results differ"
    ]


# -- what is not --------------------------------------------------------------------------------------

UNEQUAL = "the summands are not known to have one shape, or the second to lack but the batch"


@pytest.mark.parametrize(
    ("body", "inputs", "why"),
    [
        (SUM + NORM, "float[A,3,4] x, float[B,3,4] z", UNEQUAL),
        (SUM + NORM, "float[A,S,4] x, float[1,1,4] z", UNEQUAL),
        (SUM + NORM, "float[2,3,4] x, float[4] z", UNEQUAL),
        (
            "n = Add (x, z)  t = Cast <to = 1> (n)  " + NORM,
            "int64[2,3,4] x, int64[2,3,4] z",
            "not all of it is float32",
        ),
        (
            SUM + NORM,
            "float[5,2,3,4] x, float[5,2,3,4] z",
            "what is normalized is not known to have two or three axes, the last of known size",
        ),
        (
            SUM + "y = LayerNormalization <axis = 1> (t, z, z)",
            "float[3,4] x, float[3,4] z",
            "its scale or bias is not one number for each of the 4 that it normalizes",
        ),
        (
            SUM + "y = LayerNormalization <axis = 0> (t, gain)",
            "float[3,4] x, float[3,4] z",
            "it is not over the last axis alone",
        ),
        (
            SUM + "o = Neg (t)  scale = Add (gain, late)  y = LayerNormalization (t, scale)",
            TWO + ", float[4] late",
            "others read the sum, before scale is made",
        ),
        (SUM + "y, mean = LayerNormalization (t, gain)  o = Neg (mean)", TWO, "its mean or deviation is read"),
        (
            SUM + "y = LayerNormalization <stash_type = 11> (t, gain)",
            TWO,
            "its statistics are not float32",
        ),
    ],
)
def test_a_sum_and_norm_that_the_operator_does_not_quite_say_stay(body: str, inputs: str, why: str) -> None:
    rank = inputs.count(",") and len(re.findall(r"\[(.*?)\]", inputs)[0].split(","))
    outputs = f"float[{','.join('PQRST'[:rank])}] y"
    model = model_of(body, inputs, outputs)
    made, told = fused(model)
    assert told == [("not_fused", "skip_layer_normalization", f"the one that ends in the_y: {why}")]
    assert made.SerializeToString() == model.SerializeToString()


@pytest.mark.parametrize(
    ("body", "inputs"),
    [
        ("t = Add (x, z)  y = Gelu (t)", TWO),  # no bias, a sum
        ("t = Add (x, z)  y = Gelu (t)", "float[A,B,C] x, float[4] z"),  # may raise the size
        ("t = Add (x, bias)  y0 = Gelu (t)  y = Mul (y0, t)", ONE),  # what is activated is read
        ("s = Sigmoid (x)  y = Mul (s, s)", ONE),
        ("s = Sigmoid (z)  y = Mul (x, s)", TWO),
        ("s = Sigmoid (x)  o = Mul (x, s)  y = Add (o, s)", ONE),
        ("t = Mul (bias, x)  s = Sigmoid (t)  y = Mul (s, x)", ONE),
        ("t = Mul (x, wide)  p = MatMul (t, w)  y = Squeeze (p, first)", ONE),  # raises the rank
        ("t = Mul (x, zero)  y = MatMul (t, w)", ONE),
        ("t = Mul (x, bias)  y = MatMul (t, w)", ONE),
        ("t = Mul (x, half)  p = MatMul (t, w)  y = Add (p, t)", ONE),
        ("t = Transpose <perm = [0,2,1]> (w3)  y = MatMul (x, t)", ONE),  # a weight: the runtime does that once
        ("t = Transpose <perm = [2,1,0]> (z)  y = MatMul (x, t)", "float[2,3,5] x, float[4,5,2] z"),
        ("y = MatMul (x, w)", ONE),
        ("t = Relu (x)  y = Gelu (t)", ONE),  # the standard's own does
    ],
)
def test_what_looks_alike_stays(body: str, inputs: str) -> None:
    outputs = "float[P,Q,R] y"
    model = model_of(body, inputs, outputs, opset=20)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((2, 4, 4), np.float32), "w3"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([0]), "first"))
    made, told = fused(model)
    assert told == []
    assert made.SerializeToString() == model.SerializeToString()


def test_what_a_pattern_names_stays() -> None:
    model = model_of(SUM + NORM)
    view = View.of(Model.load(model))
    made, told = fused(model, named={op.id for op in view.ops if op.kind == "Add"})
    assert kinds(made) == kinds(model)
    assert told == [
        ("not_fused", "skip_layer_normalization", "the one that ends in the_y: a pattern names the_t"),
    ]


def test_only_what_the_target_has_a_kernel_for_is_made() -> None:
    """Each operator that is made has one in float32 and in both low types."""
    for op_type in FORMULAS:
        for dtype in (DType.FLOAT, DType.FLOAT16, DType.BFLOAT16):
            assert load_kernels().refusal("com.microsoft", op_type, 1, {"T": f"tensor({dtype.onnx_name})"}) is None


def test_what_is_fused_later_is_not_told_as_left_apart() -> None:
    """At opset 13 the standard has no LayerNormalization, and the runtime has one with a sum."""
    told = fused(model_of(SUM + LAYER_NORM, opset=13))[1]
    assert [kind for kind, _, _ in told] == ["fused"]
    basic = fused(model_of(SUM + LAYER_NORM, opset=13), fuse=Fuse.BASIC)[1]
    assert [message for _, _, message in basic] == [
        "the one that ends in the_y: opset 13 has no LayerNormalization; opset 17 has"
    ]


# -- proof --------------------------------------------------------------------------------------------

WRONG = {
    "SkipLayerNormalization": (SUM + NORM, "epsilon", 0.0011),
    "SkipSimplifiedLayerNormalization": (SUM + RMS_NORM, "epsilon", 1.1e-5),
    "QuickGelu": ("t = Mul (steep, x)  s = Sigmoid (t)  y = Mul (s, x)", "alpha", 1.70201),
    "FusedMatMul": ("t = Mul (x, half)  y = MatMul (t, w)", "alpha", 0.50001),
}


@pytest.mark.parametrize("op_type", WRONG)
def test_a_node_with_another_number_is_refused_by_trial(op_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A must-fail twin of the proof: the node is right but for one attribute."""
    body, attribute, number = WRONG[op_type]

    def distorted(node: NodeProto, feed: Arrays) -> dict[str, np.ndarray[Any, Any]]:
        copy = NodeProto()
        copy.CopyFrom(node)
        (stated,) = (a for a in copy.attribute if a.name == attribute)
        stated.f = number
        return computed(copy, feed)

    monkeypatch.setattr(contrib, "computed", distorted)
    model = model_of(body, TWO if "z" in body else ONE)
    (told,) = (message for kind, _, message in fused(model)[1] if "differ" in message)
    assert told.split(" by ")[0] == "the one that ends in the_y: on random inputs the results differ"


NODES: Mapping[str, tuple[dict[str, Any], list[tuple[int, ...] | None]]] = {
    "BiasGelu": ({}, [(2, 3, 8), (8,)]),
    "FastGelu": ({}, [(2, 3, 8), (8,)]),
    "FusedMatMul": ({"alpha": 0.3, "transA": 1, "transB": 1}, [(2, 5, 3), (2, 4, 5)]),
    "Gelu": ({}, [(2, 3, 8)]),
    "MultiHeadAttention": (
        {"num_heads": 2, "scale": 0.3, "unidirectional": 1},
        [(2, 5, 8), (2, 2, 5, 4), (2, 2, 5, 4), None, None, (1, 2, 5, 5)],
    ),
    "QuickGelu": ({"alpha": 1.7}, [(2, 3, 8)]),
    "SkipLayerNormalization": ({"epsilon": 0.1}, [(2, 3, 8), (2, 3, 8), (8,), (8,), (8,)]),
    "SkipSimplifiedLayerNormalization": ({"epsilon": 0.1}, [(2, 3, 8), (2, 3, 8), (8,), (8,)]),
}


@pytest.mark.parametrize("op_type", sorted(FORMULAS))
def test_the_formulas_are_what_the_runtimes_kernels_compute(op_type: str) -> None:
    """In float32, so up to its roundings: 10 of the magnitude at most are summed."""
    stated, shapes = NODES[op_type]
    rng = np.random.default_rng(5)
    reads = [f"i{n}" if shape is not None else "" for n, shape in enumerate(shapes)]
    drawn = [rng.standard_normal(shape).astype(np.float32) for shape in shapes if shape is not None]
    feed = dict(zip(filter(None, reads), drawn, strict=True))
    outputs = ["o", "", "", "total"] if op_type.startswith("Skip") else ["o"]
    node = helper.make_node(op_type, reads, outputs, domain="com.microsoft", **stated)
    inputs = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, a.shape) for name, a in feed.items()]
    made = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None] * 3) for name in outputs if name]
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "g", inputs, made), opset_imports=imports, ir_version=8)
    wanted = computed(node, {name: array.astype(np.float64) for name, array in feed.items()})
    for value, got in zip(made, run(model, feed), strict=True):
        # The kernel of FastGelu rounds its two constants to float32, as the CPU computes tanh: both within 1e-6.
        bound = 1e-5 if op_type == "FastGelu" else 32 * UNIT * float(np.abs(got).max())
        np.testing.assert_allclose(got, wanted[value.name], rtol=0, atol=bound)


# -- whole conversions --------------------------------------------------------------------------------


def between_products(body: str) -> ModelProto:
    return model_of("x0 = MatMul (x, w)  " + body.replace("Add (x,", "Add (x0,") + "  y1 = MatMul (y, w)", outputs=OUT1)


OUT1 = "float[2,3,4] y1"


def test_no_cast_parts_a_sum_from_its_norm() -> None:
    made = amp_rewrite.convert(between_products(SUM + LAYER_NORM), fuse="contrib")
    assert kinds(made.model)[-4:] == ["MatMul", "SkipLayerNormalization", "MatMul", "Cast"]
    assert {row.op: row.dtype for row in made.report.rows} == {
        "MatMul": "float16",
        "com.microsoft::SkipLayerNormalization": "float16",
    }


def test_converting_twice_changes_nothing() -> None:
    once = amp_rewrite.convert(between_products(SUM + LAYER_NORM), fuse="contrib").model
    twice = amp_rewrite.convert(once, fuse="contrib")
    assert twice.plan.empty
    assert twice.model.SerializeToString() == once.SerializeToString()


def test_nothing_is_fused_where_nothing_is_lowered() -> None:
    model = model_of(SUM + NORM)
    made = amp_rewrite.convert(model, fuse="contrib")
    assert made.plan.empty
    assert made.model.SerializeToString() == model.SerializeToString()


@pytest.mark.parametrize("target", ["onnx", "tensorrt"])
def test_another_target_refuses_operators_of_onnxruntime(target: str) -> None:
    said = (
        f"fuse 'contrib' makes operators that only onnxruntime has, and the target is '{target}'; use target"
        " 'ort-cuda', or fuse 'basic'"
    )
    with pytest.raises(PolicyError, match=f"^{re.escape(said)}$"):
        amp_rewrite.convert(model_of(SUM + NORM), fuse="contrib", target=target)


def test_on_the_command_line_it_is_one_line_and_no_file(tmp_path: Path) -> None:
    onnx.save(between_products(SUM + NORM), tmp_path / "net.onnx")
    arguments = ["net.onnx", "--fuse", "contrib", "-o", "out.onnx", "-q"]
    command = [sys.executable, "-m", "amp_rewrite", *arguments]
    refused = subprocess.run([*command, "--target", "onnx"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stdout, refused.stderr) == (
        2,
        "",
        "error: fuse 'contrib' makes operators that only onnxruntime has, and the target is 'onnx'; use target"
        " 'ort-cuda', or fuse 'basic'\n",
    )
    assert [file.name for file in tmp_path.iterdir()] == ["net.onnx"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    assert "SkipLayerNormalization" in kinds(onnx.load(tmp_path / "out.onnx"))


def test_what_else_a_model_carries_stays() -> None:
    """Metadata, docs, sparse weights, value_info; training_info holds the whole model as it is."""
    model = between_products(SUM + LAYER_NORM)
    model.metadata_props.add(key="made by", value="hand")
    model.doc_string = "words"
    model.graph.node[1].metadata_props.add(key="scope", value="block")
    model.graph.node[-2].metadata_props.add(key="scope", value="block/norm")
    sparse = model.graph.sparse_initializer.add(dims=[4])
    sparse.values.CopyFrom(numpy_helper.from_array(np.ones(1, np.float32), "few"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.array([2]), "few_at"))
    model.graph.node.append(helper.make_node("Add", ["x", "few"], ["f"], "the_f"))
    model.graph.output.append(helper.make_tensor_value_info("f", onnx.TensorProto.FLOAT, [2, 3, 4]))
    made = amp_rewrite.convert(model, fuse="contrib").model
    assert "SkipLayerNormalization" in kinds(made)
    assert [s.values.name for s in made.graph.sparse_initializer] == ["few"]
    assert made.metadata_props[0].value == "hand"
    assert made.doc_string == "words"
    (norm,) = (n for n in made.graph.node if n.op_type == "SkipLayerNormalization")
    assert [p.value for p in norm.metadata_props] == ["block/norm"]

    model.training_info.add().algorithm.name = "step"
    made = amp_rewrite.convert(model, fuse="contrib").model
    assert "SkipLayerNormalization" not in kinds(made)
    assert made.training_info == model.training_info


def test_local_functions_are_inlined_before() -> None:
    text = """<ir_version: 8, opset_import: ["": 18, "own": 1]>
        g (float[2,3,4] x, float[2,3,4] z, float[4,4] w) => (float[2,3,4] y)
        { t = MatMul (x, w)  n = own.block (t, z)  y = MatMul (n, w) }
        <domain: "own", opset_import: ["": 18]>
        block (a, b) => (c) { s = Add (a, b)  c0 = Sigmoid (s)  c = Mul (s, c0) }"""
    made = amp_rewrite.convert(onnx.parser.parse_model(text), fuse="contrib").model
    assert [k for k in kinds(made) if k != "Cast"] == ["MatMul", "Add", "QuickGelu", "MatMul"]


def test_the_results_are_declared_for_those_that_do_not_know_the_operator() -> None:
    body = "a = MatMul (x, w)  t = Add (a, z)  n = Neg (t)  " + NORM + "  y1 = Relu (y)"
    made = fused(model_of(body, outputs=OUT1))[0]
    stated = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in made.graph.value_info}
    assert stated == {"y": [2, 3, 4], "t": [2, 3, 4]}


# -- data ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("largest", "dtype"), [(1.0, "float16"), (60000.0, "float32")])
@pytest.mark.parametrize("packed", [True, False])
def test_what_fusing_brings_counts_as_what_it_moves(packed: bool, largest: float, dtype: str) -> None:
    """The masks, selections and layouts around an attention were never there to be measured; what they move was."""
    end = (REST + MERGED, ATTENDED) if packed else ("y = MatMul (h, v)", "float[2,2,3,4] y")
    model = attention_of(SPLIT + HIDDEN + SOFTMAX + end[0], MASKED, end[1])
    feed: dict[str, Any] = {name: np.abs(array) + 1 for name, array in random_feed(model).items()}
    feed |= {"u": largest * feed["u"] / feed["u"].max(), "mask": np.ones((2, 1, 3, 5), bool)}
    made = amp_rewrite.convert(model, fuse="contrib", ranges=amp_rewrite.calibrate(model, feed))
    rows = {row.dtype for row in made.report.rows if row.op == "com.microsoft::MultiHeadAttention"}
    assert rows == {dtype}
    told = {f.kind for f in made.report.findings} & {"unseen", "overflow"}
    assert told == (set() if dtype == "float16" else {"overflow"})


# -- emulation ----------------------------------------------------------------------------------------

HALF_NORMS = {
    "SkipLayerNormalization": ("gain, shift, bias", "y = LayerNormalization <epsilon = 0.01> (t, gain, shift)", 18),
    "SkipSimplifiedLayerNormalization": ("gain, bias", "y = RMSNormalization <epsilon = 0.01> (t, gain)", 23),
}


def half_model(body: str, opset: int) -> ModelProto:
    """All in float16, with the runtime's operators at hand."""
    head = f'<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1]>'
    model = onnx.parser.parse_model(f"{head} g (float16[2,3,4] x, float16[2,3,4] z) => (float16[2,3,4] y) {{ {body} }}")
    for name, numbers in {"gain": [1.5, -2, 0.25, 1], "shift": [0.5, 0, -1, 3], "bias": [0.25, 9, 2, 1]}.items():
        model.graph.initializer.append(numpy_helper.from_array(np.array(numbers, np.float16), name))
    return model


@pytest.mark.parametrize("op_type", HALF_NORMS)
@pytest.mark.parametrize("scale", [1.0, 300.0, 20000.0])
def test_the_sum_of_a_norm_is_rounded_in_emulation(op_type: str, scale: float) -> None:
    """As by an Add of its own; sums beyond 65504 are infinite. The norms themselves differ by a step at most."""
    reads, norm, opset = HALF_NORMS[op_type]
    one = half_model(f"y = com.microsoft.{op_type} <epsilon = 0.01> (x, z, {reads})", opset)
    apart = half_model("r = Add (x, bias)  t = Add (r, z)  " + norm, opset)
    rng = np.random.default_rng(3)
    feed = {name: (scale * (1 + rng.random((2, 3, 4)))).astype(np.float16) for name in "xz"}
    (fused_,), (separate,) = (run(amp_rewrite.emulate(model).to_proto(), feed) for model in (one, apart))
    assert bool(np.isfinite(separate).all()) == (scale < 20000)
    np.testing.assert_array_equal(np.isfinite(fused_), np.isfinite(separate))
    finite = np.isfinite(separate)
    step = np.spacing(np.abs(separate[finite]).max())
    np.testing.assert_allclose(fused_[finite], separate[finite], rtol=0, atol=float(step))


# -- how a model was made -----------------------------------------------------------------------------


def words(made: amp_rewrite.Converted) -> dict[str, str]:
    (entry,) = (p.value for p in made.model.metadata_props if p.key == "amp_rewrite")
    return dict(word.split("=", 1) for word in entry.split(" "))


def test_the_model_and_its_report_say_what_was_asked_beyond_the_usual() -> None:
    wide = between_products(SUM + NORM)
    made = amp_rewrite.convert(wide, fuse="contrib", opset="auto", placement="mincut", lower=["op=MatMul"])
    asked = {"fuse": "contrib", "opset": "auto", "placement": "mincut:A100"}
    header = made.report.model
    assert {name: words(made)[name] for name in asked} == asked
    assert {name: getattr(header, name) for name in asked} == asked
    assert Report.from_json(made.report.to_json(), "r.json").model == header
    line = next(line for line in made.report.text().splitlines() if line.startswith("  settings"))
    assert line.endswith("safety default, fuse contrib, opset auto, placement mincut:A100")


def test_what_is_usual_is_not_stated() -> None:
    made = amp_rewrite.convert(between_products(SUM + NORM))
    assert sorted(words(made)) == ["level", "lists", "safety", "target", "to", "version"]
    header = made.report.model
    assert (header.fuse, header.opset, header.placement) == (None, None, None)
    assert amp_rewrite.convert(between_products(SUM + NORM), fuse="none").report.model.fuse == "none"


def test_a_difference_in_fusing_is_a_difference_of_reports() -> None:
    model = between_products(SUM + NORM)
    delta = amp_rewrite.diff(*(amp_rewrite.convert(model, fuse=fuse).report for fuse in ("basic", "contrib")))
    assert ("fuse", "default", "contrib") in delta.settings


# -- costs --------------------------------------------------------------------------------------------


def test_onnxruntime_is_not_imported() -> None:
    code = f"""import sys, amp_rewrite
made = amp_rewrite.convert({str(MODELS / "vit_ts17.onnx")!r}, fuse="contrib")
assert any(n.domain == "com.microsoft" for n in made.model.graph.node)
print("onnxruntime" in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_without_it_nothing_of_it_is_imported() -> None:
    code = f"""import sys, amp_rewrite
amp_rewrite.convert({str(MODELS / "vit_ts17.onnx")!r})
print([name for name in sys.modules if "contrib" in name])"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_weights_of_products_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is proved with a norm, an activation or a scale are vectors and numbers; matrices stay where they are."""
    read: Counter[int] = Counter()
    array = Model.array

    def counted(self: Model, tensor: onnx.TensorProto) -> np.ndarray[Any, Any]:
        read[len([d for d in tensor.dims if d > 1])] += 1
        return array(self, tensor)

    monkeypatch.setattr(Model, "array", counted)
    view = View.of(Model.load(MODELS / "bert_dynamo20.onnx"))
    before = sum(canonical_reads(read, view, Fuse.BASIC).values())
    after = canonical_reads(read, view, Fuse.CONTRIB)
    assert sum(after.values()) > before
    assert {rank for rank, count in (after - canonical_reads(read, view, Fuse.BASIC)).items() if count} <= {0, 1}


def canonical_reads(read: Counter[int], view: View, fuse: Fuse) -> Counter[int]:
    """How many tensors of how many axes fusing reads."""
    read.clear()
    canonical(view, DType.FLOAT16, Target.ORT_CUDA, fuse=fuse)
    return Counter(read)
