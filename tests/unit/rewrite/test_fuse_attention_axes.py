"""Attention over three axes, batch and heads as one; values on the left; copies in between."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper

from support.attention_models import GUARDED, HIDDEN, WEIGHTS, agree, attention, model_of
from support.fusing import kinds, standard

FLAT = "float[4,3,4] q, float[4,5,4] k, float[4,5,6] v"
TURNED = "t = Transpose <perm = [0, 2, 1]> (k)  s = MatMul (q, t)  z = Mul (s, half)  "
ENDED = "m = Identity (z)  " + WEIGHTS
COUNTS = ", int64[4,3,5] n"
RAISED = ["Unsqueeze"] * 3
SPLIT = ["Shape", "Concat", "Reshape"]
LAID_OUT = "c = Reshape (z, parted)  "
BACK = "g = Softmax (m)  p = Reshape (g, merged)  y = MatMul (p, v)"
SIZES = {"parted": [2, 2, 3, 5], "merged": [4, 3, 5], "apart": [2, 2, 3, 6], "odd": [2, 2, 5, 3]}


def shaped(model: ModelProto, **sizes: list[int]) -> ModelProto:
    """The model with these shapes by name."""
    tensors = {t.name: t for t in model.graph.initializer}
    tensors |= {name: numpy_helper.from_array(np.array(shape), name) for name, shape in {**SIZES, **sizes}.items()}
    del model.graph.initializer[:]
    model.graph.initializer.extend(tensors.values())
    return model


def flat(body: str, more: str = "", **sizes: list[int]) -> ModelProto:
    """An attention over three axes."""
    return shaped(model_of(body, more, inputs=FLAT, output="float[4,3,6] y"), **sizes)


@pytest.mark.parametrize(
    ("body", "more", "expected"),
    [
        (TURNED + ENDED, "", [*RAISED, "Attention", "Squeeze"]),
        (TURNED + "m = Add (z, w)  " + WEIGHTS, COUNTS, ["Cast", "Unsqueeze", *RAISED, "Attention", "Squeeze"]),
        (TURNED + "m = Where (mask, z, fill)  " + WEIGHTS, ", bool[4,3,5] mask", None),
        (TURNED + "m = Where (mask, z, inf)  " + GUARDED, ", bool[3,5] mask", None),
    ],
)  # fmt: skip
def test_three_axes_are_those_of_one_head(body: str, more: str, expected: list[str] | None) -> None:
    model = flat(body.replace("m = Add (z, w)", "w = Cast <to = 1> (n)  m = Add (z, w)"), more)
    made, told = standard(model)
    assert [kind for kind, _, _ in told] == ["fused"]
    assert expected is None or sorted(kinds(made)) == sorted(expected)
    agree(model, made)


def test_scores_that_are_split_in_heads_for_a_mask_make_operands_that_are() -> None:
    """As in models whose products are of three axes and whose masks are of four; their bias comes before."""
    body = TURNED + "w = Cast <to = 1> (n)  a = Add (z, w)  c = Reshape (a, parted)  m = Where (mask, c, fill)  " + BACK
    model = flat(body, ", bool[2,1,3,5] mask, int64[4,1,5] n")
    made, told = standard(model)
    assert [kind for kind, _, _ in told] == ["fused"]
    assert (kinds(made).count("Attention"), kinds(made).count("Reshape")) == (1, 5)
    agree(model, made)


def test_operands_are_read_before_their_heads_were_put_together() -> None:
    joined = "".join(f"{x} = Reshape ({x}4, {x}3)  " for x in "qkv")
    body = (
        joined
        + TURNED
        + LAID_OUT
        + "m = Where (mask, c, fill)  "
        + BACK.replace("y =", "o =")
        + "  y = Reshape (o, apart)"
    )
    model = model_of(body, ", bool[2,1,3,5] mask", inputs="float[2,2,3,4] q4, float[2,2,5,4] k4, float[2,2,5,6] v4")
    shaped(model, q3=[4, 3, 4], k3=[4, 5, 4], v3=[4, 5, 6])
    made, _ = standard(model)
    assert kinds(made) == [*HIDDEN, "Where", "Attention"]
    assert (list(attention(made).input)[1:3], list(attention(made).output)) == (["k4", "v4"], ["y"])
    agree(model, made)


@pytest.mark.parametrize(
    ("inputs", "perm", "output", "behind"),
    [
        ("float[4,3,4] q, float[4,4,5] t, float[4,6,5] v", [0, 2, 1], "float[4,6,3] y", ["Transpose", "Squeeze"]),
        ("float[2,2,3,4] q, float[2,2,4,5] t, float[2,2,6,5] v", [0, 1, 3, 2], "float[2,2,6,3] y", ["Transpose"]),
    ],
)
def test_values_on_the_left_are_transposed_and_so_is_the_result(
    inputs: str, perm: list[int], output: str, behind: list[str]
) -> None:
    """V softmax(Q Kᵀ)ᵀ, as networks of convolutions have it."""
    body = (
        f"s = MatMul (q, t)  m = Mul (s, half)  p = Softmax (m)  r = Transpose <perm = {perm}> (p)  y = MatMul (v, r)"
    )
    model = model_of(body, inputs=inputs, output=output)
    made, _ = standard(model)
    assert kinds(made)[kinds(made).index("Attention") :] == ["Attention", *behind]
    agree(model, made)


@pytest.mark.parametrize("copy", ["Identity", "Cast <to = 1>"])
def test_copies_between_the_softmax_and_its_products_go_along(copy: str) -> None:
    body = f"t = Transpose <perm = [0, 1, 3, 2]> (k)  s = MatMul (q, t)  z = {copy} (s)  m = Mul (z, half)  "
    model = model_of(body + f"g = Softmax (m)  h = {copy} (g)  p = {copy} (h)  y = MatMul (p, v)")
    made, _ = standard(model)
    assert kinds(made) == ["Attention"]
    agree(model, made)


TWICE = "its scores are laid out anew twice"
NOT_BACK = "its scores are reshaped or transposed, and not back"
NOT_SPLIT = "batch and heads of its scores are not known to be split and put together again"


@pytest.mark.parametrize(
    ("body", "sizes", "why"),
    [
        (TURNED + LAID_OUT + "m = Identity (c)  " + BACK, {"parted": [2, 2, 5, 3]}, NOT_SPLIT),
        (TURNED + LAID_OUT + "m = Identity (c)  " + BACK, {"merged": [4, 5, 3]}, NOT_SPLIT),
        (TURNED + "c = Reshape (z, odd)  d = Reshape (c, parted)  m = Identity (d)  " + BACK, {}, TWICE),
        (TURNED + LAID_OUT + "d = Reshape (c, merged)  m = Identity (d)  " + WEIGHTS, {}, TWICE),
        (TURNED + "g = Softmax (z)  p = Reshape (g, merged)  y = MatMul (p, v)", {}, NOT_BACK),
        (TURNED + "m = Add (z, solid)  " + WEIGHTS, {}, None),
    ],
)  # fmt: skip
def test_scores_that_are_laid_out_in_another_way_stay(body: str, sizes: dict[str, list[int]], why: str | None) -> None:
    values = "float[4,5,6] v" if "[4, 5, 3]" not in str(sizes) else "float[4,3,6] v"
    rows = 5 if "[4, 5, 3]" in str(sizes) else 3
    model = model_of(body, inputs=f"float[4,3,4] q, float[4,5,4] k, {values}", output=f"float[4,{rows},6] y")
    shaped(model, **sizes)
    model.graph.initializer.append(numpy_helper.from_array(np.full((4, 3, 5), 0.5, np.float32), "solid"))
    made, told = standard(model)
    if why is None:  # the twin that none of this forbids
        assert "Attention" in kinds(made)
        agree(model, made)
    else:
        assert [message.split(": ", 1)[1] for kind, _, message in told if kind == "not_fused"] == [why]
        assert "Attention" not in kinds(made)
