"""Biases that grow with the position, added to scores, and their near twins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from amp_rewrite.decide.hazards.coordinates import position_bias
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from support import cases

LINEAR = np.arange(256.0) * -0.5
SLOPES = np.array([0.5, 0.25]).reshape(2, 1, 1)
SHAPES = {"q": (4, 8), "k": (8, 256), "length": ()}
SCORES = "s=MatMul(q,k);b=Add(s,bias);y=Softmax(b)"


def pinned(text: str = SCORES, to: DType = DType.FLOAT16, **constants: Any) -> str:
    model = cases.build(text, ["y"], shapes=SHAPES, types={"length": "int"}, constants=constants)
    view = View.of(Model.load(model))
    return " ".join(view.ops[pin.op].node.output[0] for pin in position_bias(view, to))


@pytest.mark.parametrize("bias", [LINEAR, -LINEAR, LINEAR[None], SLOPES * np.arange(256), LINEAR + 300])
def test_scores_with_a_far_bias_are_pinned_up_to_the_softmax(bias: Any) -> None:
    assert pinned(bias=bias) == "b y"


def test_what_is_far_depends_on_the_type() -> None:
    near = np.arange(256.0) / 16
    assert (pinned(bias=near), pinned(to=DType.BFLOAT16, bias=near)) == ("", "b y")


def test_fills_beside_the_bias_do_not_hide_it() -> None:
    masked = np.where(np.arange(256) < 200, LINEAR, -1e9)
    assert pinned(bias=masked) == "b y"


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
    assert pinned(bias=bias) == ""


def test_what_no_softmax_reads_is_left_alone() -> None:
    assert pinned("s=MatMul(q,k);b=Add(s,bias);y=Relu(b)", bias=LINEAR) == ""


def test_a_counted_bias_of_unknown_length_is_pinned_from_where_it_counts() -> None:
    text = "s=MatMul(q,k);r=Range(zero,length,one);f=Cast[to=float](r);p=Mul(f,slope);b=Add(s,p);y=Softmax(b)"
    numbers = {"zero": np.array(0), "one": np.array(1), "slope": 0.25}
    assert pinned(text, **numbers) == "f p b y"


def test_a_bias_that_a_layer_makes_of_positions_is_learned() -> None:
    text = "r=Range(zero,length,one);f=Cast[to=float](r);e=MatMul(f,w);b=Add(s,e);y=Softmax(b)"
    assert pinned(text, zero=np.array(0), one=np.array(1), w=np.ones((256, 256)), s=np.ones((4, 256))) == ""
