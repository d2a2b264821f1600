"""Biases that grow with the position, added to scores, and their near twins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from amp_rewrite.decide.reasons import POSITION
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from support import cases
from support.held import held

LINEAR = np.arange(256.0) * -0.5
SLOPES = np.array([0.5, 0.25]).reshape(2, 1, 1)
SHAPES = {"q": (4, 8), "k": (8, 256), "length": (), "seen": (4, 256), "more": (4, 256)}
SCORES = "s=MatMul(q,k);b=Add(s,bias);y=Softmax(b)"
MASKED = "s=MatMul(q,k);b=Add(s,bias);m=Where(seen,b,fill);y=Softmax(m)"
COUNTED = "s=MatMul(q,k);r=Range(zero,length,one);f=Cast[to=float](r);p=Mul(f,slope);"
NUMBERS: dict[str, Any] = {"zero": np.array(0), "one": np.array(1), "slope": 0.25, "none": 0.0}
FILL = np.array(-1e4)
LATE = np.arange(256) >= 200


def reasons(text: str, to: DType = DType.FLOAT16, **constants: Any) -> dict[str, str]:
    model = cases.build(text, ["y"], shapes=SHAPES, types={"length": "int", "seen": "bool"}, constants=constants)
    return held(View.of(Model.load(model)), to)


def kept(text: str = SCORES, to: DType = DType.FLOAT16, **constants: Any) -> str:
    return " ".join(reasons(text, to, **constants))


@pytest.mark.parametrize("bias", [LINEAR, -LINEAR, LINEAR[None], SLOPES * np.arange(256), LINEAR + 300])
def test_scores_with_a_far_bias_are_held_up_to_the_softmax(bias: Any) -> None:
    assert kept(MASKED, bias=bias, fill=FILL) == "b m y"


@pytest.mark.parametrize("bias", [LINEAR, LINEAR[None] + 60, SLOPES * (np.arange(256) - 255)])
def test_a_bias_near_zero_at_the_best_key_of_each_row_is_left_alone(bias: Any) -> None:
    assert kept(bias=bias) == ""


@pytest.mark.parametrize(
    "bias",
    [
        LINEAR + 300,
        LINEAR - 100,
        (0.707 * np.arange(256)).astype(np.float32),  # float32 rounds the steps
        np.where(LATE, LINEAR, -1e9),  # fills beside it
    ],
)
def test_a_bias_far_from_zero_at_the_best_key_of_a_row_is_held(bias: Any) -> None:
    assert kept(bias=bias) == "b y"


def test_only_the_keys_that_a_row_shows_count() -> None:
    assert kept(MASKED, bias=LINEAR, fill=FILL, seen=LATE) == "b m y"
    assert kept(MASKED, bias=LINEAR, fill=FILL, seen=~LATE) == ""
    assert kept(MASKED, bias=LINEAR, fill=FILL, seen=np.zeros(256, bool)) == "b m y"  # nothing is shown


@pytest.mark.parametrize(
    "text",
    [
        "s=MatMul(q,k);b=Add(s,bias);c=Add(b,more);y=Softmax(c)",  # which may hide the near keys
        "t=MatMul(q,k);s=Add(t,more);b=Add(s,bias);y=Softmax(b)",
        "b=Add(more,bias);y=Softmax(b)",
        "s=Gemm(q,k,more);b=Add(s,bias);y=Softmax(b)",
    ],
)
def test_scores_with_an_unknown_mask_are_held(text: str) -> None:
    assert {"b", "y"} <= reasons(text, bias=LINEAR).keys()


def test_a_constant_that_one_softmax_masks_is_held_at_that_softmax_alone() -> None:
    text = "s=MatMul(q,k);b=Add(s,bias);t=Softmax(b);u=MatMul(t,v);c=Add(u,bias);m=Where(seen,c,fill);y=Softmax(m)"
    assert kept(text, bias=LINEAR, fill=FILL, v=np.ones((256, 256))) == "c m y"


def test_what_is_far_depends_on_the_type() -> None:
    near = np.arange(256.0) / 16
    assert [kept(MASKED, to, bias=near, fill=FILL) for to in (DType.FLOAT16, DType.BFLOAT16)] == ["", "b m y"]


@pytest.mark.parametrize(
    "bias",
    [
        np.random.default_rng(0).standard_normal(256) * 100,  # learned
        np.where(np.arange(256) < 128, 0, -1e4),  # a mask
        np.full(256, 100.0),
        np.float64(100.0),
    ],
)
def test_other_biases_are_left_alone(bias: Any) -> None:
    assert kept(MASKED, bias=bias, fill=FILL) == ""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("m=Neg(p)", "f p m b y"),
        ("e=Equal(p,none);n=Not(e);m=Where(n,p,fill)", "f p m b y"),
        ("e=Less(p,none);m=Where(e,p,fill)", "f p m b y"),
        ("e=Equal(p,f);m=Where(e,p,fill)", "f p e m b y"),
    ],
)
def test_a_counted_bias_of_unknown_length_is_held_unless_a_where_keeps_one_number_of_it(
    words: str, expected: str
) -> None:
    assert kept(f"{COUNTED}{words};b=Add(s,m);y=Softmax(b)", fill=FILL, **NUMBERS) == expected


def test_a_bias_that_no_softmax_reads_or_that_a_layer_makes_of_positions_is_left_alone() -> None:
    assert kept("s=MatMul(q,k);b=Add(s,bias);r=Relu(b);y=MatMul(r,v)", bias=LINEAR, v=np.ones((256, 8))) == ""
    text = "r=Range(zero,length,one);f=Cast[to=float](r);e=MatMul(f,w);b=Add(s,e);y=Softmax(b)"
    assert kept(text, zero=np.array(0), one=np.array(1), w=np.ones((256, 256)), s=np.ones((4, 256))) == ""


@pytest.mark.parametrize("size", [-3.4e38, -1e4, np.nan])
@pytest.mark.parametrize("shape", [(), (256,), (2, 4, 256)])
@pytest.mark.parametrize("to", [DType.FLOAT16, DType.BFLOAT16])
def test_a_constant_of_one_number_counts_nothing(size: float, shape: tuple[int, ...], to: DType) -> None:
    assert POSITION not in reasons(MASKED, to, bias=np.full(shape, size), fill=FILL).values()
