"""Quantizers that reach beyond the type, by their scale."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnxruntime
import pytest

import amp_rewrite
from amp_rewrite.decide.hazards.constants import quantizers
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from support.held import pins_of

F16, BF16 = DType.FLOAT16, DType.BFLOAT16


def view_of(text: str, inputs: str, constants: str, result: str) -> View:
    graph = f"g ({inputs}) => ({result} y) <{constants}> {{ {text} }}"
    return View.of(Model.load(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {graph}')))


def quantized(kind: str, scale: float | None, *, zero: int | None = None, to: DType = F16) -> set[str]:
    """What is pinned of a quantizer of a type, with a constant scale or one that is fed."""
    constants = [f"float s = {{{scale}}}"] if scale is not None else []
    constants += [f"{kind} z = {{{zero}}}"] if zero is not None else []
    number = onnx.TensorProto.DataType.Value(kind.upper())
    stated, read = ("", "x, s, z") if zero is not None else (f"<output_dtype = {number}>", "x, s")
    text = f"y = QuantizeLinear {stated} ({read})"
    view = view_of(text, "float[N] x" + (", float s" if scale is None else ""), ", ".join(constants), f"{kind}[N]")
    return {view.ops[pin.op].node.output[0] for pin in pins_of(quantizers(view, to), view)}


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
    assert (quantized(kind, within), quantized(kind, beyond)) == (set(), {"y"})


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("float8e5m2", {"y"}), ("float8e5m2fnuz", {"y"}), ("float8e4m3fn", set()), ("int8", set()), ("uint16", set())],
)
def test_a_scale_that_only_the_run_tells_is_a_reason_where_the_type_reaches_far(kind: str, expected: set[str]) -> None:
    assert quantized(kind, None) == expected


def test_the_reach_of_integers_is_counted_from_the_zero_point() -> None:
    assert quantized("uint8", 300.0, zero=128) == set()
    assert quantized("uint8", 300.0, zero=0) == quantized("uint8", 300.0, zero=255) == {"y"}
    assert quantized("int8", 300.0, zero=0) == set()
    assert quantized("int8", 300.0, zero=-128) == {"y"}


def test_bfloat16_holds_them_all_and_the_int32_of_a_bias_is_not_judged() -> None:
    assert quantized("float8e5m2", None, to=BF16) == set()
    assert quantized("float8e5m2", 1e9, to=BF16) == set()
    view = view_of("y = DequantizeLinear (b, s)", "int32[N] b", "float s = {1e3}", "float[N]")
    assert list(quantizers(view, F16)) == []


def test_with_a_constant_scale_producers_and_readers_of_such_values_are_pinned() -> None:
    text = """a = Relu (x)  r = Transpose (a)  q = QuantizeLinear (r, s, z)  d = DequantizeLinear (q, s, z)
        t = Transpose (d)  e = Sigmoid (t)  y = Neg (e)"""
    held = "float s = {600.0}, int8 z = {0}"
    view = view_of(text, "float[N,M] x", held, "float[N,M]")
    found = {view.ops[pin.op].node.output[0]: (pin.because, pin.note) for pin in pins_of(quantizers(view, F16), view)}
    note = "128 of int8 times 600 is beyond 65504"
    causes = {"a": 2, "r": 2, "q": None, "d": None, "t": 3, "e": 3}
    assert found == {name: (cause, note) for name, cause in causes.items()}
    open_scale = view_of(text, "float[N,M] x, float s", "float8e5m2 z = {0}", "float[N,M]")
    assert {view.ops[pin.op].node.output[0] for pin in pins_of(quantizers(open_scale, F16), open_scale)} == {"q", "d"}


def test_what_float16_does_not_hold_is_quantized_as_in_float32() -> None:
    """100000 / 2 rounds to 49152 in FLOAT8E5M2; float16 hands it infinity, which saturates to 57344."""
    text = """g (float[3] x, float s) => (float[3] y) <float8e5m2 z = {0}> {
        q = QuantizeLinear (x, s, z)  y = DequantizeLinear (q, s, z)
    }"""
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')
    given = {"x": np.float32([1, -2, 1e5]), "s": np.array(2, np.float32)}
    found = {}
    for safety in ("default", "none"):
        model = amp_rewrite.convert(proto, level="unsafe-force-all", safety=safety, target="onnx").model
        twin = amp_rewrite.emulate(model, io="same").to_proto().SerializeToString()
        session = onnxruntime.InferenceSession(twin, providers=["CPUExecutionProvider"])
        found[safety] = [float(v) for v in session.run(None, given)[0]]
    assert found["default"] == [1, -2, 98304]
    assert found["none"] != found["default"]
