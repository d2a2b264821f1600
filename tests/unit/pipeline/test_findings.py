"""The finding on conversions that lower little: its threshold, share, cause and remedy."""

from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto

import amp_rewrite
from amp_rewrite.evidence.data.feed import Feed
from amp_rewrite.files.model import METADATA_KEY, Model
from support.cases import build

W = np.eye(8)
CHAIN = ";".join(f"v{i + 1}=MatMul(v{i},w)" for i in range(8))


def found(graph: str = CHAIN, output: str = "v8", **options: Any) -> list[str]:
    model = build(graph, [output], constants={"w": W})
    findings = amp_rewrite.convert(model, target=options.pop("target", "onnx"), **options).report.findings
    return [finding.message for finding in findings if finding.kind == "mostly_float32"]


def test_a_model_without_lowered_ops_is_reported_with_cause_and_remedy() -> None:
    (message,) = found(keep=["op=MatMul"])
    assert message == (
        "float16 has no compute op: keep keeps 100% in float32 · the result is effectively float32 · keep fewer ops"
    )


@pytest.mark.parametrize(("kept", "count"), [(1, 0), (5, 0), (7, 1)])
def test_only_a_small_lowered_share_is_reported(kept: int, count: int) -> None:
    messages = found(keep=[f"output=v{i + 1}" for i in range(kept)] if kept else [])
    assert len(messages) == count
    assert all("12% of the operations of 8 compute ops: keep keeps 88%" in message for message in messages)


def test_the_share_counts_operations_rather_than_ops() -> None:
    """Three of four products are low, with a thousandth of the operations."""
    graph = "s=Slice(x,zero,one);a=MatMul(s,w);b=MatMul(a,w);c=MatMul(b,w);y=MatMul(x,big);z=ReduceSum(y)"
    constants = {"w": W, "big": np.ones((8, 4096)), "zero": np.int64([0]), "one": np.int64([1])}
    model = build(graph, ["c", "z"], constants=constants)
    report = amp_rewrite.convert(model, target="onnx", keep=["output=y"]).report
    assert (report.totals.compute_lowered, report.totals.compute_ops) == (3, 4)
    (message,) = (f.message for f in report.findings if f.kind == "mostly_float32")
    assert message.startswith("float16 has 1% of the operations")


def test_long_sums_on_a_target_are_named_as_the_cause() -> None:
    model = build("a=MatMul(x,w);y=MatMul(a,w)", ["y"], shapes={"x": (4, 512)}, constants={"w": np.eye(512)})
    (finding,) = (f for f in amp_rewrite.convert(model, target="webgpu").report.findings if f.kind == "mostly_float32")
    assert "long_sum keeps 100%" in finding.message and "--lower 'op=MatMul'" in finding.message


IMAGES = {"shapes": {"x": (1, 8, 6, 6)}, "constants": {"k": np.ones((8, 8, 3, 3))}}


MAPS = build("a=Conv(x,k);y=MaxPool[kernel_shape=2 2](a)", ["y"], opset=17, **IMAGES)
RELU = build("a=Conv(x,k);y=Relu(a)", ["y"], opset=17, **IMAGES)
OLD = build("y=MatMul(x,w)", ["y"], opset=12, shapes={"x": (64, 64)}, constants={"w": np.eye(64)})


@pytest.mark.parametrize(
    ("model", "options", "remedy"),
    [
        (RELU, {}, "with --opset auto the model moves to opset 22; --to float16"),
        (MAPS, {}, "--to float16"),
        (MAPS, {"opset": "auto"}, "--to float16"),
        (OLD, {"opset": "keep"}, "without --opset keep the model moves to opset 13; --to float16"),
    ],
)
def test_only_ways_to_more_kernels_are_named(model: ModelProto, options: dict[str, Any], remedy: str) -> None:
    findings = amp_rewrite.convert(model, to="bfloat16", **options).report.findings
    (message,) = (finding.message for finding in findings if finding.kind == "mostly_float32")
    assert message.rpartition(" · ")[2] == f"more kernels: {remedy}"


def test_a_repair_that_pins_everything_is_reported() -> None:
    model = build("y=MatMul(x,w)", ["y"], constants={"w": np.full((8, 8), 1 / 3)})
    data = {"x": np.full((8, 8), 1 / 7, np.float32)}
    repaired = amp_rewrite.repair(model, data, tolerance=1e-6, target="onnx")
    assert repaired.report.totals.compute_lowered == 0
    (message,) = (f.message for f in repaired.report.findings if f.kind == "mostly_float32")
    assert message.startswith("float16 has no compute op: ") and "a looser tolerance" in message


FLOAT64 = """<ir_version: 8, opset_import: ["": 17]>
g (double[N,16] x, float[16] b) => (double[N,16] y, float[N,16] z) {
    wide = Cast <to=11> (b)
    h = MatMul (x, w)
    s = Add (h, wide)
    c = Min (s, top)
    y = MatMul (c, w)
    z = Cast <to=1> (y)
}"""


