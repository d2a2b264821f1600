"""Gradients of If, Scan and Loop."""

from collections.abc import Sequence

import numpy as np
import pytest
from onnx import numpy_helper

from amp_rewrite import GradientError, gradients
from support.train.vjp_case import Case, judged, run_float32

TWO = """
y = If (c) <
  then_branch = then () => (float[3] t) { m = Mul (a, b)  n = Exp (m)  t = Mul (n, n) },
  else_branch = other () => (float[3] e) { m = Sub (a, b)  e = Sigmoid (m) }
>
"""
INNER = """
h = Exp (a)
y = If (c) <
  then_branch = then () => (float[3] t) {
    k = Mul (h, b)
    t = If (d) <
      then_branch = inner () => (float[3] p) { p = Mul (k, h) },
      else_branch = outer () => (float[3] q) { q = Mul (k, b) }
    >
  },
  else_branch = other () => (float[3] e) { e = Mul (h, h) }
>
"""
SEVERAL = """
y, i, z = If (c) <
  then_branch = then () => (float[3] t, int64[1] j, float[3] u) { t = Mul (a, b)  j = Shape (a)  u = Neg (a) },
  else_branch = other () => (float[3] e, int64[1] k, float[3] f) { e = Add (a, b)  k = Shape (a)  f = Exp (b) }
>
"""
USED_OUTSIDE = """
m = Mul (a, b)
r = If (c) <
  then_branch = then () => (float[3] t) { t = Mul (m, a) },
  else_branch = other () => (float[3] e) { e = Identity (m) }
>
y = Add (r, m)
"""
SAME_TWICE = """
y, z = If (c) <
  then_branch = then () => (float[3] t, float[3] t) { t = Mul (a, b) },
  else_branch = other () => (float[3] e, float[3] f) { e = Neg (a)  f = Exp (b) }
>
"""

NORMED = """
y = If (c) <
  then_branch = then () => (float[2,3] t) { t, n, q = BatchNormalization <training_mode = 1> (x, s, s, m, v) },
  else_branch = other () => (float[2,3] e) { e = Neg (x) }
>
"""
SCORED = """
y = Scan <num_scan_inputs = 1, body = step (float a, float[4,5] r) => (float n) {
  z = MatMul (r, w)  k = SoftmaxCrossEntropyLoss (z, labels)  n = Add (a, k)
}> (h0, x)
"""


def branching(name: str, text: str, c: bool, d: bool = True, outputs: tuple[str, ...] = ("y",)) -> Case:
    nested = {"d": ()} if "(d)" in text else {}
    shapes = {"a": (3,), "b": (3,), "c": (), **nested}
    kinds = {"c": "bool", "d": "bool"}
    suffix = "" if not nested else f", {d}"
    return Case(f"{name}, {c}{suffix}", "", shapes, text=text, types=kinds, values={"c": c, "d": d}, outputs=outputs)


TANH = """
last, y = Scan <num_scan_inputs = 1, body = step (float[2,3] h, float[2,3] s) => (float[2,3] n, float[2,3] z) {
  m = MatMul (h, w)  a = Add (m, s)  n = Tanh (a)  z = Mul (n, n)
}> (h0, x)
"""
BACKWARDS = TANH.replace("num_scan_inputs = 1", "num_scan_inputs = 1, scan_input_directions = [1]")
OTHER_AXES = TANH.replace(
    "num_scan_inputs = 1",
    "num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [-1], scan_output_directions = [1]",
)
SWAPPED = """
p, q, y = Scan <num_scan_inputs = 1, body = step (float[3] a, float[3] b, float[3] s)
  => (float[3] b_on, float[3] n, float[3] z) {
  b_on = Identity (b)  n = Mul (a, s)  z = Add (n, w)
}> (h0, g0, x)
"""
TWICE = """
last, y, z = Scan <num_scan_inputs = 1, body = step (float[3] h, float[3] s) => (float[3] n, float[3] m, float[3] k) {
  e = Mul (h, s)  n = Sin (e)  m = Identity (n)  k = Identity (n)
}> (h0, x)
"""
WITHOUT_STATE = """
y = Scan <num_scan_inputs = 2, body = step (float[3] r, float[3] s) => (float[3] z) { z = Mul (r, s) }> (x, w)
"""
IN_A_SCAN = """
last, y = Scan <num_scan_inputs = 1, body = outer (float[3] h, float[4,3] row) => (float[3] n, float[4,3] z) {
  n, z = Scan <num_scan_inputs = 1, body = inner (float[3] k, float[3] s) => (float[3] t, float[3] u) {
    m = Mul (k, w)  a = Add (m, s)  t = Tanh (a)  u = Mul (t, h)
  }> (h, row)
}> (h0, x)
"""
COUNTED = """
last, y = Loop (trips, yes, h0) <body = step (int64 i, bool go, float[3] h) => (bool on, float[3] n, float[3] z) {
  on = Identity (go)  r = Gather (x, i)  m = Mul (h, w)  a = Add (m, r)  n = Tanh (a)  z = Mul (n, h)
}>
"""
BY_CONDITION = """
last, y = Loop (, yes, h0) <body = step (int64 i, bool go, float[3] h) => (bool on, float[3] n, float[3] z) {
  n = Mul (h, w)  z = Sin (n)  size = ReduceSum <keepdims = 0> (n)  on = Less (size, limit)
}>
"""
WITH_COUNTER = """
last, k, y = Loop (trips, yes, h0, zero) <body = step (int64 i, bool go, float[3] h, int64 c)
  => (bool on, float[3] n, int64 d, float[3] z) {
  on = Identity (go)  r = Gather (x, c)  n = Mul (h, r)  d = Add (c, one)  z = Neg (n)
}>
"""
ADDS = """
last = Scan <num_scan_inputs = 1, body = step (float[3] h, float[3] s) => (float[3] n) {
  m = Add (h, s)  n = Add (m, w)
}> (h0, x)
"""
IN_A_BRANCH = """
y = If (yes) <
  then_branch = then () => (float[3] t) {
    t, u = Scan <num_scan_inputs = 1, body = step (float[3] h, float[3] s) => (float[3] n, float[3] z) {
      a = Add (h, w)  n = Mul (a, s)  z = Identity (n)
    }> (h0, x)
  },
  else_branch = other () => (float[3] e) { e = Neg (h0) }
>
"""

