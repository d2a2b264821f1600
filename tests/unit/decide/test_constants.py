"""Constants and quantizers: ops kept in float32 by them, and constants that saturate instead."""

import re
from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto

import amp_rewrite
from amp_rewrite.decide import reasons
from amp_rewrite.decide.needs.find import find_needs
from amp_rewrite.decide.reasons import MASK_FILL
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.files.model import Model
from amp_rewrite.ir.patterns.clusters import integer_ops
from amp_rewrite.ir.view import View
from amp_rewrite.pipeline.conversion import Converted
from amp_rewrite.pipeline.convert import convert
from support import cases
from support.pins import pinned

F16, BF16 = DType.FLOAT16, DType.BFLOAT16
LOWEST = -3.4028234663852886e38
KEYS = {"k": (2, 4, 64, 8), "kt": (2, 4, 8, 64), "long": (2, 4, 16, 64)}
HEADS: dict[str, tuple[int, ...]] = {"q": (2, 4, 8, 64), **KEYS, "m": (2, 1, 1, 8)}
SHAPES = {**HEADS, "image": (1, 2, 8, 8), "column": (8, 1), "pair": (8, 2)}
TYPES = {"seen": "bool", "ids": "int"}


def model_of(text: str, opset: int = 18, **constants: Any) -> ModelProto:
    domains = {"ai.onnx.ml": 4} if "ai.onnx.ml" in text else None
    return cases.build(text, ["y"], shapes=SHAPES, types=TYPES, constants=constants, opset=opset, domains=domains)


def view_of(text: str, opset: int = 18, **constants: Any) -> View:
    return View.of(Model.load(model_of(text, opset, **constants)))


