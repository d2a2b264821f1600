"""Variances and distances as differences of squares and products, and their near twins."""

from __future__ import annotations

import numpy as np
import pytest

import amp_rewrite
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from support import cases, objections
from support.held import held

SHAPES = {"p": (1, 1, 8, 8), "o": (1, 1, 8, 8), "h": (6, 16)}
CODES = np.random.default_rng(0).normal(size=(16, 5))
CONSTANTS = {
    "two": 2.0,
    "eighth": 0.125,
    "eight": 8.0,
    "last": np.array([-1]),
    "blur": np.full((1, 1, 3, 3), 1 / 9),
    "w": np.eye(8),
    "c": CODES,
    "cc": (CODES**2).sum(0),
    "less": -2.0,
}
CODEC = "p=Pow(h,two);q=ReduceSum(p,last);d=Mul(h,two);m=MatMul(d,c);a=Sub(q,m);v=Add(a,cc)"
SPELLED = "q=ReduceSumSquare[axes=-1](h);m=MatMul(h,c);n=Mul(m,less);a=Add(q,n);v=Add(a,cc)"


def holds(text: str, to: DType = DType.BFLOAT16) -> set[str]:
    view = View.of(Model.load(cases.build(text, ["v"], shapes=SHAPES, constants=CONSTANTS)))
    return set(held(view, to))


@pytest.mark.parametrize(
    ("text", "ops"),
    [
        ("q=Mul(x,x);e=ReduceMean[axes=-1](q);m=ReduceMean[axes=-1](x);s=Mul(m,m);v=Sub(e,s)", "q e m s v"),
        (
            "q=Pow(x,two);e=ReduceMean[axes=-1](q);m=ReduceMean[axes=-1](x);s=Pow(m,two);n=Neg(s);v=Add(n,e)",
            "q e m s v",
        ),
        (  # sums, and what makes means of them
            "t=ReduceSumSquare[axes=-1](x);e=Mul(eighth,t);r=ReduceSum(x,last);m=Div(r,eight);s=Mul(m,m);v=Sub(e,s)",
            "t e r m s v",
        ),
        (  # structural similarity: windows, and a covariance
            "q=Mul(p,o);e=Conv(q,blur);m=Conv(p,blur);n=Conv(o,blur);s=Mul(n,m);v=Sub(e,s)",
            "q e m n s v",
        ),
        ("q=Mul(p,p);e=GlobalAveragePool(q);m=GlobalAveragePool(p);s=Mul(m,m);v=Sub(s,e)", "q e m s v"),
    ],
)
@pytest.mark.parametrize("to", [DType.FLOAT16, DType.BFLOAT16], ids=lambda to: to.spelling)
def test_a_difference_of_means_of_products_is_held_with_what_computes_it(text: str, ops: str, to: DType) -> None:
    assert set(ops.split()) <= holds(text, to)


@pytest.mark.parametrize(
    "text",
    [
        "q=Mul(x,x);e=ReduceMean[axes=-1](q);m=ReduceMean[axes=-1](z);s=Mul(m,m);v=Sub(e,s)",  # of another value
        "q=Mul(x,z);e=ReduceMean[axes=-1](q);m=ReduceMean[axes=-1](x);s=Mul(m,m);v=Sub(e,s)",  # of one factor alone
        "e=ReduceMean[axes=-1](x);m=ReduceMean[axes=-1](x);s=Mul(m,m);v=Sub(e,s)",  # of no product
        "q=Mul(x,x);e=ReduceMax[axes=-1](q);m=ReduceMax[axes=-1](x);s=Mul(m,m);v=Sub(e,s)",  # of no means
        "q=Mul(x,x);e=ReduceMean[axes=-1](q);m=ReduceMean[axes=-1](x);s=Mul(m,m);v=Add(e,s)",  # a sum
        "q=Mul(x,z);e=MatMul(q,w);m=MatMul(x,r);n=MatMul(z,t);s=Mul(m,n);v=Sub(e,s)",  # layers, each of its own
        "a=MatMul(x,w);b=MatMul(x,r);m=Mul(a,b);v=Sub(a,m)",
        "r=RandomNormal[shape=8 8]();s=Mul(r,r);v=Sub(r,s)",  # of what nothing is read for
        "a=MatMul(x,w);v=Sub(a,a)",
    ],
)
def test_no_other_difference_is(text: str) -> None:
    assert holds(text) == set()


