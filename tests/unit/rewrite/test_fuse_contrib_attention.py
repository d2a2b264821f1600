"""Attention as MultiHeadAttention: what becomes one, what does not and why."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from amp_rewrite.rewrite.equivalence import UNIT
from support.contrib_models import (
    ATTENDED,
    EDGES,
    HIDDEN,
    INFINITE,
    MASKED,
    MERGED,
    NOTHING_SEEN,
    REST,
    SCORES,
    SOFTMAX,
    SPLIT,
    SQUARE,
    TURNED,
    agree,
    attention_of,
    fused,
    random_feed,
)
from support.fusing import kinds, outputs_of

MASKED_BY = SCORES.replace("s =", "s0 =") + "f = Cast <to = 1> (mask)  "


@pytest.mark.parametrize(
    ("body", "inputs", "outputs", "expected"),
    [
        (SPLIT + SCORES + SOFTMAX + REST + MERGED, EDGES, ATTENDED, ["MultiHeadAttention"]),
        (
            SPLIT + SCORES.replace("s =", "s0 =") + "s = Add (s0, causal)  " + SOFTMAX + REST + MERGED,
            SQUARE,
            ATTENDED,
            ["MultiHeadAttention"],
        ),
        (
            SPLIT + SCORES.replace("s =", "s0 =") + "s = Add (s0, added)  " + SOFTMAX + REST + MERGED,
            EDGES,
            ATTENDED,
            ["MultiHeadAttention"],
        ),
        (
            SPLIT + TURNED + SCORES.replace("(keys)", "(kn)").replace("(q,", "(xn,") + SOFTMAX + REST + MERGED,
            EDGES,
            ATTENDED,
            [*("Reshape", "Transpose") * 3, "Neg", "Neg", "Transpose", "Reshape", "MultiHeadAttention"],
        ),
        (
            SPLIT + SCORES + SOFTMAX + "y = MatMul (h, v)",
            EDGES,
            "float[2,2,3,4] y",
            ["MultiHeadAttention", "Reshape", "Transpose"],
        ),
        (
            SPLIT + HIDDEN + SOFTMAX + REST + MERGED,
            MASKED,
            ATTENDED,
            ["Cast", "ReduceSum", "Cast", "Squeeze", "Where", "Where", "MultiHeadAttention"],
        ),
        (
            SPLIT + MASKED_BY + "g = Sub (one, f)  a = Mul (g, lowest)  s = Add (s0, a)  " + SOFTMAX + REST + MERGED,
            MASKED,
            ATTENDED,
            ["Cast", "Sub", "Mul", "Greater", "Cast", "ReduceSum", "Cast", "Squeeze", "Where", "MultiHeadAttention"],
        ),
        (
            SPLIT + MASKED_BY + "a = Add (s0, added)  s = Add (a, f)  " + SOFTMAX + REST + MERGED,
            MASKED,
            ATTENDED,
            ["Cast", "Add", "MultiHeadAttention"],
        ),
        (
            SPLIT + INFINITE + NOTHING_SEEN + REST + MERGED,
            MASKED,
            ATTENDED,
            ["Cast", "ReduceSum", "Cast", "Squeeze", "Where", "MultiHeadAttention", "Where"],
        ),
    ],
)
@pytest.mark.parametrize("opset", [13, 22])
def test_attention_becomes_one_node(body: str, inputs: str, outputs: str, expected: list[str], opset: int) -> None:
    model = attention_of(body, inputs, outputs, opset)
    made, told = fused(model)
    assert kinds(made) == expected
    assert {kind for kind, _, _ in told} == {"fused"}
    feed: dict[str, Any] = random_feed(model)
    if "mask" in feed:
        feed["mask"] = feed["mask"] > 0
        feed["mask"][:, :, 0] = False  # a token that sees nothing
    for first, second in zip(outputs_of(model, feed), outputs_of(made, feed), strict=True):
        np.testing.assert_allclose(second, first, rtol=0, atol=64 * UNIT * float(np.abs(first).max()))


@pytest.mark.parametrize(
    ("body", "inputs", "why"),
    [
        (
            SPLIT + HIDDEN + SOFTMAX + REST + MERGED,
            EDGES + ", bool[3,5] mask",
            "its mask does not state batch and heads",
        ),
        (
            SPLIT + HIDDEN + SOFTMAX + REST + MERGED,
            EDGES + ", bool[2,2,3,5] mask",
            "a row of its mask may hide every key, and not in each head alike",
        ),
        (  # the kernel refuses them
            SPLIT.replace("v =", "v0 =")
            + "v = Concat <axis = 3> (v0, v0)  "
            + SCORES
            + SOFTMAX
            + "o = MatMul (h, v)  y = Neg (o)",
            EDGES,
            "its values are not as wide as its keys, and their heads are split off",
        ),
    ],
)
def test_an_attention_that_the_operator_does_not_quite_say_stays(body: str, inputs: str, why: str) -> None:
    outputs = "float[2,2,3,8] y" if "Concat" in body else "float[2,2,4,3] y" if "v1" in body else ATTENDED
    made, told = fused(attention_of(body, inputs, outputs))
    assert "MultiHeadAttention" not in kinds(made)
    assert ("not_fused", "multi_head_attention", f"1 stays unfused (ends in the_o): {why}") in told


@pytest.mark.parametrize("axis", ["", "<axis = 1>", "<axis = 3>", "<axis = -1>"])
def test_below_opset_13_a_softmax_is_over_all_axes_from_one_on(axis: str) -> None:
    body = SPLIT + SCORES + SOFTMAX.replace("<axis = -1>", axis) + REST + MERGED
    model = attention_of(body, opset=11)
    made, _ = fused(model)
    assert ("MultiHeadAttention" in kinds(made)) is (axis in ("<axis = 3>", "<axis = -1>"))
    agree(model, made)