RANDOM = """
last = Loop (trips, yes, h0) <body = step (int64 i, bool go, float[3] h) => (bool on, float[3] n) {
  on = Identity (go)  r = RandomNormalLike (h)  n = Mul (h, r)
}>
y = Identity (last)
"""
SEQUENCE = """
empty = SequenceEmpty <dtype = 1> ()
y, all = Loop (trips, yes, h0, empty) <body = step (int64 i, bool go, float[3] h, seq(float[3]) s)
  => (bool on, float[3] n, seq(float[3]) t) {
  on = Identity (go)  k = SequenceLength (s)  f = Cast <to = 1> (k)  n = Mul (h, f)  t = SequenceInsert (s, n)
}>
"""
UNUSED_SEQUENCE = SEQUENCE.replace("f = Cast <to = 1> (k)  n = Mul (h, f)", "n = Mul (h, h)")

MATRIX = {"h0": (2, 3), "x": (4, 2, 3), "w": (3, 3)}
VECTOR = {"h0": (3,), "x": (4, 3), "w": (3,)}
CONTROL = {"trips": (), "yes": ()}


TYPES = {"trips": "int", "yes": "bool", "zero": "int", "one": "int"}
VALUES = {"trips": 3, "yes": True, "zero": 0, "one": 1, "limit": 20.0}


def case(
    name: str,
    text: str,
    shapes: dict[str, tuple[int, ...]],
    outputs: Sequence[str] = ("last", "y"),
    *,
    low: float = -1,
    high: float = 1,
    wrt: Sequence[str] = (),
) -> Case:
    return Case(name, "", shapes, wrt, outputs, TYPES, values=VALUES, low=low, high=high, text=text)


CASES = (
    *(branching("two branches", TWO, c) for c in (True, False)),
    *(branching("a branch in a branch", INNER, c, d) for c, d in ((True, True), (True, False))),
    *(branching("one result of several", SEVERAL, c, outputs=("z",)) for c in (True, False)),
    *(branching("a value with readers outside", USED_OUTSIDE, c) for c in (True, False)),
    case("Scan", TANH, MATRIX),
    case("Scan, only its stacked output", TANH, MATRIX, ("y",)),
    case("Scan in reverse", BACKWARDS, MATRIX),
    case("Scan along other axes", OTHER_AXES, {**MATRIX, "x": (2, 4, 3)}),
    case("Scan with swapped states", SWAPPED, {**VECTOR, "g0": (3,)}, ("p", "q", "y")),
    case("Scan by a captured value", SWAPPED, {**VECTOR, "g0": (3,)}, ("y",), wrt=("w",)),
    case("Scan with equal outputs", TWICE, VECTOR, ("last", "y", "z"), wrt=("h0", "x")),
    case("Scan without a state", WITHOUT_STATE, {"x": (4, 3), "w": (4, 3)}, ("y",)),
    case("Scan in a Scan", IN_A_SCAN, {"h0": (3,), "x": (2, 4, 3), "w": (3,)}),
    case("Scan in a branch", IN_A_BRANCH, {**VECTOR, "yes": ()}, ("y",)),
    case("Loop", COUNTED, {**VECTOR, **CONTROL}),
    case("Loop until a condition", BY_CONDITION, {"h0": (3,), "w": (3,), "yes": (), "limit": ()}, wrt=("h0", "w"),
         low=1.5, high=2),
    case("Scan that only adds", ADDS, VECTOR, ("last",)),
    case("Loop with a counter", WITH_COUNTER, {"h0": (3,), "x": (4, 3), **CONTROL, "zero": (), "one": ()}),
    Case("a body for a norm in a branch", "", {"x": (2, 3), "s": (3,), "m": (3,), "v": (3,), "c": ()}, wrt=("x", "s"),
         text=NORMED, types={"c": "bool"}, values={"c": True}, low=0.5, single=True),
    Case("a body for a loss in a Scan", "", {"h0": (), "x": (3, 4, 5), "w": (5, 3), "labels": (4,)}, text=SCORED,
         types={"labels": "int"}, values={"labels": [0, 2, 1, 1]}),
)  # fmt: skip

