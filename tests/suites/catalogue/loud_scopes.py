"""Conversions that fail inside If, Loop and Scan, and on sequences and optionals."""

from __future__ import annotations

from suites.catalogue.case import Case
from suites.catalogue.loud_types import MISMATCH, SQUARE

CASES = (
    Case(
        18,
        "a branch that reads a graph input",
        """g (float[8,8] x, bool c) => (float[8,8] y) {
            b = If (c) <
                then_branch = t () => (float[8,8] p) { p = MatMul (x, w) },
                else_branch = e () => (float[8,8] q) { q = Identity (x) }
            >
            y = MatMul (b, w2)
        }""",
        weights=SQUARE,
        fails=MISMATCH,
        lowers="p y",
    ),
    Case(
        18,
        "a deny op in a branch that reads a graph input",
        """g (float[8,8] x, bool c) => (float[8,8] y) {
            a = MatMul (x, w)
            b = If (c) <
                then_branch = t () => (float[8,8] p) { p = Exp (x) },
                else_branch = e () => (float[8,8] q) { q = Identity (a) }
            >
            y = MatMul (b, w2)
        }""",
        weights=SQUARE,
        blocked="Exp",
        fails="does not exist in the graph|" + MISMATCH,
        lowers="a y",
        stays="p",
    ),
    Case(
        19,
        "a deny op inside a branch",
        """g (float[8,8] x, bool c) => (float[8,8] y) {
            a = MatMul (x, w)
            b = If (c) <
                then_branch = t () => (float[8,8] p) { m = MatMul (a, w) p = Exp (m) },
                else_branch = e () => (float[8,8] q) { q = Identity (a) }
            >
            y = MatMul (b, w2)
        }""",
        weights=SQUARE,
        blocked="Exp",
        fails="does not exist in the graph",
        lowers="a m y",
        stays="p",
    ),
    Case(
        19,
        "branches that make values of one name",
        """g (float[8,8] x, bool c) => (float[8,8] y) {
            a = MatMul (x, w)
            b = If (c) <
                then_branch = t () => (float[8,8] r) { v = Exp (a) r = MatMul (v, w) },
                else_branch = e () => (float[8,8] r) { v = MatMul (a, w) r = Exp (v) }
            >
            y = MatMul (b, w2)
        }""",
        weights=SQUARE,
        blocked="Exp",
        fails="does not exist in the graph|made 2 times|[Dd]uplicate",
        lowers="a y",
    ),
    Case(
        19,
        "a loop's body with a weight of its own and a deny op",
        """g (float[8,8] x, int64 trips, bool go) => (float[8,8] y) {
            b = Loop (trips, go, x) <body = body (int64 i, bool c, float[8,8] s)
                => (bool more, float[8,8] next) <float[1] half = {0.5}> {
                more = Identity (c)
                t = MatMul (s, w)
                m = Mul (t, half)
                e = Exp (m)
                next = MatMul (e, w)
            }>
            y = MatMul (b, w2)
        }""",
        weights=SQUARE,
        blocked="Exp",
        fails="does not exist in the graph|not output of any previous",
        lowers="t y",
        stays="e",
    ),
    Case(
        20,
        "both branches with a weight of one name",
        """g (float[2,2] x, bool c) => (float[2,2] y) {
            a = MatMul (x, w)
            b = If (c) <
                then_branch = t () => (float[2,2] p) <float[2,2] k = {1, 2, 3, 4}> { p = MatMul (a, k) },
                else_branch = e () => (float[2,2] q) <float[2,2] k = {4, 3, 2, 1}> { q = MatMul (a, k) }
            >
            y = MatMul (b, w2)
        }""",
        weights={"w": (2, 2), "w2": (2, 2)},
        fails=MISMATCH,
        lowers="a p q y",
    ),
    Case(
        21,
        "a branch that is a weight and no node",
        """g (float[2,2] x, bool c) => (float[2,2] y) {
            a = MatMul (x, w)
            b = If (c) <
                then_branch = t () => (float[2,2] p) { p = MatMul (a, w) },
                else_branch = e () => (float[2,2] q) <float[2,2] q = {1, 2, 3, 4}> {}
            >
            y = MatMul (b, w2)
        }""",
        weights={"w": (2, 2), "w2": (2, 2)},
        fails=MISMATCH,
        lowers="a p y",
    ),
    Case(
        22,
        "a float that a loop carries",
        """g (float[8,8] x, int64 trips, bool go) => (float[8,8] y) {
            a = MatMul (x, w)
            b = Loop (trips, go, a) <body = body (int64 i, bool c, float[8,8] s) => (bool more, float[8,8] next) {
                more = Identity (c)
                next = MatMul (s, w)
            }>
            y = MatMul (b, w2)
        }""",
        weights=SQUARE,
        fails=MISMATCH,
        lowers="a next y",
    ),
    Case(
        22,
        "a recurrent cell as a Scan",
        """g (float[4,8] x, float[8] h) => (float[8] last, float[4,8] y) {
            a = MatMul (x, w)
            last, all = Scan <num_scan_inputs = 1, body = body (float[8] s, float[8] t) => (float[8] n, float[8] o) {
                u = MatMul (s, w2)
                v = Add (u, t)
                n = Tanh (v)
                o = Identity (n)
            }> (h, a)
            y = MatMul (all, w2)
        }""",
        weights=SQUARE,
        fails=MISMATCH,
        lowers="a u y",
    ),
    Case(
        23,
        "a sequence that a loop carries",
        """g (float[8,8] x, int64 trips, bool go) => (float[8,8] y) {
            a = MatMul (x, w)
            empty = SequenceEmpty ()
            seq = Loop (trips, go, empty) <body = body (int64 i, bool c, seq(float[8,8]) s)
                => (bool more, seq(float[8,8]) next) {
                more = Identity (c)
                next = SequenceInsert (s, a)
            }>
            j = ConcatFromSequence <axis = 1> (seq)
            y = MatMul (j, w3)
        }""",
        weights={"w": (8, 8), "w3": (24, 8)},
        fails="same elem type",
        lowers="a y",
    ),
    Case(
        23,
        "an element of a sequence beside a float32 reader",
        """g (float[8,8] x) => (float[8,8] y) {
            a = MatMul (x, w)
            e = Exp (a)
            s = SequenceConstruct (a, e)
            one = Constant <value_int = 1> ()
            t = SequenceAt (s, one)
            y = MatMul (t, w2)
        }""",
        weights=SQUARE,
        blocked="SequenceConstruct",
        fails=MISMATCH,
        lowers="a y",
        stays="e",
    ),
    Case(
        23,
        "a tensor that is split into a sequence",
        """g (float[8,8] x) => (float[4,8] y) {
            a = MatMul (x, w)
            four = Constant <value_int = 4> ()
            s = SplitToSequence (a, four)
            one = Constant <value_int = 1> ()
            t = SequenceAt (s, one)
            y = MatMul (t, w2)
        }""",
        weights=SQUARE,
        blocked="SplitToSequence",
        fails=MISMATCH,
        lowers="a y",
    ),
    Case(
        23,
        "a sequence that is an output",
        """g (float[8,8] x) => (seq(float[8,8]) y) {
            a = MatMul (x, w)
            b = MatMul (a, w2)
            y = SequenceConstruct (a, b)
        }""",
        weights=SQUARE,
        fails=r"seq\(tensor|" + MISMATCH,
        lowers="a b",
    ),
    Case(
        24,
        "an optional tensor",
        """g (float[8,8] x) => (float[8,8] y) {
            a = MatMul (x, w)
            o = Optional (a)
            b = OptionalGetElement (o)
            y = MatMul (b, w2)
        }""",
        weights=SQUARE,
        blocked="Optional",
        fails="optional|" + MISMATCH,
        lowers="a y",
    ),
)
