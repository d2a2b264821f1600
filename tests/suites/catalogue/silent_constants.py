"""Conversions that load and give wrong numbers because of a constant or an input; and such that waste Casts."""

from __future__ import annotations

import numpy as np

from suites.catalogue.case import WRONG, Case
from suites.catalogue.loud_types import SQUARE

LOWEST = float(np.finfo(np.float32).min)
SEEN = np.vstack([np.zeros((1, 8)), np.tri(8)[1:]]).astype(bool)
"""Which key a query sees: the first sees none."""

LAYER_NORM = """g (float[8,8] x) => (float[8,8] y) {
    a = MatMul (x, w)
    m = ReduceMean <axes = [-1]> (a)
    c = Sub (a, m)
    q = Pow (c, two)
    v = ReduceMean <axes = [-1]> (q)
    e = Add (v, eps)
    r = Sqrt (e)
    d = Div (c, r)
    s = Mul (d, scale)
    n = Add (s, bias)
    y = MatMul (n, w2)
}"""

CASES = (
    Case(
        44,
        "a mask of the lowest float32 that is selected",
        """g (float[8,8] x, bool[8,8] m) => (float[8,8] y) {
            a = MatMul (x, w)
            f = Where (m, a, lowest)
            s = Softmax (f)
            y = MatMul (s, w2)
        }""",
        weights={**SQUARE, "lowest": [LOWEST]},
        feeds={"m": SEEN},
        fails=WRONG,
        lowers="a y",
    ),
    *(
        Case(
            44,
            f"a mask of the lowest float32 that is added, a row fully masked, to {to}",
            """g (float[8,8] x, float[8,8] far) => (float[8,8] y) {
                a = MatMul (x, w)
                m = Mul (far, lowest)
                f = Add (a, m)
                s = Softmax (f)
                y = MatMul (s, w2)
            }""",
            weights={**SQUARE, "lowest": [LOWEST]},
            feeds={"far": ~SEEN},
            fails=WRONG,
            lowers="a y",
            stays="f",
            options={"to": to},
            opset=22,
        )
        for to in ("float16", "bfloat16")
    ),
    *(
        Case(
            44,
            f"a mask of the lowest float32 that is {made}, a row fully masked",
            f"""g (float[8,8] x, bool[8,8] m) => (float[8,8] y) {{
                a = MatMul (x, w)
                {mask}
                s = Softmax (f)
                y = MatMul (s, w2)
            }}""",
            weights={**SQUARE, "zero": [0], "one": [1], "lowest": [LOWEST], "k": np.where(SEEN, 0, LOWEST)},
            feeds={"m": SEEN},
            retargets=True,
            fails=WRONG,
            lowers="a y",
        )
        for made, mask in (
            ("selected and then added", "h = Where (m, zero, lowest) f = Add (a, h)"),
            ("a weight", "f = Add (a, k)"),
            ("one minus what is seen", "c = Cast <to = 1> (m) i = Sub (one, c) h = Mul (i, lowest) f = Add (a, h)"),
        )
    ),
    Case(
        50,
        "a weight of 30000, which half can hold",
        """g (float[8,8] x) => (float[8,8] y) {
            y = MatMul (x, w)
        }""",
        weights={"w": np.eye(8) * 30000},
        feeds={"x": np.full((8, 8), 0.05)},
        fails="is off by",
        clamps=True,
        lowers="y",
    ),
    Case(
        51,
        "a weight of 1e6, which it cannot",
        """g (float[8,8] x) => (float[8,8] y) {
            a = MatMul (x, w)
            y = MatMul (a, w2)
        }""",
        weights={"w": np.eye(8) * 1e6, "w2": (8, 8)},
        feeds={"x": np.full((8, 8), 1e-4)},
        fails="is off by|is not finite",
        lowers="y",
        stays="a",
    ),
    Case(
        52,
        "an input beyond half's range that is scaled down first",
        """g (float[8,8] x) => (float[8,8] y) {
            s = Mul (x, small)
            y = MatMul (s, w)
        }""",
        weights={"w": (8, 8), "small": [1e-4]},
        feeds={"x": np.linspace(1e5, 2e5, 64).reshape(8, 8)},
        fails="is not finite",
        lowers="y",
        stays="s",
    ),
    Case(
        52,
        "an input that only a deny op reads",
        """g (float[8,8] x, float[8,8] z) => (float[8,8] y) {
            axis = Constant <value_ints = [-1]> ()
            r = ReduceSum (x, axis)
            i = Reciprocal (r)
            a = MatMul (z, w)
            m = Mul (a, i)
            s = Mul (m, large)
            y = MatMul (s, w2)
        }""",
        weights={**SQUARE, "large": [1e5]},
        feeds={"x": np.full((8, 8), 1e5)},
        blocked="ReduceSum",
        fails="is not finite",
        lowers="a y",
        stays="r i",
    ),
    Case(
        53,
        "a quantization scale below half's smallest number",
        """g (float[8,2] x) => (float[8,2] y)
            <float scale = {0.00000002}, int8 zero = {0}, int8[2,2] k = {1, 50, -100, 9}> {
            d = DequantizeLinear (k, scale, zero)
            m = Mul (d, large)
            a = MatMul (x, m)
            y = MatMul (a, w2)
        }""",
        weights={"w2": (2, 2), "large": [1e5]},
        opset=21,
        fails=WRONG,
        lowers="a y",
        stays="d",
    ),
    Case(
        53,
        "a quantization scale below half's smallest number, by which small numbers are quantized",
        """g (float[8,2] x) => (float[8,2] y) <float scale = {0.00000002}, int8 zero = {0}> {
            a = MatMul (x, w)
            t = Mul (a, tiny)
            q = QuantizeLinear (t, scale, zero)
            d = DequantizeLinear (q, scale, zero)
            m = Mul (d, large)
            y = MatMul (m, w2)
        }""",
        weights={"w": (2, 2), "w2": (2, 2), "tiny": [1e-6], "large": [1e5]},
        opset=21,
        fails=WRONG,
        lowers="a y",
        stays="q d",
    ),
    Case(
        54,
        "twenty hops between allow and gray ops",
        "g (float[8,8] x) => (float[8,8] y) {\n"
        + "\n".join(f"b{i} = MatMul ({'x' if i == 0 else f'c{i - 1}'}, w) c{i} = Sigmoid (b{i})" for i in range(20))
        + "\ny = MatMul (c19, w2) }",
        weights=SQUARE,
        blocked="Sigmoid",
        fails="4[0-9] Casts",
        lowers=" ".join(f"b{i} c{i}" for i in range(20)),
        casts=2,
    ),
    Case(
        54,
        "twelve readers of one input",
        "g (float[8,8] x) => (float[8,8] y) {\n"
        + "\n".join(f"b{i} = MatMul (x, w)" for i in range(12))
        + f"\ns = Sum ({', '.join(f'b{i}' for i in range(12))}) y = MatMul (s, w2) }}",
        weights=SQUARE,
        blocked="Sum",
        fails="1[0-9] Casts",
        lowers=" ".join(f"b{i}" for i in range(12)),
        casts=2,
    ),
    Case(
        56,
        "a LayerNormalization in pieces, which the runtime fuses",
        LAYER_NORM,
        weights={**SQUARE, "two": 2.0, "eps": 1e-5, "scale": np.ones(8), "bias": np.zeros(8)},
        blocked="Pow ReduceMean",
        fails="[0-9] Casts",
        lowers="a y",
        casts=4,
    ),
    *(
        Case(
            57,
            f"{what} to bfloat16, which opset {opset} does not know",
            text,
            weights=weights,
            opset=opset,
            retargets=True,
            fails="checker|inference",
            lowers="y",
            stays=stays,
            options={"to": "bfloat16"},
        )
        for what, opset, text, weights, stays in (
            (
                "a convolution",
                17,
                """g (float[1,2,4,4] x) => (float[1,2,4,2] y) { a = Conv (x, w) y = MatMul (a, w2) }""",
                {"w": (2, 2, 1, 1), "w2": (4, 2)},
                "a",
            ),
            (
                "a recurrent cell",
                17,
                """g (float[3,1,4] x) => (float[3,1,1,4] y) {
                    h = GRU <hidden_size = 4> (x, w, r)
                    y = MatMul (h, w2)
                }""",
                {"w": (1, 12, 4), "r": (1, 12, 4), "w2": (4, 4)},
                "h",
            ),
            (
                "the largest elements",
                22,
                """g (float[8,8] x) => (float[8,2] y) {
                    two = Constant <value_ints = [2]> ()
                    a = MatMul (x, w)
                    v, i = TopK (a, two)
                    y = MatMul (v, w2)
                }""",
                {"w": (8, 8), "w2": (2, 2)},
                "v",
            ),
            (
                "a product in Einstein's notation",
                22,
                """g (float[8,8] x) => (float[8,8] y) {
                    a = Einsum <equation = "ij,jk->ik"> (x, w)
                    y = MatMul (a, w2)
                }""",
                SQUARE,
                "a",
            ),
            (
                "a range",
                22,
                """g (float[8,8] x) => (float[8,8] y) {
                    from = Constant <value = float {0}> ()
                    to = Constant <value = float {8}> ()
                    by = Constant <value = float {1}> ()
                    r = Range (from, to, by)
                    a = MatMul (x, w)
                    s = Add (a, r)
                    y = MatMul (s, w2)
                }""",
                SQUARE,
                "r",
            ),
            (
                "random numbers",
                17,
                """g (float[8,8] x) => (float[8,8] y) {
                    a = MatMul (x, w)
                    r = RandomNormal <shape = [8, 8], dtype = 1> ()
                    n = Mul (r, zero)
                    s = Add (a, n)
                    y = MatMul (s, w2)
                }""",
                {**SQUARE, "zero": [0]},
                "r",
            ),
            (
                "sampling on a grid",
                17,
                """g (float[1,1,4,4] x, float[1,4,4,2] p) => (float[1,1,4,4] y) {
                    a = MatMul (x, w)
                    s = GridSample (a, p)
                    y = MatMul (s, w2)
                }""",
                {"w": (4, 4), "w2": (4, 4)},
                "s",
            ),
        )
    ),
)
