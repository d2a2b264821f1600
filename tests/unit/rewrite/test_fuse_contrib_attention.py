"""Attention as MultiHeadAttention: what becomes one, what does not and why."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import NodeProto, numpy_helper

from amp_rewrite.rewrite import equivalence, reference
from amp_rewrite.rewrite.equivalence import UNIT
from amp_rewrite.rewrite.reference import computed
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
    Arrays,
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
@pytest.mark.parametrize("opset", [13, 18, 22])
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


def test_heads_of_an_odd_width_become_one_node() -> None:
    body = SPLIT + SCORES + SOFTMAX + REST + MERGED
    model = attention_of(body, EDGES.replace("8]", "6]"), ATTENDED.replace("8]", "6]"))
    sides = {"heads": np.array([0, 0, 2, 3]), "flat": np.array([0, 0, 6])}
    for tensor in model.graph.initializer:
        if tensor.name in sides:
            tensor.CopyFrom(numpy_helper.from_array(sides[tensor.name], tensor.name))
    assert kinds(fused(model)[0]) == ["MultiHeadAttention"]


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


def test_an_attention_with_another_number_is_refused_by_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """A must-fail twin of the proof."""

    def distorted(node: NodeProto, feed: Arrays) -> dict[str, np.ndarray[Any, Any]]:
        copy = NodeProto()
        copy.CopyFrom(node)
        for stated in copy.attribute:
            stated.f *= 1.0001 if stated.name == "scale" else 1.0
        return computed(copy, feed)

    monkeypatch.setattr(reference, "computed", distorted)
    monkeypatch.setattr(equivalence, "_PROVED", set())
    told = fused(attention_of(SPLIT + SCORES + SOFTMAX + REST + MERGED))[1]
    assert [message.rpartition(" by ")[0] for kind, subject, message in told if subject == "multi_head_attention"] == [
        "1 stays unfused (ends in the_o): on random inputs the results differ"
    ]
