"""Ops that run on integers, between DequantizeLinear and QuantizeLinear; and quantizers beyond the type."""

import onnx.parser
import pytest

from amp_rewrite.decide import reasons
from amp_rewrite.decide.needs.find import find_needs
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.patterns.clusters import integer_ops
from amp_rewrite.ir.view import View
from amp_rewrite.pipeline.conversion import Converted
from amp_rewrite.pipeline.convert import convert
from support.held import held

INPUTS = "int8[8,8] i, float[8,8] x"
CODES = "a = DequantizeLinear (i, s, z)  b = DequantizeLinear (c, s, z)"
HEAD = '<ir_version: 10, opset_import: ["": 21]>'


def model(text: str, results: str = "int8[8,8] y") -> onnx.ModelProto:
    """A model of this text; `i` are codes, `x` is float32, `w` and `c` are weights, `s` and `z` quantize."""
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
        (BETWEEN, "int8[8,8] y", "tprf"),  # with the copies around it
        ("y = Gemm (a, b, w)", "float[8,8] y", "y"),  # a product ends a region
        ("y = MatMul (a, b)", "float[8,8] y", "y"),
        (SIGMOID, "int8[8,8] y", "r"),
        # Floats among the operands or readers take an op out.
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


def test_no_cast_lands_between_a_quantizer_and_its_op_beside_lowered_ones() -> None:
    text = f"""{CODES}  p = MatMul (a, b)
        m = MatMul (x, w)  d = Add (p, m)  e = MatMul (d, w)  q = QuantizeLinear (e, s, z)
        f = DequantizeLinear (q, s, z)  g = DequantizeLinear (c, s, z)  h = MatMul (f, g)
        y = QuantizeLinear (h, s, z)"""
    result, types = typed(text)
    assert {name for name, dtype in types.items() if dtype == "float16"} == {"m", "d", "e"}
    assert {cast.value for cast in result.report.casts} == {"x", "p", "e"}
    totals = result.report.totals
    assert (totals.integer_ops, totals.compute_ops, totals.compute_lowered) == (2, 2, 2)
    assert "2 ops between quantizers: their types stay" in result.report.text()


def test_a_weight_that_a_float32_op_reads_as_well_is_dequantized_in_float32() -> None:
    text = "b = DequantizeLinear (c, s, z)  m = MatMul (x, b)  e = Exp (b)  y = Add (m, e)"
    _, types = typed(text, "float[8,8] y")
    assert (types["b"], types["m"], types["e"]) == ("float32", "float16", "float32")


def test_a_weight_that_is_quantized_in_the_graph_follows_its_readers_too() -> None:
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


F16, BF16 = DType.FLOAT16, DType.BFLOAT16
CHAIN = """a = Relu (x)  r = Transpose (a)  q = QuantizeLinear (r, s, z)  d = DequantizeLinear (q, s, z)
    t = Transpose (d)  e = Sigmoid (t)  y = Neg (e)"""


def quantized_view(text: str, inputs: str, constants: str, result: str) -> View:
    graph = f"g ({inputs}) => ({result} y) <{constants}> {{ {text} }}"
    return View.of(Model.load(onnx.parser.parse_model(f"{HEAD} {graph}")))


def kept(kind: str, scale: float, *, zero: int = 0, to: DType = F16) -> bool:
    """True if what is decoded from a type by a constant scale stays float32."""
    constants = f"{kind} z = {{{zero}}}, float s = {{{scale}}}"
    return bool(held(quantized_view("y = DequantizeLinear (x, s, z)", f"{kind}[N] x", constants, "float[N]"), to))


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
def test_the_type_times_a_constant_scale_is_the_reach(kind: str, within: float, beyond: float) -> None:
    assert (kept(kind, within), kept(kind, beyond)) == (False, True)


@pytest.mark.parametrize(("kind", "within", "beyond"), [("uint8", 128, 255), ("int8", 0, -128)])
def test_the_reach_of_integers_is_counted_from_the_zero_point(kind: str, within: int, beyond: int) -> None:
    assert (kept(kind, 300.0, zero=within), kept(kind, 300.0, zero=beyond)) == (False, True)


def test_bfloat16_holds_them_all_and_the_int32_of_a_bias_is_not_judged() -> None:
    assert not kept("float8e5m2", 1e9, to=BF16)
    assert held(quantized_view("y = DequantizeLinear (b, s)", "int32[N] b", "float s = {1e3}", "float[N]")) == {}


def test_with_a_constant_scale_makers_and_readers_of_such_values_are_held() -> None:
    view = quantized_view(CHAIN, "float[N,M] x", "float s = {600.0}, int8 z = {0}", "float[N,M]")
    pins = find_needs(view, F16).pins
    assert all("76800" in why.note for why in pins.values())
    assert [view.ops[op].node.output[0] for op in pins] == ["a", "r", "q", "d", "t", "e"]
