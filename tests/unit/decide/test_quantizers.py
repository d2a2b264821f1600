"""Quantizers that reach beyond the type, by their scale."""

from __future__ import annotations

import onnx.parser
import pytest

from amp_rewrite.decide.needs.find import find_needs
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from support.held import held

F16, BF16 = DType.FLOAT16, DType.BFLOAT16
HEAD = '<ir_version: 10, opset_import: ["": 21]>'
CHAIN = """a = Relu (x)  r = Transpose (a)  q = QuantizeLinear (r, s, z)  d = DequantizeLinear (q, s, z)
    t = Transpose (d)  e = Sigmoid (t)  y = Neg (e)"""


def view_of(text: str, inputs: str, constants: str, result: str) -> View:
    graph = f"g ({inputs}) => ({result} y) <{constants}> {{ {text} }}"
    return View.of(Model.load(onnx.parser.parse_model(f"{HEAD} {graph}")))


def kept(kind: str, scale: float, *, zero: int = 0, to: DType = F16) -> bool:
    """True if what is decoded from a type by a constant scale stays float32."""
    constants = f"{kind} z = {{{zero}}}, float s = {{{scale}}}"
    return bool(held(view_of("y = DequantizeLinear (x, s, z)", f"{kind}[N] x", constants, "float[N]"), to))


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
    assert held(view_of("y = DequantizeLinear (b, s)", "int32[N] b", "float s = {1e3}", "float[N]")) == {}


def test_with_a_constant_scale_makers_and_readers_of_such_values_are_held() -> None:
    view = view_of(CHAIN, "float[N,M] x", "float s = {600.0}, int8 z = {0}", "float[N,M]")
    pins = find_needs(view, F16).pins
    assert all("76800" in pin.note for pin in pins)
    assert [view.ops[pin.op].node.output[0] for pin in pins] == ["a", "r", "q", "d", "t", "e"]
