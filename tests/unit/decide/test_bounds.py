"""Bounds of values: against runs, and each theorem on the smallest model that needs it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, TensorProto

from amp_rewrite.decide.bounds.analysis import bounds
from amp_rewrite.decide.bounds.bound import Bound, BoundClass, BoundOptions
from amp_rewrite.decide.bounds.state import Ball, box
from amp_rewrite.decide.bounds.walk import Walk
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.op_classes import HEAVY
from amp_rewrite.ir.view import View
from support import cases
from support.bound_check import Probe, exceeded, feeds
from support.bound_graphs import random_graph
from support.paths import ROOT

RNG = np.random.default_rng(0)
WIDE = RNG.standard_normal((8, 8))


def parsed(text: str) -> ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 23, "com.microsoft": 1]>{text}')


def bound_of(model: ModelProto, name: str = "y", **options: object) -> Bound:
    """The bound of a value; the first of that name."""
    view = View.of(Model.load(model))
    found = bounds(view, BoundOptions(**options))  # type: ignore[arg-type]
    return next(bound for value, bound in found.items() if view.value_name(value) == name)


def bound(text: str, **constants: object) -> Bound:
    return bound_of(cases.build(text, ["y"], constants=constants, shapes=SHAPES, opset=20))


SHAPES = {"x": (4, 8), "q": (2, 3, 8), "m": (1, 4, 6, 6)}

# -- against runs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_no_run_exceeds_a_bound(first: int) -> None:
    """In float32, and rounded to float16 at each op: every number, row and block of every value."""
    for seed in range(first, first + 10):
        model = random_graph(seed, 8)
        probe = Probe(model)
        shape = tuple(d.dim_value or 2 for d in model.graph.input[0].type.tensor_type.shape.dim)
        rng = np.random.default_rng(seed)
        for _ in range(4):
            assert probe.violations({"x": feeds(rng, shape)}) == [], seed


def test_most_values_of_the_random_graphs_have_a_bound() -> None:
    """Or nothing would be compared."""
    states = [state for seed in range(0, 60, 6) for state in Probe(random_graph(seed, 8)).states.values()]
    assert sum(state.known for state in states) > len(states) / 2


def test_bfloat16_holds_too() -> None:
    for seed in range(100, 106):
        model = random_graph(seed, 6)
        shape = tuple(d.dim_value or 2 for d in model.graph.input[0].type.tensor_type.shape.dim)
        assert Probe(model, DType.BFLOAT16).violations({"x": feeds(np.random.default_rng(seed), shape)}) == []


TIGHT = parsed(
    """g (float[4,8] x) => (float[4,8] y) <float[8] g, float[8,8] w> {
        n = RMSNormalization <axis = -1, epsilon = 1e-12> (x, g)
        y = MatMul (n, w)
    }"""
)


def test_a_bound_lowered_by_one_percent_is_caught() -> None:
    """Rows along the columns of the weight reach what Cauchy–Schwarz allows."""
    model = ModelProto()
    model.CopyFrom(TIGHT)
    gain = np.exp(RNG.standard_normal(8)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(gain, "g"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(WIDE.astype(np.float32), "w"))
    probe = Probe(model)
    for column in range(0, 8, 4):
        rows = (gain[:, None] * WIDE)[:, column : column + 4].T.astype(np.float32) * 1e3
        assert probe.violations({"x": rows}) == []
        assert any(fault.startswith("y ") for fault in probe.violations({"x": rows}, lowered=0.99))


def test_the_harness_sees_each_kind_of_bound() -> None:
    """The box, the ball, its blocks and the sum of a softmax, each too small on purpose."""
    row = np.full((2, 64), 0.5)
    free = box(-1.0, 1.0)
    assert not exceeded(free, row)
    assert "outside" in exceeded(free, row * 3)
    ball = Ball((-1,), (64,), np.full((1,), 4.0))
    assert not exceeded(replace(free, ball=ball), row)
    assert "norm" in exceeded(replace(free, ball=ball), row, 0.99)
    assert "block" in exceeded(replace(free, ball=replace(ball, blocks=np.full(1, 3.9))), row)
    assert "norm" in exceeded(replace(free, ball=replace(ball, center=np.full(64, -0.1))), row)
    assert "sums to" in exceeded(replace(free, total=31.0, along=-1), row)
    assert not exceeded(replace(free, total=32.0, along=-1), row)


# -- theorems ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "constants", "most"),
    [
        ("y=LayerNormalization(x,g,b)", {"g": np.full(8, 2.0), "b": np.full(8, 3.0)}, math.sqrt(8) * 2 + 3),
        ("y=Softmax(x)", {}, 1.0),
        ("y=Sigmoid(x)", {}, 1.0),
        ("y=Tanh(x)", {}, 1.0),
        ("y=Clip(x,lo,hi)", {"lo": np.array(-3.0), "hi": np.array(6.0)}, 6.0),
        ("t=Tanh(x);y=Gelu(t)", {}, 0.842),
        ("t=Clip(x,lo,hi);y=HardSwish(t)", {"lo": np.array(-9.0), "hi": np.array(9.0)}, 9.0),
        ("t=Tanh(x);y=Add(t,t)", {}, 2.0),
        ("t=Tanh(x);y=MatMul(t,w)", {"w": np.full((8, 8), 0.5)}, 4.0),
        ("s=Softmax(q);y=MatMul(s,v)", {"v": np.full((8, 5), -7.0)}, 7.0),
        ("y=InstanceNormalization(m,g,b)", {"g": np.ones(4), "b": np.zeros(4)}, 6.0),
        ("t=Sigmoid(x);y=ReduceMax(t)", {}, 1.0),
        ("c=Cast[to=1](k);y=Mul(c,c)", {"k": np.array([3, -4])}, 16.0),
        ("t=Tanh(x);y,i=TopK[axis=0](t,k)", {"k": np.array([2])}, 1.0),
    ],
)
def test_each_theorem_gives_its_number(text: str, constants: dict[str, object], most: float) -> None:
    found = bound(text, **constants)
    assert found.klass is BoundClass.FITS
    assert most * (1 - 1e-3) <= found.absmax <= most * 1.04 + 1e-3


@pytest.mark.parametrize(
    "text",
    [
        "y=Relu(x)",
        "y=MatMul(x,w)",
        "y=Exp(x)",
        "t=Tanh(x);y=Reciprocal(t)",
        "t=Tanh(x);y=ReduceProd[axes=1](t)",
        "s=Mul(x,x);a=ReduceMean[axes=1](s);m=ReduceMean[axes=1](x);p=Mul(m,m);v=Sub(a,p);r=Sqrt(v);y=Div(x,r)",
    ],
)
def test_what_no_theorem_covers_is_unknown(text: str) -> None:
    constants = {"w": WIDE, "k": np.array(0)}
    read = {name: value for name, value in constants.items() if f",{name})" in text}
    found = bound_of(cases.build(text, ["y"], constants=read, shapes=SHAPES, opset=17))
    assert found.klass is BoundClass.UNKNOWN
    assert found.because


def test_a_mixture_needs_no_length_and_a_sum_does() -> None:
    text = """g (float[N,S] s, float[N,S,8] x) => (float[N,8] y, float[N,8] z) <int64[1] k = {1}> {
        v = Tanh (x)
        p = Softmax <axis = -1> (s)
        q = Unsqueeze (p, k)
        m = MatMul (q, v)
        y = Squeeze (m, k)
        z = ReduceSum <keepdims = 0> (v, k)
    }"""
    model = parsed(text)
    assert bound_of(model).klass is BoundClass.FITS
    assert bound_of(model).absmax < 1.2
    unknown = bound_of(model, "z")
    assert (unknown.klass, unknown.because) == (BoundClass.UNKNOWN, "ReduceSum: a sum over an axis of unknown length")


def test_a_mask_is_no_overflow_and_a_row_that_is_masked_entirely_is_said() -> None:
    text = """g (float[4,8] x, bool[4,8] c) => (float[4,8] y) <float f = {-3.4e38}> {
        s = Tanh (x)
        m = Where (c, s, f)
        y = Softmax (m)
    }"""
    masked = bound_of(parsed(text), "m")
    assert (masked.klass, masked.fills) == (BoundClass.FITS, True)
    assert bound_of(parsed(text)).absmax <= 1.001
    assert "rows masked entirely are unknown" in bound_of(parsed(text)).because


@pytest.mark.parametrize("words", ["m = Mul (h, n)", "m = Mul (n, h)"])
def test_masked_scores_times_a_positive_number_stay_masked(words: str) -> None:
    text = f"""g (float[4,8] x, bool[4,8] c) => (float[4,8] y) <float f = {{-3.4e38}}, float h = {{0.5}}> {{
        s = Tanh (x)
        n = Where (c, s, f)
        {words}
        y = Softmax (m)
    }}"""
    scaled = bound_of(parsed(text), "m")
    assert (scaled.fills, scaled.absmax) == (True, pytest.approx(0.5, rel=1e-2))


def test_a_written_out_mask_keeps_its_scores() -> None:
    text = """g (float[4,8] x, bool[4,8] c) => (float[4,8] y) <float one = {1}, float f = {-3.4e38}> {
        b = Cast <to = 1> (c)
        n = Sub (one, b)
        m = Mul (n, f)
        s = Tanh (x)
        z = Add (s, m)
        y = Softmax (z)
    }"""
    scores = bound_of(parsed(text), "z")
    assert scores.fills
    assert scores.absmax == pytest.approx(1, rel=1e-2)


def test_values_in_the_bodies_of_if_and_loop_are_bounded() -> None:
    text = """g (float[4,8] x, bool c, int64 n) => (float[4,8] y, float[4,8] z, float[4,8] u) <bool go = {1}> {
        y = If (c) <then_branch = a () => (float[4,8] p) { p = Tanh (x) },
                    else_branch = b () => (float[4,8] q) { q = Softmax (x) }>
        s = Sigmoid (x)
        z = Loop (n, go, s) <body = d (int64 i, bool k, float[4,8] h) => (bool l, float[4,8] o) {
            l = Identity (k)
            o = Tanh (h)
        }>
        u = Loop (n, go, s) <body = e (int64 j, bool m, float[4,8] r) => (bool w, float[4,8] t) {
            w = Identity (m)
            t = Add (r, r)
        }>
    }"""
    model = parsed(text)
    assert [bound_of(model, name).klass for name in "yzu"] == [BoundClass.FITS, BoundClass.FITS, BoundClass.UNKNOWN]


def test_the_range_of_an_input_can_be_given() -> None:
    model = cases.build("y=MatMul(x,w)", ["y"], constants={"w": WIDE}, shapes=SHAPES)
    assert bound_of(model).klass is BoundClass.UNKNOWN
    given = bound_of(model, inputs={"x": (-1.0, 1.0)})
    most = np.abs(WIDE).sum(axis=0).max()
    assert (given.klass, given.absmax) == (BoundClass.FITS, pytest.approx(most, rel=1e-2))


def test_a_value_fits_or_overflows_or_is_measured_or_unknown() -> None:
    constants = {"w": np.full((8, 8), 1e4)}
    model = cases.build("t=Tanh(x);y=MatMul(x,w);z=Relu(x);u=Exp(x)", ["t", "y", "z", "u"], constants=constants)
    view = View.of(Model.load(model))
    ids = {value.name: value.id for value in view.values}
    found = bounds(view, BoundOptions(measured={ids["z"]: 9.0}))
    assert [found[ids[name]].klass for name in "tyzu"] == [
        BoundClass.FITS,
        BoundClass.OVERFLOWS,
        BoundClass.MEASURED,
        BoundClass.UNKNOWN,
    ]
    tight = bounds(view, BoundOptions(measured={ids["z"]: 60_000.0}, headroom=2.0))
    assert tight[ids["z"]].klass is BoundClass.UNKNOWN


# -- models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2_dynamo18", "gpt2_ts17", "llama_ts16", "vit_ts17", "llama_dynamo23"])
def test_products_of_exported_transformers_are_proved_to_fit(name: str) -> None:
    """A cache is an input, whose range is given."""
    view = View.of(Model.load(ROOT / "tests" / "models" / f"{name}.onnx"))
    caches = {view.value_name(v): (-8.0, 8.0) for v in view.scopes[0].inputs if "past" in view.value_name(v)}
    found = bounds(view, BoundOptions(inputs=caches, below=False))
    classes = Counter(found[v].klass for op in view.ops if op.kind in HEAVY for v in op.results if v in found)
    assert classes[BoundClass.FITS] >= 0.95 * (classes.total() - 1)


def test_each_large_weight_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"w{n}" for n in range(3)]
    constants = {name: RNG.standard_normal((96, 96)) for name in names}
    text = "n=Softmax(x);a=MatMul(n,w0);b=Gemm[transB=1](a,w1);y=MatMul(b,w2)"
    onnx.save(cases.build(text, ["y"], constants=constants, shapes={"x": (4, 96)}), tmp_path / "model.onnx")
    read: Counter[str] = Counter()
    chunks, array = Model.chunks, Model.array

    def recorded(model: Model, tensor: TensorProto, *size: int) -> Iterator[np.ndarray]:
        for chunk in chunks(model, tensor, *size):
            read[tensor.name] += chunk.size
            yield chunk

    def whole(model: Model, tensor: TensorProto) -> np.ndarray:
        held = array(model, tensor)
        read[tensor.name] += held.size
        return held

    monkeypatch.setattr(Model, "chunks", recorded)
    monkeypatch.setattr(Model, "array", whole)
    view = View.of(Model.load(tmp_path / "model.onnx"))
    assert all(
        bound.absmax < math.inf
        for value, bound in bounds(view, BoundOptions(below=False)).items()
        if view.values[value].producer is not None
    )
    assert {read[name] for name in names} <= {96 * 96, 2 * 96 * 96}


# -- rotations ---------------------------------------------------------------------------------------------

ROTATED = (
    "n=RMSNormalization(q,g);a=Mul(p,f);e=Concat[axis=-1](a,a);c=Cos(e);s=Sin(e);"
    "lo=Slice(n,zero,half,last);hi=Slice(n,half,end,last);m=Neg(hi);r=Concat[axis=-1]({turn});"
    "nc=Mul(n,c);rs=Mul(r,s);y=Add(nc,rs)"
)
ANGLES = {
    "g": np.ones(8),
    "f": np.array([1.0, 0.3, 0.1, 0.01]),
    "zero": np.array([0]),
    "half": np.array([4]),
    "end": np.array([8]),
    "last": np.array([-1]),
}


def rotated_model(turn: str) -> ModelProto:
    shapes = {"q": (2, 3, 8), "p": (3, 1), "y": (2, 3, 8)}
    return cases.build(ROTATED.format(turn=turn), ["y"], constants=ANGLES, shapes=shapes, opset=23)


@pytest.mark.parametrize(("turn", "most"), [("m,lo", 1.0), ("lo,m", 3**0.5)])
def test_a_rotation_keeps_the_norm_of_pairs(turn: str, most: float) -> None:
    model = rotated_model(turn)
    view = View.of(Model.load(model))
    walk = Walk.of(view, DType.FLOAT16, {})
    ball = walk.state(next(v.id for v in view.values if v.name == "y")).ball
    assert ball is not None
    assert float(ball.radius.max()) == pytest.approx(8**0.5 * most, rel=0.05)
    probe, rng = Probe(model), np.random.default_rng(0)
    for size in (1.0, 1e3):
        feed = {"q": rng.standard_normal((2, 3, 8)) * size, "p": rng.uniform(-300, 300, (3, 1))}
        assert probe.violations({name: array.astype(np.float32) for name, array in feed.items()}) == []


def test_cosines_and_sines_of_different_angles_are_no_rotation() -> None:
    text = ROTATED.format(turn="m,lo").replace("s=Sin(e)", "d=Neg(e);s=Sin(d)")
    shapes = {"q": (2, 3, 8), "p": (3, 1), "y": (2, 3, 8)}
    y = bound_of(cases.build(text, ["y"], constants=ANGLES, shapes=shapes, opset=23))
    assert y.absmax > 8**0.5 * 1.5


def test_a_rotation_by_tables_takes_their_largest_radius() -> None:
    rng = np.random.default_rng(1)
    angle = np.concatenate([rng.uniform(0, 6, (3, 4))] * 2, -1)
    text = (
        "n=RMSNormalization(q,g);lo=Slice(n,zero,half,last);hi=Slice(n,half,end,last);m=Neg(hi);"
        "r=Concat[axis=-1](m,lo);nc=Mul(n,c);rs=Mul(r,s);y=Add(nc,rs)"
    )
    constants = {**ANGLES, "c": 2 * np.cos(angle), "s": 2 * np.sin(angle)}
    del constants["f"]
    model = cases.build(text, ["y"], constants=constants, shapes={"q": (2, 3, 8), "y": (2, 3, 8)}, opset=23)
    assert bound_of(model).absmax == pytest.approx(2 * 8**0.5, rel=0.05)
    probe = Probe(model)
    assert probe.violations({"q": rng.standard_normal((2, 3, 8)).astype(np.float32)}) == []
