"""Conversions that load and give wrong numbers: what they compute leaves half's range, or cancels."""

from __future__ import annotations

import numpy as np

from suites.catalogue.case import WRONG, Case
from suites.catalogue.loud_types import SQUARE

CASES = (
    Case(
        37,
        "a norm by the mean square, whose squares overflow",
        """g (float[8,8] x) => (float[8,8] y) {
            a = MatMul (x, w)
            two = Constant <value = float {2}> ()
            p = Pow (a, two)
            m = ReduceMean <axes = [-1]> (p)
            e = Add (m, eps)
            r = Sqrt (e)
            d = Div (a, r)
            s = Mul (d, scale)
            y = MatMul (s, w2)
        }""",
        weights={**SQUARE, "eps": [1e-5], "scale": np.ones(8)},
        feeds={"x": np.linspace(-2000, 2000, 64).reshape(8, 8)},
        fails=WRONG,
        lowers="a y",
        stays="p m e r",
    ),
    Case(
        37,
        "a LayerNormalization in pieces, whose squares overflow",
        """g (float[8,8] x) => (float[8,8] y) {
            a = MatMul (x, w)
            m = ReduceMean <axes = [-1]> (a)
            c = Sub (a, m)
            q = Mul (c, c)
            v = ReduceMean <axes = [-1]> (q)
            e = Add (v, eps)
            r = Sqrt (e)
            d = Div (c, r)
            s = Mul (d, scale)
            n = Add (s, bias)
            y = MatMul (n, w2)
        }""",
        weights={**SQUARE, "eps": [1e-5], "scale": np.ones(8), "bias": np.zeros(8)},
        feeds={"x": np.linspace(-2000, 2000, 64).reshape(8, 8)[::-1] * np.linspace(1, 2, 8)},
        fails=WRONG,
        lowers="a y",
        stays="q v e r",
    ),
    Case(
        38,
        "a LayerNormalization after a deny op that gives large numbers",
        """g (float[8,8] x) => (float[8,8] y) {
            a = MatMul (x, w)
            two = Constant <value = float {2}> ()
            e = Pow (a, two)
            n = LayerNormalization (e, scale)
            y = MatMul (n, w2)
        }""",
        weights={"w": np.eye(8) * 1200, "w2": (8, 8), "scale": np.ones(8)},
        feeds={"x": np.linspace(0.05, 0.25, 64).reshape(8, 8, order="F")},
        fails=WRONG,
        lowers="a y",
        stays="e n",
    ),
    Case(
        38,
        "a fused norm of a large sum",
        """g (float[2,4,8] x) => (float[2,4,8] y) {
            a = MatMul (x, w)
            two = Constant <value = float {2}> ()
            e = Pow (a, two)
            n = com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 0.00001> (e, e, scale)
            y = MatMul (n, w2)
        }""",
        weights={"w": np.eye(8) * 1200, "w2": (8, 8), "scale": np.ones(8)},
        domains={"com.microsoft": 1},
        feeds={"x": np.linspace(0.1, 0.25, 64).reshape(2, 4, 8)},
        fails=WRONG,
        lowers="a y",
        stays="e n",
    ),
    Case(
        39,
        "an instance norm of small changes on a large offset that the caller feeds",
        """g (float[1,2,8,8] x) => (float[1,2,8,8] y) {
            n = InstanceNormalization (x, scale, bias)
            y = Conv (n, w)
        }""",
        weights={"w": (2, 2, 1, 1), "scale": np.ones(2), "bias": np.zeros(2)},
        feeds={"x": 3000 + np.random.default_rng(0).uniform(-0.5, 0.5, (1, 2, 8, 8))},
        fails=WRONG,
        lowers="y",
        stays="n",
    ),
    Case(
        39,
        "a variance as the difference of two means",
        """g (float[8,8] x) => (float[8,1] y) {
            a = MatMul (x, w)
            q = Mul (a, a)
            mq = ReduceMean <axes = [-1]> (q)
            m = ReduceMean <axes = [-1]> (a)
            qm = Mul (m, m)
            v = Sub (mq, qm)
            s = Add (v, one)
            y = MatMul (s, w2)
        }""",
        weights={"w": np.eye(8), "w2": np.full((1, 1), 0.25), "one": [1.0]},
        feeds={"x": 10 + np.random.default_rng(1).uniform(-1, 1, (8, 8))},
        fails=WRONG,
        lowers="a y",
        stays="q mq m qm v",
    ),
    Case(
        39,
        "a batch norm with a variance that half flushes to nothing",
        """g (float[1,2,4,4] x) => (float[1,2,4,4] y) {
            a = Conv (x, w)
            n = BatchNormalization <epsilon = 1e-12> (a, scale, bias, mean, var)
            y = Conv (n, w2)
        }""",
        weights={
            "w": np.eye(2).reshape(2, 2, 1, 1) * 1e-3,
            "w2": (2, 2, 1, 1),
            "scale": np.ones(2),
            "bias": np.zeros(2),
            "mean": np.zeros(2),
            "var": np.full(2, 1e-9),
        },
        fails=WRONG,
        lowers="a y",
        options={"fuse": "none"},  # folded into the Conv there is no variance left
    ),
    Case(
        40,
        "a row of zeros divided by a guarded norm",
        """g (float[8,8] x) => (float[8,8] y) {
            a = MatMul (x, w)
            n = ReduceL2 <axes = [-1]> (a)
            e = Add (n, eps)
            d = Div (a, e)
            y = MatMul (d, w2)
        }""",
        weights={**SQUARE, "eps": [1e-12]},
        feeds={"x": np.vstack([np.zeros((1, 8)), np.full((7, 8), 0.2)])},
        fails=WRONG,
        lowers="a y",
        stays="e d",
    ),
    Case(
        40,
        "a sum of weights divided by its clamped self",
        """g (float[8,8] x) => (float[8,8] y) {
            a = MatMul (x, w)
            m = Abs (a)
            e = Max (m, eps)
            d = Div (a, e)
            y = MatMul (d, w2)
        }""",
        weights={**SQUARE, "eps": [1e-9]},
        feeds={"x": np.vstack([np.zeros((1, 8)), np.full((7, 8), 0.2)])},
        fails=WRONG,
        lowers="a y",
        stays="e d",
    ),
    *(
        Case(
            40,
            f"a row of zeros beside a guard {where}",
            f"""g (float[8,8] x) => (float[8,8] y) {{
                a = MatMul (x, w)
                {guarded}
                y = MatMul (d, w2)
            }}""",
            weights={**SQUARE, "eps": 1e-12, "minus": -0.5},
            feeds={"x": np.vstack([np.zeros((1, 8)), np.full((7, 8), 0.2)])},
            fails=WRONG,
            lowers="a y",
            stays=stays,
        )
        for where, guarded, stays in (
            (
                "under a root that divides",
                "axis = Constant <value_ints = [-1]> () q = Mul (a, a) v = ReduceSum (q, axis) e = Add (v, eps) "
                "r = Sqrt (e) d = Div (a, r)",
                "e r d",
            ),
            (
                "under a reciprocal root",
                "q = Mul (a, a) e = Add (q, eps) r = Sqrt (e) i = Reciprocal (r) d = Mul (a, i)",
                "e r i",
            ),
            ("under a negative power", "q = Mul (a, a) e = Add (q, eps) i = Pow (e, minus) d = Mul (a, i)", "e i"),
            ("that is a Clip", "n = ReduceL2 <axes = [-1]> (a) e = Clip (n, eps) d = Div (a, e)", "e d"),
            ("under a logarithm", "m = Abs (a) e = Add (m, eps) d = Log (e)", "e d"),
        )
    ),
    *(
        Case(
            41,
            f"{kind} over many numbers",
            f"""g (float[8,512] x) => (float[8,8] y) {{
                axis = Constant <value_ints = [-1]> ()
                a = MatMul (x, w)
                r = {kind} {axes}
                s = Mul (r, small)
                y = MatMul (s, w2)
            }}""",
            weights={"w": np.eye(512), "w2": np.full((1, 8), 0.25), "small": [1e-5]},
            feeds={"x": np.full((8, 512), value)},
            fails=WRONG,
            lowers="a y",
            stays="r",
        )
        for kind, axes, value in (
            ("ReduceSum", "(a, axis)", 300),
            ("ReduceL1", "<axes = [-1]> (a)", 300),
            ("ReduceL2", "<axes = [-1]> (a)", 4000),
            ("ReduceSumSquare", "<axes = [-1]> (a)", 20),
        )
    ),
    Case(
        41,
        "ReduceProd over many numbers",
        """g (float[8,32] x) => (float[8,8] y) {
            a = MatMul (x, w)
            r = ReduceProd <axes = [-1]> (a)
            s = Mul (r, small)
            y = MatMul (s, w2)
        }""",
        weights={"w": np.eye(32), "w2": np.full((1, 8), 0.25), "small": [1e-4]},
        feeds={"x": np.full((8, 32), 1.5)},
        fails=WRONG,
        lowers="a y",
        stays="r",
    ),
    Case(
        41,
        "a logarithm of a sum of exponentials",
        """g (float[8,8] x) => (float[8,1] y) {
            axis = Constant <value_ints = [-1]> ()
            a = MatMul (x, w)
            e = Exp (a)
            s = ReduceSum (e, axis)
            l = Log (s)
            y = MatMul (l, w2)
        }""",
        weights={"w": np.eye(8), "w2": np.full((1, 1), 0.25)},
        feeds={"x": np.full((8, 8), 14)},
        fails=WRONG,
        lowers="a y",
        stays="e s",
    ),
    Case(
        42,
        "a softmax in pieces without the maximum",
        """g (float[8,8] x) => (float[8,8] y) {
            axis = Constant <value_ints = [-1]> ()
            a = MatMul (x, w)
            e = Exp (a)
            s = ReduceSum (e, axis)
            d = Div (e, s)
            y = MatMul (d, w2)
        }""",
        weights={"w": np.eye(8), "w2": (8, 8)},
        feeds={"x": np.linspace(10, 14, 64).reshape(8, 8)},
        fails=WRONG,
        lowers="a y",
        stays="e s d",
    ),
)
