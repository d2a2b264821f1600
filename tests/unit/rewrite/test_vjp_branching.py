"""Gradients of If."""

from __future__ import annotations

import numpy as np
import pytest

from amp_rewrite import GradientError, gradients
from support.train.vjp_case import Case, judged, run_float32

TWO = """
y = If (c) <
  then_branch = then () => (float[3] t) { m = Mul (a, b)  n = Exp (m)  t = Mul (n, n) },
  else_branch = other () => (float[3] e) { m = Sub (a, b)  e = Sigmoid (m) }
>
"""
ONE_SIDED = """
y = If (c) <
  then_branch = then () => (float[3] t) { t = Mul (a, a) },
  else_branch = other () => (float[3] e) { e = Neg (b) }
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
SPELLED_OUT = """
y = If (c) <
  then_branch = then () => (float[2,3] t) { t = MeanVarianceNormalization <axes = [1]> (x) },
  else_branch = other () => (float[2,3] e) { e = Exp (x) }
>
"""


def case(name: str, text: str, c: bool, d: bool = True, outputs: tuple[str, ...] = ("y",)) -> Case:
    nested = {"d": ()} if "(d)" in text else {}
    shapes = {"a": (3,), "b": (3,), "c": (), **nested}
    kinds = {"c": "bool", "d": "bool"}
    told = "" if not nested else f", {d}"
    return Case(f"{name}, {c}{told}", "", shapes, text=text, types=kinds, values={"c": c, "d": d}, outputs=outputs)


CASES = (
    *(case("two branches", TWO, c) for c in (True, False)),
    *(case("branches that read one value each", ONE_SIDED, c) for c in (True, False)),
    *(case("a branch in a branch", INNER, c, d) for c in (True, False) for d in (True, False)),
    *(case("several results", SEVERAL, c, outputs=("y", "z")) for c in (True, False)),
    *(case("one result of several", SEVERAL, c, outputs=("z",)) for c in (True, False)),
    *(case("a value that is used outside, too", USED_OUTSIDE, c) for c in (True, False)),
)

TestRules = judged(CASES)


def test_an_op_in_a_branch_is_replaced_by_its_function_body() -> None:
    shapes = {"x": (2, 3), "c": ()}
    model = Case("", "", shapes, text=SPELLED_OUT, types={"c": "bool"}, values={"c": True}).model(20)
    plain = Case("", "y=MeanVarianceNormalization[axes=1](x)", {"x": (2, 3)}).model(20)
    x = np.array([[1, 2, 4], [0, 3, 1]], "f")
    inside = run_float32(gradients(model, "loss", ["x"]).to_proto(), {"x": x, "c": np.array(True)}, ["x_grad"])
    outside = run_float32(gradients(plain, "loss", ["x"]).to_proto(), {"x": x}, ["x_grad"])
    np.testing.assert_array_equal(inside, outside)


def test_random_numbers_in_a_branch_are_refused() -> None:
    text = """
    y = If (c) <
      then_branch = then () => (float[3] t) { n = RandomNormalLike (a)  t = Mul (a, n) },
      else_branch = other () => (float[3] e) { e = Neg (a) }
    >
    """
    model = Case("", "", {"a": (3,), "c": ()}, text=text, types={"c": "bool"}).model(20)
    with pytest.raises(GradientError) as caught:
        gradients(model, "loss", ["a"])
    assert str(caught.value) == (
        "node 'If_0' (If): its branch has RandomNormalLike"
        " 'If_0/then_branch/RandomNormalLike_0', which would draw other numbers in the backward"
        " pass; move it out of the branch"
    )


@pytest.mark.parametrize(("inputs", "refused"), [("a", False), ("a, r", False), ("a, r, m", True)])
def test_a_dropout_in_a_branch_is_refused_if_it_may_drop(inputs: str, refused: bool) -> None:
    drops = f"then_branch = then () => (float[3] t) {{ t = Dropout ({inputs}) }}"
    other = "else_branch = other () => (float[3] e) { e = Neg (a) }"
    text = f"r = Constant <value_float = 0.5> () m = Not (c) y = If (c) <{drops}, {other}>"
    model = Case("", "", {"a": (3,), "c": ()}, text=text, types={"c": "bool"}, values={"c": False}).model(20)
    if refused:
        with pytest.raises(
            GradientError, match="its branch has Dropout 'If_2/then_branch/Dropout_0', which would draw"
        ):
            gradients(model, "loss", ["a"])
    else:
        assert gradients(model, "loss", ["a"]).proto.graph.output[-1].name == "a_grad"


def test_a_value_that_a_branch_gives_twice_is_refused() -> None:
    shapes = {"a": (3,), "b": (3,), "c": ()}
    model = Case("", "", shapes, text=SAME_TWICE, types={"c": "bool"}, outputs=("y", "z")).model(20)
    with pytest.raises(GradientError) as caught:
        gradients(model, "loss", ["a"])
    assert str(caught.value) == (
        "node 'If_0' (If): its body outputs 't' twice, which onnxruntime does not support; output an Identity"
    )
