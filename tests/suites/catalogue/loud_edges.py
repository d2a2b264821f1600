"""Conversions that fail at the edges of a graph: inputs, outputs, initializers, functions."""

from __future__ import annotations

import numpy as np

from suites.catalogue.case import WRONG, Case
from suites.catalogue.loud_types import MISMATCH, SQUARE

CASES = (
    Case(
        25,
        "a weight that is an output",
        """g (float[2,2] x) => (float[2,2] y, float[2,2] w) <float[2,2] w = {1, 2, 3, 4}> {
            y = MatMul (x, w)
        }""",
        fails="[Dd]uplicate definition|SSA|made 2 times|does not exist|" + MISMATCH,
        lowers="y",
    ),
    Case(
        25,
        "a weight that is nothing but an output",
        """g (float[2,2] x) => (float[2,2] y, float[2,2] k) <float[2,2] w = {1, 2, 3, 4}, float[2,2] k = {1, 2, 3, 4}> {
            y = MatMul (x, w)
        }""",
        fails="[Dd]uplicate definition|SSA|made 2 times|does not exist|" + MISMATCH,
        lowers="y",
        exact="k",
    ),
    Case(
        26,
        "an input that is an output",
        """g (float[8,8] x) => (float[8,8] x, float[8,8] y) {
            y = MatMul (x, w)
        }""",
        weights={"w": (8, 8)},
        fails="[Dd]uplicate definition|SSA|made 2 times",
        lowers="y",
        exact="x",
    ),
    Case(
        26,
        "a graph without nodes",
        "g (float[8,8] x) => (float[8,8] x) {}",
        fails="[Dd]uplicate definition|SSA|made 2 times",
        exact="x",
        casts=0,
    ),
    Case(
        27,
        "an output that another op reads",
        """g (float[8,8] x) => (float[8,8] y, float[8,8] z) {
            y = MatMul (x, w)
            z = MatMul (y, w2)
        }""",
        weights=SQUARE,
        fails=MISMATCH,
        lowers="y z",
        casts=3,
    ),
    Case(
        27,
        "a deny op that makes an output",
        """g (float[8,8] x) => (float[8,8] y) {
            a = MatMul (x, w)
            y = Exp (a)
        }""",
        weights={"w": (8, 8)},
        blocked="Exp",
        fails="Cast of .* to its own type",
        lowers="a",
        stays="y",
        casts=2,
    ),
    Case(
        28,
        "initializers that are inputs, as all were before IR 4",
        """g (float[2,2] x, float[2,2] w) => (float[2,2] y) <float[2,2] w = {1, 2, 3, 4}> {
            a = MatMul (x, w)
            y = MatMul (a, w)
        }""",
        opset=9,
        ir=3,
        fails=MISMATCH + "|mismatch",
        lowers="a y",
    ),
    Case(
        31,
        "an island that is float16 already",
        """g (float[8,8] x) => (float[8,8] y) {
            a = MatMul (x, w)
            h = Cast <to = 10> (a)
            c = Constant <value = float16[1] {14336}> ()
            m = Mul (h, c)
            f = Cast <to = 1> (m)
            y = MatMul (f, w2)
        }""",
        weights=SQUARE,
        fails=MISMATCH,
        lowers="a y",
        casts=2,
    ),
    *(
        Case(
            32,
            f"a local function with {inside}",
            f"""g (float[8,8] x) => (float[8,8] y) {{
                a = MatMul (x, w)
                f = own.F (a)
                y = MatMul (f, w2)
            }}
            <domain: "own", opset_import: ["": 17]>
            F (u) => (v) {{ {body} }}""",
            weights=weights,
            feeds=feeds,
            domains={"own": 1},
            fails=fails,
            lowers="a y",
        )
        for inside, body, weights, feeds, fails in (
            ("a Constant", "c = Constant <value = float[1] {0.5}> () v = Mul (u, c)", SQUARE, {}, MISMATCH),
            ("a Cast", "i = Cast <to = 7> (u) f = Cast <to = 1> (i) v = Add (u, f)", SQUARE, {}, MISMATCH),
            (
                "a deny op",
                "e = Exp (u) r = ReduceSum <keepdims = 1> (e) v = Div (e, r)",
                {"w": np.eye(8), "w2": (8, 8)},
                {"x": np.linspace(10, 14, 64).reshape(8, 8)},
                WRONG,
            ),
        )
    ),
)
