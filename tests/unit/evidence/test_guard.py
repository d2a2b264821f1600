"""The guard: what ranges pin, and what they leave alone."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

import amp_rewrite
from amp_rewrite import Converted, Model, View
from amp_rewrite.errors import PolicyError
from amp_rewrite.evidence.ranges import Range, Ranges, key
from amp_rewrite.files.fingerprint import fingerprint
from support.cases import build

CHAIN = "a=MatMul(x,w);b=Relu(a);c=MatMul(b,w);d=Relu(c);y=MatMul(d,w)"
WEIGHT = {"w": np.full((8, 8), 0.5, np.float32)}


def chain() -> ModelProto:
    return build(CHAIN, ["y"], constants=WEIGHT)


def mean(terms: int) -> ModelProto:
    constants = {**WEIGHT, "row": np.full((1, 8), 0.5, np.float32), "axes": np.array([0, 1], np.int64)}
    text = "a=MatMul(x,w);m=ReduceMean(a,axes);b=MatMul(m,row);c=MatMul(b,w);y=MatMul(c,w)"
    return build(text, ["y"], constants=constants, shapes={"x": [terms // 8, 8]}, opset=18)


def usual(absmax: float = 1.0, **more: float) -> Range:
    return Range(**{"count": 64, "absmax": absmax, "absmin": min(absmax, 0.1), **more})  # type: ignore[arg-type]


def seen(model: ModelProto, to: str = "float16", **found: Range | float | None) -> Ranges:
    """Ranges in which every value reaches 1, but those named: a Range, an absmax, or None for no range at all."""
    view = View.of(Model.load(model))
    values: dict[str, Range] = {}
    untapped: dict[str, str] = {}
    for value in view.values:
        dtype = view.dtype(value.id)
        if dtype is not None and dtype.floating:
            told = found.get(value.name, 1.0)
            if told is not None:
                values[key(view, value.id)] = told if isinstance(told, Range) else usual(told)
            else:
                untapped[key(view, value.id)] = "it was not measured"
    of = fingerprint(view.model)
    return Ranges(to, values, 3, "data.npz", False, "net.onnx", of.graph, of.weights, untapped)


def held(model: ModelProto, ranges: Ranges, **options: object) -> dict[str, str]:
    """The rule of each op that stays float32."""
    report = converted(model, ranges, **options).report
    return {row.name: row.rule or "" for row in report.rows if row.dtype == "float32"}


def converted(model: ModelProto, ranges: Ranges, **options: object) -> Converted:
    options = {"target": "onnx", "shift": "none", **options}
    return amp_rewrite.convert(model, ranges=ranges, **options)  # type: ignore[arg-type]


def findings(model: ModelProto, ranges: Ranges, **options: object) -> list[tuple[str, str, str]]:
    found = converted(model, ranges, **options).report.findings
    return [(f.kind, f.subject, f.message) for f in found if f.kind != "calibrated"]


def test_the_report_says_on_what_data_values_fit_and_that_random_data_is_random() -> None:
    report = converted(chain(), seen(chain())).report
    assert [row.dtype for row in report.rows] == ["float16"] * 5
    assert [(f.kind, f.subject, f.message) for f in report.findings] == [
        ("calibrated", "data.npz", "3 batches, headroom 2")
    ]
    report = converted(chain(), replace(seen(chain()), random=True, origin="random, seed 0")).report
    assert [(f.subject, f.message) for f in report.findings] == [
        (
            "random, seed 0",
            "3 batches, headroom 2; random data is not real data: calibrate with yours before you rely on this",
        )
    ]


def of(graph: str, **more: object) -> ModelProto:
    return build(graph, ["y"], constants=WEIGHT, **more)


FLUSHED, INFINITE = usual(1.0, flushed=40), usual(1.0, nonfinite=3)
MOVED = of("a=MatMul(x,w);b=Transpose(a);c=Transpose(b);y=MatMul(c,w)")
COPIED = of("a=MatMul(x,w);b=Transpose(a);y=MatMul(b,w)")
SHAPED = of("a=MatMul(x,w);s=Shape(a);b=Relu(a);r=Reshape(b,s);y=MatMul(r,w)")
LOG = of("a=MatMul(x,w);b=Log(a);y=MatMul(b,w)")
GATHER = of("g=Gather(w,i);y=MatMul(g,w)", types={"i": "int"}, shapes={"i": [8]})
HOLE = of("p=MatMul(x,w);s=Sigmoid(p);t=Tanh(p);c=Max(s,t);y=MatMul(c,w)")
NO_HOLE = of("p=MatMul(x,w);s=Sigmoid(p);c=Relu(s);y=MatMul(c,w)")
LOWERED = {"level": "lower-all", "lower": ["op=Log"]}
HELD: dict[str, tuple[ModelProto, dict[str, Range | float | None], dict[str, object], dict[str, str]]] = {
    "an overflow, with what computes with it": (chain(), {"c": 40_000.0}, {}, dict.fromkeys("cd", "overflow")),
    "the largest that fits with a headroom of 2": (chain(), {"a": 32752.0}, {}, {}),
    "one more": (chain(), {"a": 32753.0}, {}, dict.fromkeys("ab", "overflow")),
    "less headroom": (chain(), {"a": 10_000.0}, {}, {}),
    "more headroom": (chain(), {"a": 10_000.0}, {"headroom": 10.0}, dict.fromkeys("ab", "overflow")),
    "what moves an overflow": (MOVED, dict.fromkeys("abc", 1e5), {}, dict.fromkeys("abcy", "overflow")),
    "its shape is no fault of who reads it": (
        SHAPED,
        {"a": 40_000.0},
        {},
        {"a": "overflow", "s": "unpainted", "b": "overflow"},
    ),
    "a tensor among the subnormals": (chain(), {"c": 1e-4}, {}, dict.fromkeys("cd", "underflow")),
    "zeros fit": (chain(), {"c": Range(count=64)}, {}, {}),
    "flushed elements whose logarithm is taken": (LOG, {"a": FLUSHED}, LOWERED, {"a": "underflow"}),
    "flushed elements elsewhere": (chain(), {"a": FLUSHED}, {}, {}),
    "infinities that an op makes": (chain(), dict.fromkeys("abc", INFINITE), {}, dict.fromkeys("ab", "nonfinite")),
    "infinities that it carries": (chain(), dict.fromkeys("xab", INFINITE), {}, {}),
    "a copy of what was seen": (COPIED, {"b": None}, {}, {}),
    "what was not seen": (COPIED, {"a": None}, {}, dict.fromkeys("ab", "unseen")),
    "what has no elements": (chain(), {"c": Range()}, {}, dict.fromkeys("cd", "unseen")),
    "integers and constants": (GATHER, {"w": None}, {}, {}),
    "a hole that spares Casts": (
        HOLE,
        {"p": 1e5},
        {},
        {**dict.fromkeys("ps", "overflow"), "t": "overflow", "c": "no_gain"},
    ),
    "a hole that spares nothing": (NO_HOLE, {"p": 1e5}, {}, dict.fromkeys("ps", "overflow")),
    "what the user lowers": (chain(), {"c": 1e5}, {"lower": ["c"]}, {"d": "overflow"}),
    "a sum of a mean that fits": (mean(4096), {"m": 7.9}, {}, {}),
    "a sum of a mean that does not": (mean(4096), {"m": 8.1}, {}, {"m": "overflow"}),
}


@pytest.mark.parametrize("case", HELD)
def test_ranges_hold_these_ops_in_float32_by_these_rules(case: str) -> None:
    model, ranges, options, expected = HELD[case]
    assert held(model, seen(model, **ranges), **options) == expected


@pytest.mark.parametrize(
    ("model", "value", "found", "finding"),
    [
        (chain(), "c", 40_000.0, ("overflow", "goes up to 40000; with headroom 2, beyond 65504; fits bfloat16")),
        (chain(), "c", 1e-4, ("underflow", "stays below 0.0001, which is less than 2 times 6.10352e-05")),
        (chain(), "a", INFINITE, ("nonfinite", "3 of 64 elements are infinite or NaN in float32 already")),
        (
            mean(4096),
            "m",
            8.1,
            ("overflow", "is a mean of 4096 terms, whose sum goes up to 66355.2 with headroom, beyond 65504"),
        ),
    ],
)
def test_what_ranges_hold_is_a_finding(
    model: ModelProto, value: str, found: Range | float, finding: tuple[str, str]
) -> None:
    assert findings(model, seen(model, **{value: found})) == [(finding[0], value, finding[1])]


def test_bfloat16_holds_what_float16_does_not() -> None:
    assert held(chain(), seen(chain(), to="bfloat16", a=1e6), to="bfloat16") == {}
    assert held(mean(4096), seen(mean(4096), "bfloat16", m=8.1), to="bfloat16") == {}
    assert findings(chain(), seen(chain(), to="bfloat16", a=2e38), to="bfloat16") == [
        ("overflow", "a", "goes up to 2e+38; with headroom 2, beyond 3.38953e+38")
    ]


def test_a_cluster_is_pinned_whole_also_without_safety_rules() -> None:
    graph = (
        "h=MatMul(x,w);m=ReduceMean[axes=-1](h);d=Sub(h,m);q=Mul(d,d);v=ReduceMean[axes=-1](q);e=Add(v,eps);"
        "r=Sqrt(e);n=Div(d,r);s=Mul(n,g);t=Add(s,g);y=MatMul(t,w)"
    )
    constants = {**WEIGHT, "eps": np.float32(1e-3), "g": np.ones(8, np.float32)}
    model = build(graph, ["y"], constants=constants, opset=13)
    for safety in ("default", "none"):
        found = held(model, seen(model, q=1e6), safety=safety, level="lower-all")
        assert {"m", "d", "q", "v", "e", "r", "n"} <= found.keys()
        assert "y" not in found


def test_an_op_of_a_half_model_is_raised() -> None:
    half = amp_rewrite.convert(chain(), target="onnx", io="low").model
    rows = converted(half, seen(half, c=1e5)).report.rows
    assert [(row.name, row.dtype) for row in rows if row.op != "Cast"] == [
        *(("a", "float16"), ("b", "float16"), ("c", "float32"), ("d", "float32"), ("y", "float16"))
    ]


def test_ranges_come_from_a_file_and_are_those_of_the_type(tmp_path: Path) -> None:
    ranges = seen(chain(), c=1e5)
    ranges.save(tmp_path / "ranges.json")
    from_file = amp_rewrite.convert(chain(), target="onnx", shift="none", ranges=tmp_path / "ranges.json")
    assert from_file.report == converted(chain(), ranges).report
    with pytest.raises(PolicyError) as error:
        converted(chain(), seen(chain(), to="bfloat16"))
    assert str(error.value) == "the ranges are for bfloat16, not for float16; calibrate with to='float16'"


@pytest.mark.parametrize(("headroom", "said"), [(1.0, "1"), (0.0, "0"), (math.nan, "nan"), (math.inf, "inf")])
def test_a_headroom_must_leave_room(headroom: float, said: str) -> None:
    with pytest.raises(PolicyError) as error:
        converted(chain(), seen(chain()), headroom=headroom)
    assert str(error.value) == f"a headroom of {said} leaves nothing to spare; use a number above 1, as in 2"
