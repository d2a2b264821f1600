"""Conversions that fail on what is no plain float tensor, or no plain op: quantized, fused, sparse, outside."""

from __future__ import annotations

import numpy as np

from suites.catalogue.case import Case
from suites.catalogue.loud_types import MISMATCH, SQUARE

POSITIVE = {"w": np.full((8, 8), 0.5), "w2": np.full((8, 8), 0.25)}

CASES = (
    Case(
        33,
        "quantize and dequantize of opset 13, which know no half",
        """g (float[8,8] x) => (float[8,8] y) <float scale = {0.01}, int8 zero = {0}> {
            a = MatMul (x, w)
            q = QuantizeLinear (a, scale, zero)
            d = DequantizeLinear (q, scale, zero)
            y = MatMul (d, w2)
        }""",
        weights=SQUARE,
        opset=13,
        fails=r"'tensor\(float16\)' of input parameter",
        lowers="a y",
        stays="q d",
    ),
    Case(
        33,
        "dynamic quantization, whose scale is float32 in every opset",
        """g (float[8,8] x) => (float[8,8] y) <uint8 zero = {0}> {
            a = MatMul (x, w)
            q, s, z = DynamicQuantizeLinear (a)
            one = Constant <value = uint8[8,8] {1,0,0,0,0,0,0,0,0,1,0,0,0,0,0,0,0,0,1,0,0,0,0,0,0,0,0,1,0,0,0,0,
                0,0,0,0,1,0,0,0,0,0,0,0,0,1,0,0,0,0,0,0,0,0,1,0,0,0,0,0,0,0,0,1}> ()
            i = MatMulInteger (q, one, z, zero)
            f = Cast <to = 1> (i)
            m = Mul (f, s)
            y = MatMul (m, w2)
        }""",
        weights=SQUARE,
        fails=r"'tensor\(float16\)' of input parameter|" + MISMATCH,
        lowers="a y",
        stays="q",
    ),
    Case(
        33,
        "a quantized convolution and its scales",
        """g (float[1,1,4,4] x) => (float[1,1,4,4] y)
            <float scale = {0.01}, uint8 zero = {0}, uint8[1,1,1,1] k = {100}> {
            a = Conv (x, w)
            q = QuantizeLinear (a, scale, zero)
            c = QLinearConv (q, scale, zero, k, scale, zero, scale, zero)
            d = DequantizeLinear (c, scale, zero)
            y = Conv (d, w2)
        }""",
        weights={"w": np.full((1, 1, 1, 1), 0.7), "w2": (1, 1, 1, 1)},
        opset=13,
        fails=r"'tensor\(float16\)' of input parameter",
        lowers="a y",
        stays="q d",
    ),
    Case(
        34,
        "a deny op that reads what an op of com.microsoft gives, whose types onnx does not infer",
        """g (float[8,8] x) => (float[8,8] y) {
            a = MatMul (x, w)
            f = com.microsoft.FastGelu (a)
            b = MatMul (f, w2)
            m = Mul (a, f)
            s = Add (m, b)
            y = MatMul (s, w2)
        }""",
        weights=POSITIVE,
        domains={"com.microsoft": 1},
        blocked="Mul",
        fails=MISMATCH,
        lowers="a f b m s y",
    ),
    Case(
        34,
        "a fused product whose result has no rank that onnx knows",
        """g (float[8,8] x) => (float[8,8] y) {
            a = com.microsoft.FusedMatMul <alpha = 0.5, transB = 1> (x, w)
            m = Max (a, x)
            y = MatMul (m, w2)
        }""",
        weights=POSITIVE,
        domains={"com.microsoft": 1},
        blocked="Max",
        fails=MISMATCH,
        lowers="a y",
    ),
    Case(
        34,
        "a fused norm that gives its sum, too",
        """g (float[2,4,8] x) => (float[2,4,8] y, float[2,4,8] z) {
            a = MatMul (x, w)
            n, , , s = com.microsoft.SkipLayerNormalization <epsilon = 0.00001> (a, a, scale, bias)
            y = MatMul (n, w2)
            z = Sub (s, a)
        }""",
        weights={**POSITIVE, "scale": np.ones(8), "bias": np.zeros(8)},
        domains={"com.microsoft": 1},
        blocked="Sub",
        fails=MISMATCH,
        lowers="a n y",
    ),
    Case(
        35,
        "strings beside floats",
        """g (float[2,2] x) => (float[2,2] y, string[2] labels) {
            y = MatMul (x, w)
            labels = Constant <value = string[2] {"cat", "dog"}> ()
        }""",
        weights={"w": (2, 2)},
        fails="could not convert string",
        lowers="y",
    ),
)
