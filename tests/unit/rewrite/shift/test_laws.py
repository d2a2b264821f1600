"""Operators of onnx's own tests and random graphs between shifted values: the same bits, whatever the exponents are."""

import re
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from amp_rewrite.errors import AmpRewriteError
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.passes.canonicalize import canonicalize
from amp_rewrite.rewrite.shift.emit import refusal
from amp_rewrite.rewrite.shift.laws import kinds
from amp_rewrite.settings.request import Request
from support import cases as texts
from support.one_op import Case, cases
from support.random_graphs import Graph, graphs
from support.shifting import bits, sandwiched, shifted_at_random, shifted_to

_UNTESTED = {"BatchNormalization", "RoiAlign", "SimplifiedLayerNormalization"}
_UNTESTED |= {"ConcatFromSequence", "SequenceAt", "SequenceErase"}
"""Records that a test of their own covers, or that onnx has no case for that onnxruntime runs; copies of sequences."""


def _changed(case: Case) -> int:
    """Compare the bits for some seeds; return the number of changed nodes, 0 without a kernel on this machine."""
    model = sandwiched(case.model)
    try:
        view = View.of(Model.load(model))
        before = bits(model, case.feeds)
    except AmpRewriteError:
        return 0
    if refusal(view):
        return 0
    changed = 0
    for seed in range(2):
        shift = shifted_at_random(view, seed)
        changed += len(shift.results)
        assert bits(shift.view.model.to_proto(), case.feeds) == before, (case.name, seed)
    return changed


def test_no_operator_changes_a_bit_whatever_the_exponents_of_its_values_are() -> None:
    tested = {case.op_type for case in cases() if _changed(case)}
    assert {kind for kind in kinds() if ":" not in kind} - _UNTESTED <= tested


WEIGHTS = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
GAIN = WEIGHTS[0]
PASSED = {
    "a residual stream": "h=MatMul(x,w);r=Relu(h);a=Add(h,r);y=MatMul(a,w)",
    "a bias": "h=Gemm(x,w,g);y=Gemm(h,w,g)",
    "a norm": "h=MatMul(x,w);y=LayerNormalization(h,g,g)",
    "a norm of RMS": "h=MatMul(x,w);y=RMSNormalization(h,g)",
    "a norm, written out": "h=MatMul(x,w);s=Mul(h,h);m=ReduceMean(s,axes);e=Add(m,eps);r=Sqrt(e);n=Div(h,r);y=Mul(n,g)",
    "an inverse root": (
        "h=MatMul(x,w);s=Pow(h,two);m=ReduceMean(s,axes);e=Add(m,eps);r=Sqrt(e);i=Reciprocal(r);n=Mul(h,i);y=Mul(n,g)"
    ),
    "one over a root": (
        "h=MatMul(x,w);s=Pow(h,two);m=ReduceMean(s,axes);e=Add(m,eps);r=Sqrt(e);i=Div(one,r);n=Mul(h,i);y=Mul(n,g)"
    ),
    "a bounded value": "h=MatMul(x,w);r=Clip(h,low,high);y=MatMul(r,w)",
    "a scale before a softmax": "h=MatMul(x,w);s=Mul(h,c);y=Softmax(s)",
    "pooled regions": "h=MatMul(x,w);i=Reshape(h,image);p=RoiAlign(i,rois,zero);f=Reshape(p,line);y=MatMul(f,ones)",
}
ENDED = {
    "a nonlinear op": "h=MatMul(x,w);y=Gelu(h)",
    "an output": "y=MatMul(x,w)",
    "two readers of one value": "h=MatMul(x,w);s=Sigmoid(h);t=Tanh(h);y=Add(s,t)",
    "an input of the stream": "h=MatMul(x,w);a=Add(x,h);y=MatMul(a,w)",
    "a power by logarithms": "h=MatMul(x,w);y=Pow(h,c)",
}
CONSTANTS = {
    "w": WEIGHTS,
    "g": GAIN,
    "c": np.float32(0.3),
    "one": np.float32(1),
    "two": np.float32(2),
    "axes": np.array([-1]),
    "image": np.array([1, 1, 4, 8]),
    "line": np.array([1, 1]),
    "ones": np.full((1, 1), 1.5, np.float32),
    "rois": np.array([[0.3, 0.4, 5.2, 3.1]], np.float32),
    "zero": np.array([0]),
    "eps": np.float32(1e-6),
    "low": np.float32(-1.5),
    "high": np.float32(1.5),
}


def _shifted(text: str, exponent: int) -> tuple[Any, Any, dict[str, Any]]:
    read = re.findall(r"[(,](\w+)", text)
    constants = {name: array for name, array in CONSTANTS.items() if name in read}
    model = texts.build(text, ["y"], shapes={"x": (4, 8)}, constants=constants, opset=16 if "RoiAlign" in text else 24)
    name = "h" if "h=" in text else "y"
    shift = shifted_to(View.of(Model.load(model)), {name: exponent})
    return model, shift, {"x": np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)}


@pytest.mark.parametrize("name", PASSED)
@pytest.mark.parametrize("exponent", [1, 12])
def test_a_shift_passes_without_a_mul(name: str, exponent: int) -> None:
    model, shift, feed = _shifted(PASSED[name], exponent)
    assert any(origin.exponent == exponent for origin in shift.origins.values())
    assert not shift.muls
    assert bits(shift.view.model.to_proto(), feed) == bits(model, feed)


@pytest.mark.parametrize("name", ENDED)
def test_a_shift_ends_in_one_mul(name: str) -> None:
    model, shift, feed = _shifted(ENDED[name], 3)
    nodes = [node.op_type for node in shift.view.model.proto.graph.node]
    assert nodes.count("Mul") == 1
    assert bits(shift.view.model.to_proto(), feed) == bits(model, feed)


@given(graph=graphs(), seed=st.integers(0, 1000), truth=st.booleans())
@settings(max_examples=60)
def test_a_random_shift_of_a_random_graph_changes_no_bit(graph: Graph, seed: int, truth: bool) -> None:
    note(graph.text())
    view = canonicalize(View.of(Model.load(graph.model())), Request.of(fuse="none")).view
    if refusal(view):
        return
    feeds = graph.feeds(np.random.default_rng(seed), truth)
    before = view.model.to_proto()
    after = shifted_at_random(view, seed).view.model.to_proto()
    onnx.checker.check_model(after)
    assert [value.name for value in after.graph.output] == [value.name for value in before.graph.output]
    assert bits(after, feeds) == bits(before, feeds)
