"""Logarithms of what a softmax or a sigmoid brings near 0 or 1, and their near twins."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest

import amp_rewrite
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from support import cases, objections
from support.held import held

SHAPES = {"x": (4, 16), "far": (4, 16)}
SCORES = np.eye(16) * 16
"""Scores from -10 to 10: a softmax goes down to e**-19, a sigmoid to e**-10 and as near to 1."""
CONSTANTS = {
    "w": SCORES,
    "signed": 8 - SCORES,
    "one": 1.0,
    "low": 1e-7,
    "high": 1 - 1e-7,
    "first": np.array([0]),
    "last": np.array([1]),
}
ENTROPY = "a=MatMul(x,w);p=Softmax(a);l=Log(p);q=Mul(p,l);y=ReduceSum(q,last)"
LOGIT = "a=MatMul(x,w);s=Sigmoid(a);p=Clip(s,low,high);n=Sub(one,p);o=Div(p,n);l=Log(o);y=Identity(l)"


def holds(text: str) -> set[str]:
    return set(held(View.of(Model.load(cases.build(text, ("y",), shapes=SHAPES, constants=CONSTANTS, opset=18)))))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ENTROPY, {"p", "l"}),
        (LOGIT, {"s", "p", "n", "o", "l"}),
        ("a=MatMul(x,w);t=Tanh(a);y=Atanh(t)", {"t", "y"}),
        ("a=MatMul(x,w);y=Asin(a)", {"a", "y"}),
        ("d=Add(x,x);y=Tan(d)", {"d", "y"}),
        ("a=MatMul(x,w);y=Tan(a)", set()),
        ("p=Softmax(x);r=ThresholdedRelu(p);y=Log(r)", {"p", "r", "y"}),
        ("e=Exp(x);r=ReduceSum(e,last);y=Log(r)", {"e", "r", "y"}),
        ("e=Exp(x);y=ReduceLogSum(e,last)", {"e", "y"}),
        ("p=Softmax(x);y=ReduceLogSum(p,last)", set()),  # a sum of all is 1
        ("p=Softmax(x);r=ReduceSum(p,last);y=Log(r)", set()),
        ("p=Softmax(x);r=ReduceSum(p,first);y=Log(r)", {"p", "r", "y"}),  # what no row prefers
        ("p=Softmax(x);y=ReduceLogSum(p,first)", {"p", "y"}),
        ("p=Softmax(x);t=Transpose(p);r=ReduceSum(t,first);y=Log(r)", set()),
        ("p=Softmax[axis=0](x);r=ReduceSum(p,first);y=Log(r)", set()),
        ("m=ReduceMax(x,last);d=Sub(x,m);e=Exp(d);r=ReduceSum(e,last);y=Log(r)", set()),
        ("m=ReduceMax(x,last);d=Sub(x,m);e=Exp(d);r=ReduceSum(e,first);y=Log(r)", {"e", "r", "y"}),
        ("a=MatMul(x,w);m=ReduceMax[keepdims=1](a,last);d=Sub(a,m);e=Exp(d);y=Log(e)", {"e", "y"}),
        ("a=MatMul(x,w);b=Add(a,one);y=Log(b)", {"b", "y"}),  # log1p
        ("a=Softmax(x);b=MatMul(a,w);y=Log(b)", {"a", "b", "y"}),  # weights that are not negative add small numbers
        ("a=Softmax(x);b=MatMul(a,signed);y=Log(b)", set()),  # these make anything of them
        ("a=MatMul(x,w);b=Add(a,far);r=Relu(b);y=Log(r)", set()),  # nothing squeezed
        ("a=MatMul(x,w);p=Softmax(a);y=MatMul(p,w)", set()),  # no logarithm
    ],
)
def test_what_stands_from_a_squeeze_to_a_logarithm_is_held(text: str, expected: set[str]) -> None:
    assert holds(text) == expected


@pytest.mark.parametrize("level", ["default", "lower-all"])
@pytest.mark.parametrize("to", ["float16", "bfloat16"])
@pytest.mark.parametrize("text", [ENTROPY, LOGIT], ids=["entropy", "logit"])
def test_unlikely_classes_and_likely_ones_keep_a_finite_logarithm(text: str, to: str, level: str) -> None:
    """One rounding of the scores, of the logarithm, of its product and of the result: 4 eps (conformance.judge)."""
    model = cases.build(text + ";z=MatMul(l,w)", ("y", "z"), shapes=SHAPES, constants=CONSTANTS, opset=18)
    feeds = {"x": np.linspace(-0.6, 0.6, 64, dtype=np.float32).reshape(4, 16, order="F")}
    result = amp_rewrite.convert(model, to=to, level=level)
    found = objections.run(amp_rewrite.emulate(result.model).to_proto(), feeds)
    wanted = objections.run(model, feeds, "BASIC")
    assert objections.of_outputs(wanted, found, bound=4 * DType.parse(to).eps) == []


def test_without_the_rules_they_do_not() -> None:
    model = cases.build(ENTROPY, ("y",), shapes=SHAPES, constants=CONSTANTS, opset=18)
    feeds = {"x": np.linspace(-0.6, 0.6, 64, dtype=np.float32).reshape(4, 16, order="F")}
    plain = amp_rewrite.convert(model, safety="none", level="lower-all").model
    found = objections.run(amp_rewrite.emulate(plain).to_proto(), feeds)
    assert objections.of_outputs(objections.run(model, feeds, "BASIC"), found, bound=1.0) == ["output 0: is not finite"]


@pytest.mark.parametrize(
    "end",
    [
        "y=ArgMax[axis=1](s)",
        "y=ArgMin[axis=1](s)",
        "v,y=TopK[axis=1](s,k)",
        "b=Reshape(x,boxes);r=Reshape(s,rows);y=NonMaxSuppression(b,r,k)",
    ],
)
def test_scores_near_1_are_computed_in_float32_where_an_op_ranks_them(end: str) -> None:
    constants = {"k": np.array([2]), "w": SCORES, "boxes": np.array([1, 16, 4]), "rows": np.array([1, 4, 16])}
    model = cases.build(f"a=MatMul(x,w);s=Sigmoid(a);{end}", ("y",), shapes=SHAPES, constants=constants)
    found = held(View.of(Model.load(model)))
    assert "s" in found and "a" not in found


def test_a_triangle_of_the_runtime_moves_numbers_as_that_of_the_standard_does() -> None:
    head = '<ir_version: 8, opset_import: ["": 18, "com.microsoft": 1]> g (float[16,16] x) => (float[16,16] y)'
    model = onnx.parser.parse_model(head + " { p = Softmax (x)  t = com.microsoft.Trilu (p)  y = Log (t) }")
    assert set(held(View.of(Model.load(model)))) == {"p", "t", "y"}
