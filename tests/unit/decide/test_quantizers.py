"""Quantizers that reach beyond the type, by their scale."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnxruntime
import pytest

import amp_rewrite
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


def kept(kind: str, scale: float | None, *, zero: int = 0, to: DType = F16) -> bool:
    """True if a quantizer of a type stays float32, with a constant scale or one that is fed."""
    given = "float[N] x, float s" if scale is None else "float[N] x"
    constants = f"{kind} z = {{{zero}}}" + (f", float s = {{{scale}}}" if scale is not None else "")
    return bool(held(view_of("y = QuantizeLinear (x, s, z)", given, constants, f"{kind}[N]"), to))


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


@pytest.mark.parametrize(("kind", "expected"), [("float8e5m2", True), ("float8e4m3fn", False), ("uint16", False)])
def test_a_scale_that_only_the_run_tells_is_a_reason_where_the_type_reaches_far(kind: str, expected: bool) -> None:
    assert kept(kind, None) is expected


@pytest.mark.parametrize(("kind", "within", "beyond"), [("uint8", 128, 255), ("int8", 0, -128)])
def test_the_reach_of_integers_is_counted_from_the_zero_point(kind: str, within: int, beyond: int) -> None:
    assert (kept(kind, 300.0, zero=within), kept(kind, 300.0, zero=beyond)) == (False, True)


def test_bfloat16_holds_them_all_and_the_int32_of_a_bias_is_not_judged() -> None:
    assert not kept("float8e5m2", None, to=BF16)
    assert not kept("float8e5m2", 1e9, to=BF16)
    assert held(view_of("y = DequantizeLinear (b, s)", "int32[N] b", "float s = {1e3}", "float[N]")) == {}


def test_with_a_constant_scale_readers_of_such_values_are_held() -> None:
    view = view_of(CHAIN, "float[N,M] x", "float s = {600.0}, int8 z = {0}", "float[N,M]")
    pins = find_needs(view, F16).pins
    assert all("76800" in pin.note for pin in pins)
    assert [view.ops[pin.op].node.output[0] for pin in pins] == ["q", "d", "t", "e"]
    open_scale = held(view_of(CHAIN, "float[N,M] x, float s", "float8e5m2 z = {0}", "float[N,M]"))
    assert {"q", "d"} <= open_scale.keys()
    assert not {"a", "r", "y"} & open_scale.keys()


def test_what_float16_does_not_hold_is_quantized_as_in_float32() -> None:
    """100000 / 2 rounds to 49152 in FLOAT8E5M2; float16 hands it infinity, which saturates to 57344."""
    text = """g (float[3] x, float s) => (float[3] y) <float8e5m2 z = {0}> {
        q = QuantizeLinear (x, s, z)  y = DequantizeLinear (q, s, z)
    }"""
    found = {}
    for safety in ("default", "none"):
        model = amp_rewrite.convert(
            onnx.parser.parse_model(f"{HEAD} {text}"), level="unsafe-force-all", safety=safety, target="onnx"
        ).model
        twin = amp_rewrite.emulate(model, io="same").to_proto().SerializeToString()
        session = onnxruntime.InferenceSession(twin, providers=["CPUExecutionProvider"])
        found[safety] = session.run(None, {"x": np.array([1, -2, 1e5], np.float32), "s": np.array(2, np.float32)})[
            0
        ].tolist()
    assert found["default"] == [1, -2, 98304]
    assert found["none"] != found["default"]
