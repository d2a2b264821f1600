"""Variances and distances as differences of squares and products, and their near twins."""

from __future__ import annotations

import numpy as np
import pytest

from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from support import cases
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


DIFFERENCES = {
    "q=Mul(x,x);e=ReduceMean[axes=-1](q);m=ReduceMean[axes=-1](x);s=Mul(m,m);v=Sub(e,s)": "q e m s v",
    "q=Pow(x,two);e=ReduceMean[axes=-1](q);m=ReduceMean[axes=-1](x);s=Pow(m,two);n=Neg(s);v=Add(n,e)": "q e m s n v",
    # sums, and what makes means of them
    "t=ReduceSumSquare[axes=-1](x);e=Mul(eighth,t);r=ReduceSum(x,last);m=Div(r,eight);s=Mul(m,m);v=Sub(e,s)": (
        "t e r m s v"
    ),
    # structural similarity: windows, and a covariance
    "q=Mul(p,o);e=Conv(q,blur);m=Conv(p,blur);n=Conv(o,blur);s=Mul(n,m);v=Sub(e,s)": "q e m n s v",
}
PRODUCTS = {
    CODEC: "p q d m a v",
    SPELLED: "q m n a v",
    "q=ReduceSumSquare[axes=-1](h);v=Gemm[alpha=-2.](h,c,q)": "q v",
    "p=Mul(h,h);q=ReduceSum(p,last);m=MatMul(h,c);b=Add(m,cc);v=Sub(q,b)": "p q m b v",
}
NEITHER = (
    "q=Mul(x,x);e=ReduceMean[axes=-1](q);m=ReduceMean[axes=-1](z);s=Mul(m,m);v=Sub(e,s)",  # of another value
    "q=Mul(x,z);e=ReduceMean[axes=-1](q);m=ReduceMean[axes=-1](x);s=Mul(m,m);v=Sub(e,s)",  # of one factor alone
    "e=ReduceMean[axes=-1](x);m=ReduceMean[axes=-1](x);s=Mul(m,m);v=Sub(e,s)",  # of no product
    "q=Mul(x,x);e=ReduceMax[axes=-1](q);m=ReduceMax[axes=-1](x);s=Mul(m,m);v=Sub(e,s)",  # of no means
    "q=Mul(x,x);e=ReduceMean[axes=-1](q);m=ReduceMean[axes=-1](x);s=Mul(m,m);v=Add(e,s)",  # a sum
    "q=Mul(x,z);e=MatMul(q,w);m=MatMul(x,r);n=MatMul(z,t);s=Mul(m,n);v=Sub(e,s)",  # layers, each of its own
    "a=MatMul(x,w);b=MatMul(x,r);m=Mul(a,b);v=Sub(a,m)",
    "r=RandomNormal[shape=8 8]();s=Mul(r,r);v=Sub(r,s)",  # of what nothing is read for
    "a=MatMul(x,w);v=Sub(a,a)",
    "q=ReduceSumSquare[axes=-1](h);m=MatMul(h,c);s=Sqrt(q);v=Div(m,s)",  # a cosine: the norm alone
    "q=ReduceSumSquare[axes=-1](h);t=Tanh(h);m=MatMul(t,c);v=Add(q,m)",  # of something else
    "q=ReduceSum(h,last);m=MatMul(h,c);v=Add(q,m)",  # a sum without squares
)


@pytest.mark.parametrize("text", [*DIFFERENCES, *PRODUCTS, *NEITHER])
def test_a_difference_of_products_is_held_with_what_computes_it_and_no_other(text: str) -> None:
    assert holds(text) == set((DIFFERENCES | PRODUCTS).get(text, "").split())


@pytest.mark.parametrize("text", DIFFERENCES)
def test_a_difference_of_means_of_products_is_held_in_float16(text: str) -> None:
    assert set(DIFFERENCES[text].split()) <= holds(text, DType.FLOAT16)


WRITTEN = "m=ReduceMax[keepdims=1](a,{});d=Sub(a,m);p=Exp(d);"


@pytest.mark.parametrize(
    ("peaks", "summed", "expected"), [("last", "last", False), ("first", "last", True), ("first", "both", False)]
)
@pytest.mark.parametrize("softmax", ["p=Softmax[axis={}](a);", WRITTEN], ids=["one op", "written out"])
def test_a_sum_of_exponentials_is_small_unless_it_adds_all_peaks(
    softmax: str, peaks: str, summed: str, expected: bool
) -> None:
    axes = {"first": np.array([0]), "last": np.array([-1]), "both": np.array([0, 1])}
    rows = softmax.format(peaks if softmax == WRITTEN else axes[peaks][0])
    text = f"a=MatMul(x,w);{rows}r=ReduceSum[keepdims=1](p,{summed});v=Div(p,r)"
    shapes = {"x": (16, 8)}
    view = View.of(Model.load(cases.build(text, ["v"], shapes=shapes, constants={"w": np.eye(8), **axes}, opset=18)))
    assert ("r" in held(view)) is expected


def test_a_softmax_of_old_opsets_has_rows_of_several_axes() -> None:
    text = "a=MatMul(x,w);p=Softmax[axis=1](a);r=ReduceSum[axes={}](p);v=Div(p,r)"
    found = []
    for axes in ("2", "1 2"):
        proto = cases.build(text.format(axes), ["v"], shapes={"x": (2, 16, 8)}, constants={"w": np.eye(8)}, opset=11)
        found.append("r" in held(View.of(Model.load(proto))))
    assert found == [True, False]
