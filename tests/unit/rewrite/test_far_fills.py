"""Fills behind which ops follow: the same flags and finite numbers in every low type, whatever the row shows."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto

from amp_rewrite.pipeline.conversion import Converted
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.rewrite.emulate import emulate
from support import cases

SHAPES = {
    "q": (2, 6, 8),
    "k": (2, 8, 6),
    "m": (2, 6, 6),
    "t": (1,),
    "y": (2, 6, 6),
    "z": (2, 6, 8),
    "row": (2, 6, 1),
    "head": (2, 1, 6),
    "pair": (2, 6, 5),
}
ROWS = np.array([2])
NUMBERS: Mapping[str, Any] = {
    "lowest": -3e38,
    "near": -1e4,
    "far": -3e4,
    "farther": -1e8,
    "zero": 0.0,
    "half": 0.5,
    "two": 2.0,
    "eight": 8.0,
    "tenth": 0.1,
    "warm": 0.7,
    "cap": 30.0,
    "large": 1e8,
    "small": 0.05,
    "all": np.array([6]),
    "one": 1.0,
    "rows": ROWS,
    "heads": np.array([1]),
    "axis": np.array(2),
    "first": np.array([0]),
    "second": np.array([1]),
    "five": np.array([5]),
    "six": np.array([6]),
    "ends": np.array([0, 0, 1, 0, 0, 1]),
    "flat": np.array([2, 6, 1]),
    "hidden": np.array([1, 1, 1, 0, 0, 0], bool),
    "least": np.zeros((2, 6, 1), np.int64),
    "width": np.array([6]),
}
SEEN = np.tri(6, dtype=bool) & np.array([[[True]], [[True]]])
SEEN[1, 0] = False  # a row that shows nothing
S = "a=MatMul(q,k);s=Where(m,a,fill);"
SOFT = "p=Softmax(d);z=MatMul(p,q)"
SORTED = "v,i=TopK(s,all);b=Slice(v,first,five,rows);c=Slice(v,second,six,rows);"
MAX = "r=ReduceMax(s,rows);"
BOUNDED = {
    "a softmax": f"{S}d=Identity(s);{SOFT}",
    "a temperature": f"{S}d=Div(s,warm);{SOFT}",
    "a product by two": f"{S}d=Mul(s,two);{SOFT}",
    "sorted, then a temperature": f"{S}v,i=TopK(s,all);d=Div(v,half);{SOFT}",
    "the larger of two": f"{S}o=Where(m,fill,a);b=Max(s,o);d=Div(b,half);{SOFT}",
    "the smaller of two": f"{S}o=Where(m,fill,a);b=Min(s,o);d=Div(b,half);{SOFT}",
    "bounds": f"{S}b=Max(s,lowest);c=Min(b,large);d=Div(c,half);{SOFT}",
    "a capped score": f"{S}b=Div(s,cap);c=Tanh(b);d=Mul(c,cap);{SOFT}",
    "padding": f"a=MatMul(q,k);b=Pad(a,ends,fill);c=Slice(b,first,six,rows);d=Div(c,half);{SOFT}",
    "scattered": f"a=MatMul(q,k);o=Expand(fill,flat);b=ScatterElements[axis=2](a,least,o);d=Div(b,half);{SOFT}",
    "a softmax written out": f"{S}{MAX}d=Sub(s,r);e=Exp(d);u=ReduceSum(e,rows);p=Div(e,u);z=MatMul(p,q)",
    "a maximum, scaled": f"{S}{MAX}b=Mul(r,two);c=Sigmoid(b);d=Mul(c,a);z=MatMul(d,q)",
    "log-probabilities": f"{S}b=Div(s,half);c=LogSoftmax(b);d=Exp(c);z=MatMul(d,q)",
    "a near number": f"{S}y=Less(s,near)",
}
EXACT = {
    "a product by eight": f"{S}d=Mul(s,eight);{SOFT}",
    "a cold temperature": f"{S}d=Div(s,tenth);{SOFT}",
    "a temperature that is an input": f"{S}d=Div(s,t);{SOFT}",
    "a gate": f"{S}g=Sigmoid(a);d=Mul(s,g);{SOFT}",
    "itself, added": f"{S}d=Add(s,s);{SOFT}",
    "two masks": f"{S}o=Where(hidden,zero,fill);d=Add(s,o);{SOFT}",
    "two masks, ordered": f"{S}o=Where(hidden,zero,fill);d=Add(s,o);row=ArgMax[axis=-1](d)",
    "the fill itself": f"{S}y=Equal(s,fill)",
    "a far number": f"{S}y=Less(s,far)",
    "the maximum of a row": f"{S}{MAX}row=Less(r,far)",
    "the maximum, divided": f"{S}{MAX}b=Div(r,two);row=Less(b,far)",
    "the sorted": f"{S}v,i=TopK(s,all);y=Greater(v,farther)",
    "neighbours": f"{S}{SORTED}d=Sub(b,c);pair=Greater(d,large)",
    "summed over heads": f"{S}b=ReduceSum(s,heads);head=Less(b,farther)",
    "averaged over heads": f"{S}b=ReduceMean(s,heads);head=Less(b,near)",
    "counted up": f"{S}b=CumSum(s,axis);y=Less(b,farther)",
    "its inverse": f"{S}b=Div(large,s);c=Abs(b);y=Less(c,one)",
    "shown": f"{S}y=Identity(s)",
    "shown, divided": f"{S}y=Div(s,warm)",
}
FILLS = {"1e9": -1e9, "lowest": -1e37, "float16": -65504.0}


def model(text: str, fill: float) -> ModelProto:
    outputs = [name for name in ("y", "z", "row", "head", "pair") if f";{name}=" in text]
    numbers = {**NUMBERS, "fill": fill}
    read = {
        name: numbers[name]
        for name in re.findall(r"[(,](\w+)(?=[,)])", text)
        if name in numbers and f"{name}=" not in text
    }
    return cases.build(text, outputs, shapes=SHAPES, types={"m": "bool"}, constants=read, opset=18)


def lowered(converted: Converted) -> set[str]:
    """The first results of the ops that are low."""
    low = {op for (op, _), paint in converted.coloring.paints.items() if paint.dtype.low}
    return {converted.view.ops[op].node.output[0] for op in low}


def run(proto: ModelProto) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    halves = {name: (rng.integers(-2, 3, SHAPES[name]) / 2).astype(np.float32) for name in ("q", "k")}
    fed = {**halves, "m": SEEN, "t": np.array([0.05], np.float32)}
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {i.name: fed[i.name] for i in session.get_inputs()}), strict=True))


def judge(proto: ModelProto, converted: Converted, to: str) -> None:
    expected, found = run(proto), run(emulate(converted.result).to_proto())
    for name, reference in expected.items():
        if reference.dtype != np.float32:
            np.testing.assert_array_equal(found[name], reference)
            continue
        assert np.isfinite(found[name]).all()
        limit = {"float16": 1e-2, "bfloat16": 8e-2}[to] * float(np.abs(reference).max())
        assert float(np.abs(found[name] - reference).max()) <= limit


@pytest.mark.parametrize("to", ["float16", "bfloat16"])
@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
@pytest.mark.parametrize("name", [*BOUNDED, *EXACT])
def test_what_follows_a_fill_gives_the_same_flags_and_finite_numbers(name: str, fill: float, to: str) -> None:
    proto = model({**BOUNDED, **EXACT}[name], fill)
    judge(proto, convert(proto, to=to), to)


@pytest.mark.parametrize("name", BOUNDED)
def test_a_fill_whose_number_does_not_matter_becomes_a_quarter_of_the_largest(name: str) -> None:
    converted = convert(model(BOUNDED[name], -1e9), to="float16")
    (found,) = (f for f in converted.report.findings if f.kind == "saturated" and f.subject in ("fill", "o"))
    assert found.message == "the fill value -1e+09 becomes -16376 · harmless: it only selects"
    low = lowered(converted)
    assert low & {"s", "b", "p", "d"}


@pytest.mark.parametrize("name", EXACT)
def test_a_fill_whose_number_matters_stays_and_is_not_called_harmless(name: str) -> None:
    converted = convert(model(EXACT[name], -1e9), to="float16")
    assert not any("harmless" in f.message and f.subject == "fill" for f in converted.report.findings)
    low = lowered(converted)
    assert "s" not in low
    assert "a" in low


def test_a_fill_that_fits_stays_float32_where_a_temperature_makes_it_too_large() -> None:
    for fill, low in ((-1e4, False), (-1e3, True)):
        proto = model(f"{S}d=Div(s,small);{SOFT}", fill)
        converted = convert(proto, to="float16")
        judge(proto, converted, "float16")
        assert ("d" in lowered(converted)) is low


def test_a_bound_keeps_the_whole_range_and_infinity_stays() -> None:
    bound = convert(model("a=MatMul(q,k);s=Max(a,fill);p=Softmax(s);z=MatMul(p,q)", -1e9), to="float16")
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in bound.result.proto.graph.initializer}
    assert stored["fill"] == -65504
    infinite = convert(model(f"{S}d=Div(s,half);{SOFT}", -np.inf), to="float16")
    assert any(np.isneginf(onnx.numpy_helper.to_array(t)).any() for t in infinite.result.proto.graph.initializer)