@pytest.mark.parametrize("to", ["float16", "bfloat16"])
def test_small_changes_on_an_offset_keep_their_variance(to: str) -> None:
    text = (
        "a=MatMul(x,w);q=Mul(a,a);e=ReduceMean[axes=-1](q);m=ReduceMean[axes=-1](a);s=Mul(m,m);v=Sub(e,s);y=MatMul(v,u)"
    )
    constants = {**CONSTANTS, "u": np.ones((1, 8))}
    model = cases.build(text, ["y"], constants=constants)
    feed = {"x": (10 + np.random.default_rng(0).uniform(-1, 1, (8, 8)).astype(np.float32).round(5))}
    expected = objections.run(model, feed)

    def found(**options: str) -> list[str]:
        twin = amp_rewrite.emulate(amp_rewrite.convert(model, to=to, target="onnx", **options).model).proto
        return objections.of_outputs(expected, objections.run(twin, feed), bound=0.1)

    assert found() == []
    assert found(safety="none", level="lower-all") != []


@pytest.mark.parametrize(
    ("text", "ops"),
    [
        (CODEC, "p q m a v"),
        (SPELLED, "q m n a v"),
        ("q=ReduceSumSquare[axes=-1](h);v=Gemm[alpha=-2.](h,c,q)", "q v"),
        ("p=Mul(h,h);q=ReduceSum(p,last);m=MatMul(h,c);b=Add(m,cc);v=Sub(q,b)", "p q m b v"),
    ],
)
def test_a_product_is_held_where_it_meets_the_squares_of_its_factor(text: str, ops: str) -> None:
    assert set(ops.split()) <= holds(text)


@pytest.mark.parametrize(
    ("text", "ops"),
    [
        ("q=ReduceSumSquare[axes=-1](h);m=MatMul(h,c);s=Sqrt(q);v=Div(m,s)", ""),  # a cosine: the norm alone
        ("q=ReduceSumSquare[axes=-1](h);t=Tanh(h);m=MatMul(t,c);v=Add(q,m)", ""),  # of something else
        ("q=ReduceSum(h,last);m=MatMul(h,c);v=Add(q,m)", ""),  # a sum without squares
    ],
)
def test_a_product_that_meets_no_squares_of_its_factor_is_not(text: str, ops: str) -> None:
    assert holds(text) == set(ops.split())


def test_a_distance_stays_float32_in_a_second_conversion_with_lowered_squares() -> None:
    proto = cases.build(SPELLED, ["v"], shapes=SHAPES, constants=CONSTANTS)
    once = amp_rewrite.convert(proto, level="lower-all").model
    again = amp_rewrite.convert(once, level="lower-all").model
    assert again.SerializeToString(deterministic=True) == once.SerializeToString(deterministic=True)


@pytest.mark.parametrize("text", [CODEC, SPELLED])
def test_the_nearest_centre_is_found_far_from_the_origin(text: str) -> None:
    """Points 32 from the origin in each coordinate, 1 apart: x·c is 16384, where float16 counts in steps of 8."""
    centres = 32 + np.eye(16)
    constants = {**CONSTANTS, "c": centres.T, "cc": (centres**2).sum(1), "u": np.eye(16)}
    model = cases.build(
        f"h=MatMul(x,u);{text};y=ArgMin[axis=1,keepdims=0](v)", ["y"], shapes={"x": (6, 16)}, constants=constants
    )
    feed = {"x": centres[[2, 0, 3, 1, 1, 2]].astype(np.float32)}

    def found(safety: str) -> list[int]:
        twin = amp_rewrite.emulate(amp_rewrite.convert(model, safety=safety).model).to_proto()
        return list(objections.run(twin, feed)[0])

    assert found("default") == [2, 0, 3, 1, 1, 2]
    assert found("none") != [2, 0, 3, 1, 1, 2]
