"""Conversions that fail because of names, order and what is shared."""

from __future__ import annotations

import numpy as np

from suites.catalogue.case import Case
from suites.catalogue.loud_types import MISMATCH, SQUARE

CASES = (
    Case(
        12,
        "a weight that an allow op and a deny op read",
        """g (float[8,8] x) => (float[8,8] y) {
            a = MatMul (x, w)
            e = Exp (w)
            y = MatMul (a, e)
        }""",
        weights=SQUARE,
        blocked="Exp",
        fails=MISMATCH,
        lowers="a y",
        stays="e",
    ),
    Case(
        12,
        "a weight that the main graph reads and a branch reads in float32",
        """g (float[8,8] x, bool c) => (float[8,8] y) {
            a = MatMul (x, w)
            b = If (c) <
                then_branch = t () => (float[8,8] p) { p = Exp (w) },
                else_branch = e () => (float[8,8] q) { q = Identity (w) }
            >
            y = MatMul (a, b)
        }""",
        weights={"w": (8, 8)},
        blocked="Exp",
        fails=MISMATCH + "|does not exist in the graph",
        lowers="a y",
        stays="p",
    ),
    Case(
        13,
        "two deny ops that read one value",
        """g (float[8,8] x) => (float[8,8] y) {
            a = MatMul (x, w)
            e = Exp (a)
            f = Cos (a)
            s = Add (e, f)
            y = MatMul (s, w2)
        }""",
        weights=SQUARE,
        blocked="Exp Cos",
        fails="two nodes with same node name|[Dd]uplicate definition|made 2 times",
        lowers="a y",
        stays="e f",
        casts=4,
    ),
    Case(
        13,
        "a deny op that reads one value twice",
        """g (float[8,8] x) => (float[8,8] y) {
            a = MatMul (x, w)
            p = Pow (a, a)
            y = MatMul (p, w2)
        }""",
        weights={"w": np.full((8, 8), 0.5), "w2": (8, 8)},
        blocked="Pow",
        fails="two nodes with same node name|[Dd]uplicate definition|made 2 times",
        lowers="a y",
        stays="p",
        casts=4,
    ),
    Case(
        14,
        "nodes without names",
        """g (float[8,8] x) => (float[8,8] y) {
            a = MatMul (x, w)
            e = Exp (a)
            f = Exp (e)
            y = MatMul (f, w2)
        }""",
        weights=SQUARE,
        blocked="Exp",
        nameless=True,
        fails="[Dd]uplicate definition|made 2 times",
        lowers="a y",
        stays="e f",
    ),
    Case(
        15,
        "a model that uses the names which a converter would make",
        """g (float[8,8] x, float[8,8] x_half, float[8,8] x_float16) => (float[8,8] y) {
            a = MatMul (x, w)
            y_half = Exp (a)
            a_float32 = Add (y_half, x_half)
            w_float16 = Add (a_float32, x_float16)
            y = MatMul (w_float16, w2)
        }""",
        weights=SQUARE,
        fails="[Dd]uplicate definition|made 2 times|SSA",
        lowers="a y",
    ),
    Case(
        16,
        "a node of the main graph and one of a branch with one name",
        """g (float[8,8] x, bool c) => (float[8,8] y) {
            [same] a = MatMul (x, w)
            b = If (c) <
                then_branch = t () => (float[8,8] p) { [same] p = Exp (a) },
                else_branch = e () => (float[8,8] q) { [same] q = MatMul (a, w) }
            >
            y = MatMul (b, w2)
        }""",
        weights=SQUARE,
        blocked="Exp",
        fails="does not exist in the graph|" + MISMATCH,
        lowers="a q y",
        stays="p",
    ),
    Case(
        17,
        "Casts in the middle of a graph",
        """g (float[8,8] x) => (float[8,8] y) {
            a = MatMul (x, w)
            e = Exp (a)
            y = MatMul (e, w2)
        }""",
        weights=SQUARE,
        blocked="Exp",
        appends=True,
        fails="topologically sorted",
        lowers="a y",
        stays="e",
    ),
)
