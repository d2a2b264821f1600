"""Variances and covariances as differences of means, and their near twins."""

from __future__ import annotations

import numpy as np
import pytest

import amp_rewrite
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from support import cases, objections
from support.held import held

SHAPES = {"p": (1, 1, 8, 8), "o": (1, 1, 8, 8)}
CONSTANTS = {
    "two": 2.0,
    "eighth": 0.125,
    "eight": 8.0,
    "last": np.array([-1]),
    "blur": np.full((1, 1, 3, 3), 1 / 9),
    "w": np.eye(8),
}


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
        "q=Mul(x,x);e=ReduceMean[axes=-1](q);m=ReduceMean[axes=0](x);s=Mul(m,m);v=Sub(e,s)",  # over other elements
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