def float64() -> onnx.ModelProto:
    model = onnx.parser.parse_model(FLOAT64)
    weights = np.random.default_rng(0).normal(size=(16, 16))
    for name, values in (("w", weights), ("top", np.array(1e300))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    return model


def test_float64_stays_and_is_named() -> None:
    (message,) = (f.message for f in amp_rewrite.convert(float64()).report.findings if f.kind == "float64")
    assert message.startswith("2 of 2 compute ops in float64, but only float32 is lowered")


@pytest.mark.parametrize("to", ["float16", "bfloat16"])
def test_float64_is_narrowed_on_request(to: str) -> None:
    converted = amp_rewrite.convert(float64(), to=to, narrow=True, check=True)
    assert converted.report.totals.compute_lowered == converted.report.totals.compute_ops == 2
    assert "narrow=True" in {p.key: p.value for p in converted.model.metadata_props}[METADATA_KEY].split()
    assert [f.kind for f in converted.report.findings if f.kind in ("narrowed", "float64")] == ["narrowed"]
    graph, before = converted.model.graph, float64().graph
    assert [(v.name, v.type) for v in (*graph.input, *graph.output)] == [
        (v.name, v.type) for v in (*before.input, *before.output)
    ]
    assert not any(tensor.data_type == onnx.TensorProto.DOUBLE for tensor in graph.initializer)
    verdict = amp_rewrite.verify(float64(), converted.model, Feed.randomly(Model.load(float64())), tolerance=0.1)
    assert verdict.ok


BODIES = {
    "a branch": "h = MatMul (x, w) y = If (c) <then_branch = t () => (double[4,16] a) {"
    " k = Constant <value = double {0.3}> () a = Mul (h, k) }, else_branch = e () => (double[4,16] b) {"
    " b = MatMul (h, w) }>",
    "a loop": "n = Constant <value = int64 {3}> () y = Loop (n, c, x) <body = b (int64 i, bool go, double[4,16] s)"
    " => (bool more, double[4,16] r) { more = Identity (go) m = MatMul (s, w) r = Tanh (m) }>",
    "a function": "h = l.f (x, w) y = l.f (h, w)",
    "a Cast like another value": "f = Cast <to=1> (x) h = CastLike (f, w) y = MatMul (h, w)",
}


@pytest.mark.parametrize("body", BODIES)
def test_float64_is_also_narrowed_in_bodies(body: str) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17, "l": 1]> g (double[4,16] x, bool c) => (double[4,16] y)'
        f" {{ {BODIES[body]} }}"
        '<domain: "l", opset_import: ["": 17]> f (a, b) => (o) {'
        " k = Constant <value = double {0.3}> () m = MatMul (a, b) o = Mul (m, k) }"
    )
    model.graph.initializer.append(
        onnx.numpy_helper.from_array(np.random.default_rng(0).normal(size=(16, 16)) / 4, "w")
    )
    converted = amp_rewrite.convert(model, narrow=True)
    assert converted.report.totals.compute_lowered == converted.report.totals.compute_ops > 0
    assert amp_rewrite.verify(model, converted.model, Feed.randomly(Model.load(model)), tolerance=1e-2).ok


@pytest.mark.parametrize(
    ("graph", "outputs", "options", "states"),
    [
        ("y,hn,cn=LSTM[hidden_size=4](x,w,r,b,,h,c)", ["y", "hn", "cn"], {}, ["c", "h"]),
        ("h0=Slice(h,lo,hi);y,n=GRU[hidden_size=4](x,w,r,,,h0);hn=Concat[axis=0](n,n)", ["y", "hn"], {}, ["h"]),
        ("y,hn,cn=LSTM[hidden_size=4](x,w,r,b,,h,c)", ["y", "hn", "cn"], {"keep": ["op=LSTM"]}, []),
        ("y,hn,cn=LSTM[hidden_size=4](x,w,r,b,,h,c)", ["y", "cn"], {}, ["c"]),
        ("y,hn,cn=LSTM[hidden_size=4](x,w,r,b,,h,c);z=Abs(hn)", ["y", "z"], {}, []),
        ("y,hn,cn=LSTM[hidden_size=4](x,w,r,b)", ["y", "hn", "cn"], {}, []),
    ],
    ids=["lstm", "sliced", "kept", "one", "read", "started from zero"],
)
def test_a_state_rounded_by_a_recurrent_kernel_is_named(
    graph: str, outputs: list[str], options: dict[str, Any], states: list[str]
) -> None:
    gates = 3 if "GRU" in graph else 4
    weights = {"w": np.ones((1, 4 * gates, 3)) / 8, "r": np.ones((1, 4 * gates, 4)) / 8, "b": np.zeros((1, 8 * gates))}
    layers = {"lo": np.int64([0]), "hi": np.int64([1])}
    shapes = {"x": (1, 1, 3), "h": (1, 1, 4), "c": (1, 1, 4)}
    model = build(graph, outputs, shapes=shapes, constants=weights | layers)
    found = [f for f in amp_rewrite.convert(model, **options).report.findings if f.kind == "recurrent_state"]
    assert [finding.message for finding in found] == [f"rounds the state {name!r} at each step" for name in states]