TestRules = judged(CASES)


@pytest.mark.parametrize(("inputs", "refused"), [("a", False), ("a, r", False), ("a, r, m", True)])
def test_a_dropout_in_a_branch_is_refused_if_it_may_drop(inputs: str, refused: bool) -> None:
    drops = f"then_branch = then () => (float[3] t) {{ t = Dropout ({inputs}) }}"
    other = "else_branch = other () => (float[3] e) { e = Neg (a) }"
    text = f"r = Constant <value_float = 0.5> () m = Not (c) y = If (c) <{drops}, {other}>"
    model = Case("", "", {"a": (3,), "c": ()}, text=text, types={"c": "bool"}, values={"c": False}).model(20)
    if refused:
        with pytest.raises(
            GradientError, match="its branch contains Dropout 'If_2/then_branch/Dropout_0', which would draw"
        ):
            gradients(model, "loss", ["a"])
    else:
        assert gradients(model, "loss", ["a"]).proto.graph.output[-1].name == "a_grad"


def test_a_value_returned_twice_by_a_branch_is_refused() -> None:
    shapes = {"a": (3,), "b": (3,), "c": ()}
    model = Case("", "", shapes, text=SAME_TWICE, types={"c": "bool"}, outputs=("y", "z")).model(20)
    with pytest.raises(GradientError) as caught:
        gradients(model, "loss", ["a"])
    assert str(caught.value) == (
        "node 'If_0' (If): its body outputs 't' twice, which onnxruntime does not support; output an Identity"
    )


DRAWS = "RandomNormalLike_{}', which would draw different numbers in the backward pass; move it out of the {}"
DRAWN = """
y = If (yes) <
  then_branch = then () => (float[3] t) { n = RandomNormalLike (h0)  t = Mul (h0, n) },
  else_branch = other () => (float[3] e) { e = Neg (h0) }
>
"""


@pytest.mark.parametrize(
    ("text", "node", "fact"),
    [
        (RANDOM, "Loop_0", f"its body contains RandomNormalLike 'Loop_0/body/{DRAWS.format(1, 'body')}"),
        (DRAWN, "If_0", f"its branch contains RandomNormalLike 'If_0/then_branch/{DRAWS.format(0, 'branch')}"),
        (SEQUENCE, "Loop_1", "its carried value 's' is not a tensor and has no gradient; carry a tensor instead"),
    ],
    ids=["random numbers in a loop", "random numbers in a branch", "a sequence"],
)
def test_bodies_that_cannot_be_recomputed_are_refused(text: str, node: str, fact: str) -> None:
    shapes = {"h0": (3,), "yes": ()} if text == DRAWN else {"h0": (3,), **CONTROL}
    with pytest.raises(GradientError) as caught:
        gradients(case("", text, shapes, ("y",)).model(20), "loss", ["h0"])
    assert str(caught.value) == f"node '{node}' ({node.partition('_')[0]}): {fact}"


def test_an_unrelated_sequence_in_a_loop_is_no_obstacle() -> None:
    unused = case("", UNUSED_SEQUENCE, {"h0": (3,), **CONTROL}, ("y",))
    weight = numpy_helper.to_array(unused.model(20).graph.initializer[0])
    (gradient,) = run_float32(gradients(unused.model(20), "loss", ["h0"]).to_proto(), unused.feed(), ["h0_grad"])
    np.testing.assert_allclose(gradient, weight * 8 * unused.feed()["h0"] ** 7, rtol=1e-6)  # of h⁸
