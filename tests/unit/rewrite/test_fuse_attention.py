"""Attention written out op by op: what becomes one operator, and that both compute the same."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper, numpy_helper

from amp_rewrite.rewrite.equivalence import UNIT
from support.attention_models import (
    HIDDEN,
    KEYS,
    SCORES,
    WEIGHTS,
    K,
    Q,
    V,
    agree,
    attention,
    model_of,
)
from support.fusing import kinds, standard


@pytest.mark.parametrize(
    ("body", "scale"),
    [
        (KEYS + "m = MatMul (q, t)  " + WEIGHTS, 1.0),
        (KEYS + "s = MatMul (q, t)  m = Mul (half, s)  " + WEIGHTS, 0.5),
        (KEYS + "s = MatMul (q, t)  m = Div (s, two)  " + WEIGHTS, 0.5),
        (KEYS + "r = Mul (q, half)  m = MatMul (r, t)  " + WEIGHTS, 0.5),
        (KEYS + "r = Mul (q, root)  u = Mul (t, root)  m = MatMul (r, u)  " + WEIGHTS, 0.5),
        (KEYS + "r = Div (q, two)  u = Mul (t, two)  s = MatMul (r, u)  m = Mul (s, half)  " + WEIGHTS, 0.5),
    ],
)
def test_the_scale_is_found_wherever_it_stands(body: str, scale: float) -> None:
    model = model_of(body)
    made, told = standard(model)
    assert (kinds(made), list(attention(made).input)) == (["Attention"], ["q", "k", "v"])
    assert {a.name: helper.get_attribute_value(a) for a in attention(made).attribute} == {
        "scale": pytest.approx(scale, rel=2 * UNIT)
    }
    assert [kind for kind, _, _ in told] == ["fused"]
    agree(model, made)


@pytest.mark.parametrize(
    ("before", "key", "expected"),
    [
        ("t = Transpose <perm = [0, 2, 3, 1]> (k)  ", "float[2,5,2,4] k", ["Transpose", "Attention"]),
        ("a = Reshape (k, merged)  b = Transpose <perm = [0, 2, 1]> (a)  t = Reshape (b, parted)  ", K, ["Attention"]),
        ("t = Relu (k)  ", "float[2,2,4,5] k", ["Relu", "Transpose", "Attention"]),
    ],
)
def test_keys_are_read_before_they_were_transposed(before: str, key: str, expected: list[str]) -> None:
    model = model_of(before + "m = MatMul (q, t)  " + WEIGHTS, inputs=f"{Q}, {key}, {V}")
    made, _ = standard(model)
    assert kinds(made) == expected
    agree(model, made)


def test_dimensions_with_names_are_enough() -> None:
    inputs = "float[b,2,n,4] q, float[b,2,n,4] k, float[b,2,n,6] v, bool[b,1,n,n] mask"
    model = model_of(SCORES + "m = Where (mask, z, fill)  " + WEIGHTS, inputs=inputs, output="float[b,2,n,6] y")
    made, _ = standard(model)
    assert kinds(made) == [*HIDDEN, "Where", "Attention"]
    agree(model, made)


GROUPED = """a = Unsqueeze (k, second)  b = Expand (a, repeated)  c = Reshape (b, grouped)
    d = Unsqueeze (v, second)  e = Expand (d, repeated)  f = Reshape (e, grouped)
    t = Transpose <perm = [0, 1, 3, 2]> (c)  m = MatMul (q, t)  p = Softmax (m)  y = MatMul (p, f)"""


def test_heads_repeated_for_groups_of_queries_are_read_once() -> None:
    inputs = "float[2,2,3,4] q, float[2,1,5,4] k, float[2,1,5,4] v"
    model = model_of(GROUPED, inputs=inputs, output="float[2,2,3,4] y")
    made, _ = standard(model)
    assert (kinds(made), list(attention(made).input)) == (["Attention"], ["q", "k", "v"])
    agree(model, made)


def test_heads_that_are_dealt_out_in_turn_are_not_groups() -> None:
    """A must-fail twin: [k0, k1, k0, k1] is no repetition of each head, and stays as it is."""
    deal = GROUPED.replace("second)", "first)").replace("<perm", "<perm")
    inputs = "float[2,4,3,4] q, float[2,2,5,4] k, float[2,2,5,4] v, int64[1] first"
    model = model_of(deal, inputs=inputs, output="float[2,4,3,4] y")
    for tensor, numbers in (("repeated", [2, 2, 2, 5, 4]), ("grouped", [2, 4, 5, 4])):
        (old,) = [t for t in model.graph.initializer if t.name == tensor]
        old.CopyFrom(numpy_helper.from_array(np.array(numbers), tensor))
    del model.graph.input[3]
    model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "first"))
    made, _ = standard(model)
    assert list(attention(made).input) == ["q", "c", "f"]
    agree(model, made)


@pytest.mark.parametrize("copy", ["Identity", "Cast <to = 1>"])
def test_copies_between_the_softmax_and_its_products_go_along(copy: str) -> None:
    body = f"t = Transpose <perm = [0, 1, 3, 2]> (k)  s = MatMul (q, t)  z = {copy} (s)  m = Mul (z, half)  "
    model = model_of(body + f"g = Softmax (m)  h = {copy} (g)  p = {copy} (h)  y = MatMul (p, v)")
    made, _ = standard(model)
    assert kinds(made) == ["Attention"]
    agree(model, made)
