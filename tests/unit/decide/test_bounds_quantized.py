"""Bounds of quantized products, and of numbers over their own sum, against runs."""

from __future__ import annotations

import math

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto, numpy_helper

import amp_rewrite
from amp_rewrite.decide.bounds.elementwise import integers
from amp_rewrite.dtypes import DType
from support.bound_check import Probe

RNG = np.random.default_rng(0)
WIDTH = 64
HEAD = '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>'


def model(text: str, **constants: np.ndarray) -> ModelProto:
    """A model of nodes in onnx's text; x has the shape 4 × 64, y has two axes."""
    proto = onnx.parser.parse_model(f"{HEAD} g (float[4,{WIDTH}] x) => (float[A,B] y) {{ {text} }}")
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    return proto


def packed(bits: int, columns: int, blocks: int, block: int) -> np.ndarray:
    return RNG.integers(0, 256, (columns, blocks, block * bits // 8), dtype=np.uint8)


def scales(*shape: int) -> np.ndarray:
    return (RNG.uniform(0.5, 2, shape) * 1e-2).astype(np.float32)


def bytes_of(*shape: int) -> np.ndarray:
    return RNG.integers(-128, 128, shape, dtype=np.int8)


GAIN = np.ones(WIDTH, np.float32)
ZERO = np.array(7, np.int8)
BITS = "MatMulNBits <K = 64, N = 32, bits = {}, block_size = 32>"
ONE = np.float32(0.05)
CASES = {
    "static": model(
        "q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) f = DequantizeLinear <axis = 1> (w, t)"
        " y = MatMul (d, f)",
        s=np.array(ONE),
        z=ZERO,
        w=bytes_of(WIDTH, 32),
        t=scales(32),
    ),
    "weights alone": model(
        "n = LayerNormalization (x, g) f = DequantizeLinear <axis = 0> (w, t, z) y = Gemm <transB = 1> (n, f)",
        g=GAIN,
        w=bytes_of(32, WIDTH),
        t=scales(32),
        z=bytes_of(32),
    ),
    "blocks": model(
        "n = LayerNormalization (x, g) f = DequantizeLinear <axis = 0, block_size = 16> (w, t) y = MatMul (n, f)",
        g=GAIN,
        w=bytes_of(WIDTH, 32),
        t=scales(4, 32),
    ),
    "dynamic": model(
        "n = LayerNormalization (x, g) q, s, z = DynamicQuantizeLinear (n) i = MatMulInteger (q, w, z, v)"
        " c = Cast <to = 1> (i) m = Mul (s, t) y = Mul (c, m)",
        g=GAIN,
        w=bytes_of(WIDTH, 32),
        v=ZERO,
        t=np.array(ONE),
    ),
    **{
        f"{bits} bits": model(
            f"n = LayerNormalization (x, g) y = com.microsoft.{BITS.format(bits)} (n, w, t, z)",
            g=GAIN,
            w=packed(bits, 32, 2, 32),
            t=scales(32, 2),
            z=RNG.integers(0, 256, (32, math.ceil(2 * bits / 8)), dtype=np.uint8),
        )
        for bits in (4, 8)
    },
    "4 bits without zero points": model(
        f"n = LayerNormalization (x, g) y = com.microsoft.{BITS.format(4)} (n, w, t)",
        g=GAIN,
        w=packed(4, 32, 2, 32),
        t=scales(32, 2),
    ),
    "shares of a sum": model(
        "p = Softmax (x) t, i = TopK (p, k) d = ReduceSum <keepdims = 1> (t, a) r = Div (t, d) y = MatMul (r, v)",
        k=np.array([8]),
        a=np.array([-1]),
        v=RNG.standard_normal((8, 8)).astype(np.float32),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_quantized_products_are_bounded_and_no_run_exceeds_it(name: str) -> None:
    proto = CASES[name]
    row = next(row for row in amp_rewrite.bounds(proto).rows if row.value == "y")
    assert row.klass == "proved to fit"
    probe = Probe(proto)
    largest = 0.0
    for size in (1e-2, 1.0, 100.0):
        for _ in range(8):
            feed = {"x": (RNG.standard_normal((4, WIDTH)) * size).astype(np.float32)}
            assert probe.violations(feed) == []
            largest = max(largest, *(float(np.abs(values["y"]).max()) for _, values in probe.values(feed)))
    assert largest > row.absmax / 100, "a bound this loose shows nothing"


@pytest.mark.parametrize(
    ("dtype", "ends"), [(DType.INT8, (-128, 127)), (DType.UINT4, (0, 15)), (DType.INT64, None), (DType.BOOL, None)]
)
def test_narrow_integers_lie_in_the_range_of_their_type(dtype: DType, ends: tuple[int, int] | None) -> None:
    state = integers(dtype)
    assert (None if state is None else (float(state.lo), float(state.hi))) == ends


def test_quantized_weights_that_are_computed_have_no_bound() -> None:
    text = f"n = LayerNormalization (x, g) w = Identity (v) y = com.microsoft.{BITS.format(4)} (n, w, t)"
    proto = model(text, g=GAIN, v=packed(4, 32, 2, 32), t=scales(32, 2))
    assert next(row for row in amp_rewrite.bounds(proto).rows if row.value == "y").klass == "unknown"
