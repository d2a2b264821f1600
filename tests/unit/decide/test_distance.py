"""Distances as differences of squares and products, and their near twins."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

import amp_rewrite
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from support import cases
from support.held import held

SHAPES = {"x": (6, 4)}
CODES = np.random.default_rng(0).normal(size=(4, 5))
CONSTANTS = {"c": CODES, "cc": (CODES**2).sum(0), "two": 2.0, "less": -2.0, "one": np.array([1])}
CODEC = "p=Pow(x,two);q=ReduceSum(p,one);d=Mul(x,two);m=MatMul(d,c);a=Sub(q,m);y=Add(a,cc)"


def holds(text: str) -> set[str]:
    proto = cases.build(text, ("y",), shapes=SHAPES, constants=CONSTANTS, opset=18)
    return set(held(View.of(Model.load(proto))))


@pytest.mark.parametrize(
    ("text", "ops"),
    [
        (CODEC, "p q m a y"),
        ("q=ReduceSumSquare(x,one);m=MatMul(x,c);n=Mul(m,less);a=Add(q,n);y=Add(a,cc)", "q m n a y"),
        ("q=ReduceSumSquare(x,one);y=Gemm[alpha=-2.](x,c,q)", "q y"),
        ("p=Mul(x,x);q=ReduceSum(p,one);m=MatMul(x,c);b=Add(m,cc);y=Sub(q,b)", "p q m b y"),
    ],
)
def test_a_product_is_held_where_it_meets_the_squares_of_its_factor(text: str, ops: str) -> None:
    assert set(ops.split()) <= holds(text)


@pytest.mark.parametrize(
    ("text", "ops"),
    [
        ("q=ReduceSumSquare(x,one);m=MatMul(x,c);s=Sqrt(q);y=Div(m,s)", "q s y"),  # a cosine: small norms, no product
        ("q=ReduceSumSquare(x,one);t=Tanh(x);m=MatMul(t,c);y=Add(q,m)", ""),  # of something else
        ("q=ReduceSum(x,one);m=MatMul(x,c);y=Add(q,m)", ""),  # a sum without squares
    ],
)
def test_a_product_that_meets_no_squares_of_its_factor_is_not(text: str, ops: str) -> None:
    assert holds(text) == set(ops.split())


def test_a_distance_stays_float32_in_a_second_conversion_with_lowered_squares() -> None:
    text = "p=Mul(x,x);q=ReduceSum(p,one);m=MatMul(x,c);b=Add(m,cc);y=Sub(q,b)"
    proto = cases.build(text, ["y"], shapes=SHAPES, constants=CONSTANTS, opset=18)
    once = amp_rewrite.convert(proto, level="lower-all").model
    again = amp_rewrite.convert(once, level="lower-all").model
    assert again.SerializeToString(deterministic=True) == once.SerializeToString(deterministic=True)


def test_the_nearest_centre_is_found_far_from_the_origin() -> None:
    """Points 64 from the origin in each coordinate, 1 apart: x·c is 16384, where float16 counts in steps of 8."""
    centres = 64 + np.eye(4)
    constants = {**CONSTANTS, "c": centres.T, "cc": (centres**2).sum(1)}
    proto = cases.build(CODEC + ";i=ArgMin[axis=1](y)", ["i"], shapes=SHAPES, constants=constants, opset=18)
    points = centres[[2, 0, 3, 1, 1, 2]].astype(np.float32)
    given = {safety: amp_rewrite.convert(proto, safety=safety).model for safety in ("default", "none")}
    found = {safety: _run(model, points) for safety, model in given.items()}
    assert found["default"] == [2, 0, 3, 1, 1, 2]
    assert found["none"] != found["default"]


def _run(model: object, points: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> list[int]:
    twin = amp_rewrite.emulate(model).to_proto().SerializeToString()
    session = onnxruntime.InferenceSession(twin, providers=["CPUExecutionProvider"])
    return [int(row[0]) for row in session.run(None, {"x": points})[0]]
