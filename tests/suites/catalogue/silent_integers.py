"""Conversions that load and give wrong numbers: an integer is held in a float."""

from __future__ import annotations

import numpy as np

from suites.catalogue.case import WRONG, Case
from suites.catalogue.loud_types import SQUARE

FREQUENCIES = 10000.0 ** (-np.arange(4) / 4)

CASES = (
    *(
        Case(
            45,
            f"rotary angles of positions beyond 2048, to {to}",
            """g (int64[1,8] p, float[8,8] x) => (float[8,8] y) {
                f = Cast <to = 1> (p)
                q = Unsqueeze (f, axis)
                t = MatMul (q, frequencies)
                r = Squeeze (t, first)
                s = Sin (r)
                c = Cos (r)
                v = Concat <axis = -1> (s, c)
                a = MatMul (x, w)
                m = Mul (a, v)
                y = MatMul (m, w2)
            }""".replace(
                "{\n", "{\n axis = Constant <value_ints = [-1]> () first = Constant <value_ints = [0]> ()\n", 1
            ),
            weights={**SQUARE, "frequencies": FREQUENCIES.reshape(1, 4)},
            feeds={"p": 4001 + 10 * np.arange(8).reshape(1, 8)},
            fails=WRONG,
            retargets=True,
            lowers="a y",
            stays="f t s c",
            options={"to": to},
            opset=22,
        )
        for to in ("float16", "bfloat16")
    ),
    Case(
        46,
        "an index computed in floats",
        """g (int64[4] i, float[8,8] x) => (int64[4] j, float[8,8] y) {
            f = Cast <to = 1> (i)
            h = Add (f, one)
            j = Cast <to = 7> (h)
            y = MatMul (x, w)
        }""",
        weights={"w": (8, 8), "one": [1.0]},
        feeds={"i": [2048, 4096, 8191, 50256]},
        fails=WRONG,
        retargets=True,
        lowers="y",
        stays="f h",
        exact="j",
    ),
    Case(
        46,
        "a length computed in floats, as strided convolutions have it",
        """g (int64[4] i, float[8,8] x) => (int64[4] j, float[8,8] y) {
            f = Cast <to = 1> (i)
            h = Sub (f, one)
            d = Div (h, two)
            r = Floor (d)
            s = Add (r, one)
            j = Cast <to = 7> (s)
            y = MatMul (x, w)
        }""",
        weights={"w": (8, 8), "one": [1.0], "two": [2.0]},
        feeds={"i": [3000, 4097, 8191, 50256]},
        fails=WRONG,
        retargets=True,
        lowers="y",
        stays="f h d r s",
        exact="j",
    ),
    Case(
        46,
        "token ids compared as floats",
        """g (int64[8] i, float[8,8] x) => (float[8,8] y) {
            f = Cast <to = 1> (i)
            q = Equal (f, stop)
            a = MatMul (x, w)
            z = Where (q, zero, a)
            y = MatMul (z, w2)
        }""",
        weights={**SQUARE, "stop": [50257], "zero": [0]},
        feeds={"i": np.arange(50254, 50262)},
        fails=WRONG,
        retargets=True,
        lowers="a z y",
        stays="f q",
    ),
    Case(
        47,
        "a size computed in floats",
        """g (float[1,1,N,4] x, float scale) => (float[1,1,M,4] y) {
            a = Conv (x, w)
            n = Shape <start = 2, end = 3> (a)
            f = Cast <to = 1> (n)
            m = Mul (f, scale)
            r = Floor (m)
            i = Cast <to = 7> (r)
            head = Constant <value = int64[2] {1, 1}> ()
            tail = Constant <value = int64[1] {4}> ()
            sizes = Concat <axis = 0> (head, i, tail)
            z = Resize <mode = "nearest"> (a, , , sizes)
            y = Conv (z, w2)
        }""",
        weights={"w": (1, 1, 1, 1), "w2": (1, 1, 1, 1)},
        feeds={"x": np.full((1, 1, 2051, 4), 0.2), "scale": 1.0},
        fails="instead of",
        retargets=True,
        lowers="a y",
        stays="f m r i",
    ),
    Case(
        47,
        "scales computed from sizes",
        """g (float[1,1,4,N] x, int64 want) => (float[1,1,4,M] y) {
            a = Conv (x, w)
            n = Shape <start = 3, end = 4> (a)
            f = Cast <to = 1> (n)
            t = Cast <to = 1> (want)
            s = Div (t, f)
            ones = Constant <value = float[3] {1, 1, 1}> ()
            scales = Concat <axis = 0> (ones, s)
            z = Resize <mode = "nearest"> (a, , scales)
            y = Conv (z, w2)
        }""",
        weights={"w": (1, 1, 1, 1), "w2": (1, 1, 1, 1)},
        feeds={"x": np.full((1, 1, 4, 30), 0.2), "want": 41},
        fails=r"'tensor\(float16\)' of input parameter|instead of",
        retargets=True,
        lowers="a y",
        stays="f t s scales",
    ),
    Case(
        48,
        "a Cast to integers and back, which truncates",
        """g (float[8,8] x) => (float[8,8] y) {
            a = MatMul (x, w)
            i = Cast <to = 7> (a)
            f = Cast <to = 1> (i)
            y = MatMul (f, w2)
        }""",
        weights={"w": np.eye(8), "w2": (8, 8)},
        feeds={"x": np.full((8, 8), 1.75)},
        fails="is off by",
        retargets=True,
        lowers="a y",
    ),
    Case(
        49,
        "a running sum that counts",
        """g (float[1,1] x) => (float[1,4096] n, float[1,1] y) {
            axis = Constant <value_int = 1> ()
            long = Constant <value_ints = [1, 4096]> ()
            a = MatMul (x, w)
            e = Expand (a, long)
            n = CumSum (e, axis)
            y = MatMul (a, w2)
        }""",
        weights={"w": np.eye(1), "w2": (1, 1)},
        feeds={"x": np.ones((1, 1))},
        fails="n: .* is off by",
        lowers="a y",
        stays="n",
        exact="n",
    ),
    Case(
        49,
        "a counter that a loop carries as a float",
        """g (float[2,2] x, int64 trips, bool go) => (float n, float[2,2] y) {
            a = MatMul (x, w)
            zero = Constant <value = float {0}> ()
            n = Loop (trips, go, zero) <body = body (int64 i, bool c, float s) => (bool more, float next) {
                more = Identity (c)
                one = Constant <value = float {1}> ()
                next = Add (s, one)
            }>
            y = MatMul (a, w2)
        }""",
        weights={"w": (2, 2), "w2": (2, 2)},
        feeds={"trips": 3000},
        retargets=True,
        fails=WRONG,
        lowers="a y",
        stays="next",
        exact="n",
    ),
    Case(
        58,
        "a sum divided by a computed number of elements",
        """g (float[1,2,N] x, float[N,2] t) => (float[1,2,2] y) {
            gram = MatMul (x, t)
            s = Shape (x)
            n = ReduceProd <keepdims = 0> (s)
            k = Cast <to = 1> (n)
            a = Div (gram, k)
            y = MatMul (a, w)
        }""",
        weights={"w": np.eye(2)},
        feeds={"x": np.full((1, 2, 40000), 0.5), "t": np.full((40000, 2), 0.5)},
        fails=WRONG,
        retargets=True,
        lowers="gram y",
        stays="k a",
    ),
)