def parsed(text: str) -> View:
    return View.of(Model.load(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> {text}')))


LEVEL = "b=MatMul(x,w);a=Mul(b,two);h=Add(a,c);y=Sub(h,c)"
ENCODED = "l=ai.onnx.ml::LabelEncoder[keys_int64s=1 2,values_floats=1.0 2.0,default_float=LEAST](ids);u=Transpose(l)"
NORM = "y=BatchNormalization[epsilon=1e-5](image,one,nought,nought,one)"
NUMBERS: dict[str, Any] = {
    "w": np.eye(8),
    "eps": 1e-5,
    "large": 1e-3,
    "roots": np.linspace(0.3, 1.5, 8),
    "squares": np.linspace(1.0, 2.0, 8),
    "two": 2.0,
    "one": np.ones(2),
    "nought": np.zeros(2),
    "table": np.ones((8, 8)),
    "bytes": np.ones((8, 8), np.int8),
    "scale": np.float32(1),
}


@pytest.mark.parametrize(
    ("text", "c", "float16", "bfloat16"),
    [
        ("y=Mul(x,c)", 1.0, "", ""),
        ("y=Mul(x,c)", 65504.0, "y", ""),
        ("y=Mul(x,c)", 70000.0, "y", ""),
        ("y=Mul(x,c)", -1e9, "y", ""),
        ("y=Mul(x,c)", np.inf, "", ""),
        ("y=Mul(x,c)", 1e-9, "y", ""),  # it becomes zero
        ("y=Mul(x,c)", 1e-5, "", ""),
        ("y=Div(x,c)", 1e-9, "y", ""),
        ("y=Div(x,c)", 1e-5, "y", ""),  # a subnormal divisor
        ("y=Div(x,c)", 2.0**-13, "", ""),
        # Large numbers added to a product.
        (LEVEL, np.full(8, 48.0), "", "h y"),
        (LEVEL, np.full(8, 4800.0), "h y", "h y"),
        (LEVEL, np.linspace(300.0, 4800.0, 8), "h y", "h y"),
        (LEVEL, np.linspace(-4800.0, -300.0, 8), "h y", "h y"),
        (LEVEL, np.array([0.0, -9999.0] * 4), "", ""),
        # The minimum of two numbers is at most the known one.
        ("s=Sigmoid(column);m=Min(s,c);y=Mul(m,c)", 300.0, "", ""),
        # Numbers of a label encoder.
        (ENCODED.replace("LEAST", "-65504.0") + ";y=MatMul(u,w)", None, "", ""),
        (ENCODED.replace("LEAST", "-1e6") + ";y=MatMul(u,w)", None, "u y", ""),
        # An epsilon below the normal range, up to where it fits.
        ("a=Add(column,eps);s=Sqrt(a);y=Div(x,s)", None, "a s", ""),
        ("a=Add(column,eps);r=Pow(a,roots);y=Mul(x,r)", None, "a r", ""),
        ("a=Add(column,eps);r=Pow(a,squares);y=Mul(x,r)", None, "", ""),
        ("a=Max(column,eps);y=Div(x,a)", None, "a y", ""),
        ("a=Where(seen,eps,column);y=Div(x,a)", None, "a y", ""),
        ("a=Add(column,eps);r=Reciprocal(a);y=Mul(x,r)", None, "a r y", ""),
        ("a=Add(column,eps);y=Div(a,x)", None, "", ""),
        ("a=Add(column,eps);b=Pow(a,two);y=Mul(x,b)", None, "", ""),
        ("a=Add(column,large);s=Sqrt(a);y=Div(x,s)", None, "", ""),
        # Statistics beyond the range.
        (NORM, None, "", ""),
        (NORM.replace("nought,one)", "nought,c)"), np.array([1, 1e-6]), "y", ""),
        (NORM.replace("nought,one)", "nought,c)"), np.array([1, 1e6]), "y", ""),
        (NORM.replace("nought,one)", "c,one)"), np.array([0, -1e6]), "y", "y"),
        (NORM.replace("image,one", "image,c"), np.array([1, 7e4]), "y", ""),
        # Sizes, random numbers and quantized weights are not folded.
        ("i=Shape(pair);f=Cast[to=float](i);m=Mul(f,one);y=Mul(pair,m)", None, "", ""),
        ("r=RandomNormalLike(table);m=Mul(r,two);y=MatMul(x,m)", None, "", ""),
        ("d=DequantizeLinear(bytes,scale);m=Mul(d,two);y=MatMul(x,m)", None, "", ""),
    ],
)
def test_an_op_stays_float32_if_its_constants_do_not_fit(text: str, c: Any, float16: str, bfloat16: str) -> None:
    numbers = {**NUMBERS, "c": c}
    read = {name: numbers[name] for name in set(re.findall(r"\w+", text)) & numbers.keys()}
    view = view_of(text, 20 if "ai.onnx.ml" in text else 18, **read)
    assert [" ".join(pinned(view, to)) for to in (F16, BF16)] == [float16, bfloat16]
    assert find_needs(view, F16).findings == ()


@pytest.mark.parametrize(
    "text",
    [
        """g (float[1,1,2,2] x) => (float[1,1,H,W] y)
        <float[4] scales = {1, 1, 1e6, 1e6}, float[8] roi = {0, 0, 0, 0, 1, 1, 1e6, 1e6}> {
            y = Resize <coordinate_transformation_mode = "tf_crop_and_resize"> (x, roi, scales)
        }""",
        "g (float[N] x, float[1] c = {1e6}) => (float[N] y) { y = Mul (x, c) }",
        """g (float[B,H,Q,D] q, float[B,H,D,S] k) => (float[B,H,Q,S] y) <float eight = {8}> {
            raw = MatMul (q, k)  scaled = Div (raw, eight)  y = Softmax (scaled)
        }""",
    ],
    ids=["never_low", "overridable", "number_of_scores"],
)
def test_other_constants_are_no_reason(text: str) -> None:
    assert pinned(parsed(text)) == {}


@pytest.mark.parametrize(
    ("text", "opset"), [("s=Where(seen,x,far);y=Softmax(s)", 18), ("s=Where(seen,zero,far);y=Attention(q,kt,kt,s)", 23)]
)
def test_a_where_mask_saturates_and_its_softmax_is_unconstrained(text: str, opset: int) -> None:
    view = view_of(text, opset, zero=0.0, far=LOWEST)
    for to, bound in ((F16, "-65504"), (BF16, "-3.38953e+38")):
        found = find_needs(view, to)
        note = f"the fill value -3.40282e+38 becomes {bound} · harmless: it only selects"
        assert (found.pins, found.findings) == ({}, (Finding("saturated", "far", note),))
        assert {view.value_name(v) for v in found.saturate} == {"far", "s"}


@pytest.mark.parametrize(
    ("text", "opset"),
    [
        (
            "r=MatMul(x,w);s=Where(seen,r,far);m=ReduceMax[keepdims=1,axes=-1](s);d=Sub(s,m);e=Exp(d);"
            "t=ReduceSum[keepdims=1](e,last);y=Div(e,t)",
            17,
        ),
        ("y=Attention(q,kt,kt,mask)", 23),
    ],
    ids=["decomposed", "constant"],
)
def test_a_mask_is_unconstrained_by_the_fill_of_a_conversion(text: str, opset: int) -> None:
    numbers = {"far": LOWEST, "mask": np.where(np.tri(8), 0, LOWEST), "last": np.array([-1])}
    report = amp_rewrite.convert(model_of(text, opset, **numbers), level="unsafe-force-all", fuse="none").report
    assert {row.dtype for row in report.rows} == {"float16"}


@pytest.mark.parametrize("to", [F16, BF16])
@pytest.mark.parametrize(
    "mask",
    [
        "n=Sub(one,m);bias=Mul(n,far)",
        "b=Cast[to=bool](m);bias=Where(b,zero,far)",
        "n=Sub(one,m);p=Mul(n,high);bias=Neg(p)",
    ],
)
def test_an_additive_mask_stays_float32_from_its_sum_to_its_softmax(mask: str, to: DType) -> None:
    text = f"{mask};raw=MatMul(q,k);scaled=Div(raw,eight);s=Add(scaled,bias);y=Softmax(s)"
    found = pinned(view_of(text, far=LOWEST, high=-LOWEST, one=1.0, zero=0.0, eight=8.0), to)
    assert set(found.values()) == {MASK_FILL}
    assert "s" in found
    assert not {"raw", "scaled", "n"} & found.keys()


@pytest.mark.parametrize(("first", "expected"), [(0, {"y": reasons.POSITION}), (-120, {})])
def test_an_attention_with_a_large_bias_at_the_best_key_stays_float32(first: float, expected: dict[str, str]) -> None:
    bias = np.tile(np.linspace(first, first + 120, 16), (8, 1))
    assert pinned(view_of("y=Attention(q,long,long,bias)", 23, bias=bias)) == expected


def test_the_bounds_of_a_clip_saturate_without_a_mask() -> None:
    view = view_of("c=Clip(x,far,high);a=MatMul(x,w);s=Add(a,c);y=Softmax(s)", far=LOWEST, high=1e6)
    found = find_needs(view, F16)
    assert [f.subject for f in found.findings] == ["far", "high"]
    assert found.pins == {}


def test_a_weight_that_a_caller_may_replace_is_not_a_constant() -> None:
    weights = "<float[2,2] table = {1, 2, 3, 4}, float[2,2] w = {1, 2, 3, 4}>"
    head = f"g (float[N,2] x, float[2,2] table) => (float[N,2] y) {weights}"
    assert pinned(parsed(f"{head} {{ p = MatMul (table, w) y = MatMul (x, p) }}")) == {}


INPUTS = "int8[8,8] i, float[8,8] x"
CODES = "a = DequantizeLinear (i, s, z)  b = DequantizeLinear (c, s, z)"
HEAD = '<ir_version: 10, opset_import: ["": 21]>'


def model(text: str, results: str = "int8[8,8] y") -> onnx.ModelProto:
    """Parse a model; `i` are codes, `x` is float32, `w` and `c` are weights, `s` and `z` quantize."""
    proto = onnx.parser.parse_model(
        f"{HEAD} g ({INPUTS}) => ({results}) <float s = {{0.1}}, int8 z = {{0}}> {{ {text} }}"
    )
    for name, dtype in (("w", onnx.TensorProto.FLOAT), ("c", onnx.TensorProto.INT8)):
        proto.graph.initializer.append(onnx.helper.make_tensor(name, dtype, [8, 8], [1] * 64))
    return proto


def typed(text: str, results: str = "int8[8,8] y", **options: str) -> tuple[Converted, dict[str, str]]:
    result = convert(model(text, results), **options)
    names = (op.node.output[0] for op in result.view.ops)
    return result, {name: row.dtype for name, row in zip(names, result.report.rows, strict=True)}


BETWEEN = """t = Transpose (b)  p = MatMul (a, t)  r = Relu (p)  f = Identity (r)  y = QuantizeLinear (f, s, z)"""
SIGMOID = "r = Sigmoid (a)  y = QuantizeLinear (r, s, z)"


@pytest.mark.parametrize(
    ("text", "results", "expected"),
    [
        (BETWEEN, "int8[8,8] y", "tprf"),  # with adjacent copies
        ("y = Gemm (a, b, w)", "float[8,8] y", "y"),  # a product ends a region
        ("y = MatMul (a, b)", "float[8,8] y", "y"),
        (SIGMOID, "int8[8,8] y", "r"),
        # Ops with float operands or readers are excluded.
        ("r = MatMul (a, w)  y = QuantizeLinear (r, s, z)", "int8[8,8] y", ""),
        ("r = Add (a, x)  y = QuantizeLinear (r, s, z)", "int8[8,8] y", ""),
        ("r = MatMul (x, b)  y = QuantizeLinear (r, s, z)", "int8[8,8] y", ""),
        ("r = Sigmoid (a)  q = Neg (r)  y = QuantizeLinear (r, s, z)", "int8[8,8] y, float[8,8] q", ""),
        (SIGMOID, "int8[8,8] y, float[8,8] r", ""),
        ("y = Softmax (a)", "float[8,8] y", ""),
    ],
)
def test_an_op_between_quantizers_is_pinned(text: str, results: str, expected: str) -> None:
    view = View.of(Model.load(model(f"{CODES}  {text}", results)))
    pins = find_needs(view, DType.FLOAT16).pins
    assert pins.keys() == set(integer_ops(view))
    assert {why.rule for why in pins.values()} <= {reasons.QUANTIZED}
    assert {view.ops[op].node.output[0] for op in pins} == set(expected)
    assert find_needs(view, DType.FLOAT16, rescale=True).pins == {}


def test_no_cast_separates_a_quantizer_from_its_op() -> None:
    text = f"""{CODES}  p = MatMul (a, b)
        m = MatMul (x, w)  d = Add (p, m)  e = MatMul (d, w)  q = QuantizeLinear (e, s, z)
        f = DequantizeLinear (q, s, z)  g = DequantizeLinear (c, s, z)  h = MatMul (f, g)
        y = QuantizeLinear (h, s, z)"""
    result, types = typed(text)
    assert {name for name, dtype in types.items() if dtype == "float16"} == {"m", "d", "e"}
    assert {cast.value for cast in result.report.casts} == {"x", "p", "e"}
    totals = result.report.totals
    assert (totals.integer_ops, totals.compute_ops, totals.compute_lowered) == (2, 2, 2)
    assert "2 ops between quantizers keep their types" in result.report.text()


def test_a_weight_shared_with_a_float32_op_is_dequantized_in_float32() -> None:
    text = "b = DequantizeLinear (c, s, z)  m = MatMul (x, b)  e = Exp (b)  y = Add (m, e)"
    _, types = typed(text, "float[8,8] y")
    assert (types["b"], types["m"], types["e"]) == ("float32", "float16", "float32")


def test_a_weight_quantized_in_the_graph_follows_its_readers() -> None:
    text = "q = QuantizeLinear (w, s, z)  b = DequantizeLinear (q, s, z)  y = MatMul (x, b)"
    result, types = typed(text, "float[8,8] y")
    assert types["b"] == "float16"
    assert {row.rule for row in result.report.rows if row.op == "DequantizeLinear"} == {reasons.MIN_CUT}


def test_rescaled_quantizers_and_the_ops_between_them_take_the_low_type() -> None:
    result, types = typed(f"{CODES}  p = MatMul (a, b)  y = QuantizeLinear (p, s, z)", quantized="rescale")
    assert types == {"a": "float16", "b": "float16", "p": "float16", "y": "float16"}
    assert result.report.casts == ()
    assert {init.name: init.data_type for init in result.model.graph.initializer}["s"] == onnx.TensorProto.FLOAT16
    assert result.report.model.quantized == "rescale"
    assert result.report.totals.integer_ops == 0


CHAIN = """a = Relu (x)  r = Transpose (a)  q = QuantizeLinear (r, s, z)  d = DequantizeLinear (q, s, z)
    t = Transpose (d)  e = Sigmoid (t)  y = Neg (e)"""


def quantized_view(text: str, inputs: str, constants: str, result: str) -> View:
    graph = f"g ({inputs}) => ({result} y) <{constants}> {{ {text} }}"
    return View.of(Model.load(onnx.parser.parse_model(f"{HEAD} {graph}")))


def stays_float32(kind: str, scale: float, *, zero: int = 0, to: DType = F16) -> bool:
    """Whether a value dequantized with a constant scale stays float32."""
    constants = f"{kind} z = {{{zero}}}, float s = {{{scale}}}"
    return bool(pinned(quantized_view("y = DequantizeLinear (x, s, z)", f"{kind}[N] x", constants, "float[N]"), to))


@pytest.mark.parametrize(
    ("kind", "within", "beyond"),
    [
        ("float8e5m2", 65504 / 57344, 1.143),
        ("float8e5m2fnuz", 65504 / 57344, 1.143),
        ("float8e4m3fn", 146.2, 146.3),
        ("float8e4m3fnuz", 272.9, 273.0),
        ("int8", 511.7, 511.8),
        ("uint8", 256.8, 256.9),
        ("int16", 1.9990, 1.9991),
        ("uint16", 0.9995, 0.9996),
    ],
)
def test_a_quantizers_range_is_its_integer_type_times_its_scale(kind: str, within: float, beyond: float) -> None:
    assert (stays_float32(kind, within), stays_float32(kind, beyond)) == (False, True)


@pytest.mark.parametrize(("kind", "within", "beyond"), [("uint8", 128, 255), ("int8", 0, -128)])
def test_a_quantizers_range_is_counted_from_its_zero_point(kind: str, within: int, beyond: int) -> None:
    assert (stays_float32(kind, 300.0, zero=within), stays_float32(kind, 300.0, zero=beyond)) == (False, True)


def test_bfloat16_holds_all_scales_and_the_int32_of_a_bias_is_ignored() -> None:
    assert not stays_float32("float8e5m2", 1e9, to=BF16)
    assert pinned(quantized_view("y = DequantizeLinear (b, s)", "int32[N] b", "float s = {1e3}", "float[N]")) == {}


def test_a_constant_scale_out_of_range_pins_producers_and_readers() -> None:
    view = quantized_view(CHAIN, "float[N,M] x", "float s = {600.0}, int8 z = {0}", "float[N,M]")
    pins = find_needs(view, F16).pins
    assert all("76800" in why.note for why in pins.values())
    assert [view.ops[op].node.output[0] for op in pins] == ["a", "r", "q", "d", "t", "e"]
