"""The guard: what ranges pin, and what they leave alone."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

import amp_rewrite
from amp_rewrite import Converted, Model, View
from amp_rewrite.errors import EvidenceError, PolicyError
from amp_rewrite.evidence.ranges import Range, Ranges, key
from amp_rewrite.files.fingerprint import fingerprint
from support.cases import build

CHAIN = "a=MatMul(x,w);b=Relu(a);c=MatMul(b,w);d=Relu(c);y=MatMul(d,w)"
WEIGHT = {"w": np.full((8, 8), 0.5, np.float32)}


def chain() -> ModelProto:
    return build(CHAIN, ["y"], constants=WEIGHT)


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


def test_values_that_fit_pin_nothing_and_the_report_says_on_what_data() -> None:
    report = converted(chain(), seen(chain())).report

    assert [row.dtype for row in report.rows] == ["float16"] * 5
    assert [(f.kind, f.subject, f.message) for f in report.findings] == [
        ("calibrated", "data.npz", "3 batches, headroom 2")
    ]


def test_an_overflow_pins_the_op_that_makes_it_and_those_that_compute_with_it() -> None:
    ranges = seen(chain(), c=40_000.0)

    assert held(chain(), ranges) == {"c": "overflow", "d": "overflow"}
    assert findings(chain(), ranges) == [
        ("overflow", "c", "goes up to 40000; with headroom 2, beyond 65504; fits bfloat16")
    ]


def test_the_shape_of_what_overflows_is_no_fault_of_who_reads_it() -> None:
    model = build("a=MatMul(x,w);s=Shape(a);b=Relu(a);r=Reshape(b,s);y=MatMul(r,w)", ["y"], constants=WEIGHT)

    assert held(model, seen(model, a=40_000.0)) == {"a": "overflow", "s": "unpainted", "b": "overflow"}


def test_what_moves_an_overflow_is_pinned_with_the_op_that_computes_with_it() -> None:
    model = build("a=MatMul(x,w);b=Transpose(a);c=Transpose(b);y=MatMul(c,w)", ["y"], constants=WEIGHT)

    found = held(model, seen(model, a=1e5, b=1e5, c=1e5))

    assert found == {"a": "overflow", "b": "overflow", "c": "overflow", "y": "overflow"}


@pytest.mark.parametrize(("absmax", "pinned"), [(32752.0, False), (32753.0, True)])
def test_the_headroom_is_exact(absmax: float, pinned: bool) -> None:
    assert bool(held(chain(), seen(chain(), a=absmax))) is pinned


def test_more_headroom_pins_more() -> None:
    ranges = seen(chain(), a=10_000.0)

    assert (held(chain(), ranges), held(chain(), ranges, headroom=10.0)) == ({}, {"a": "overflow", "b": "overflow"})


def test_bfloat16_holds_what_float16_does_not() -> None:
    assert held(chain(), seen(chain(), to="bfloat16", a=1e6), to="bfloat16") == {}
    assert findings(chain(), seen(chain(), to="bfloat16", a=2e38), to="bfloat16") == [
        ("overflow", "a", "goes up to 2e+38; with headroom 2, beyond 3.38953e+38")
    ]


def test_a_tensor_among_the_subnormals_pins_its_ops() -> None:
    ranges = seen(chain(), c=1e-4)

    assert held(chain(), ranges) == {"c": "underflow", "d": "underflow"}
    assert findings(chain(), ranges) == [
        ("underflow", "c", "stays below 0.0001, which is less than 2 times 6.10352e-05")
    ]


def test_zeros_fit() -> None:
    assert held(chain(), seen(chain(), c=Range(count=64))) == {}


FLUSHED = usual(1.0, flushed=40)


def test_flushed_elements_count_where_their_logarithm_is_taken() -> None:
    model = build("a=MatMul(x,w);b=Log(a);y=MatMul(b,w)", ["y"], constants=WEIGHT)

    assert held(model, seen(model, a=FLUSHED), level="lower-all", lower=["op=Log"]) == {"a": "underflow"}
    assert held(chain(), seen(chain(), a=FLUSHED)) == {}


def test_infinities_that_an_op_makes_are_pinned_and_those_that_it_carries_are_not() -> None:
    infinite = usual(1.0, nonfinite=3)

    assert held(chain(), seen(chain(), a=infinite, b=infinite, c=infinite)) == {"a": "nonfinite", "b": "nonfinite"}
    assert findings(chain(), seen(chain(), a=infinite)) == [
        ("nonfinite", "a", "3 of 64 elements are infinite or NaN in float32 already")
    ]
    assert held(chain(), seen(chain(), x=infinite, a=infinite, b=infinite)) == {}


def test_a_value_that_was_not_seen_is_pinned_and_a_copy_of_one_that_was_is_not() -> None:
    model = build("a=MatMul(x,w);b=Transpose(a);y=MatMul(b,w)", ["y"], constants=WEIGHT)

    assert held(model, seen(model, b=None)) == {}
    assert held(model, seen(model, a=None)) == {"a": "unseen", "b": "unseen"}
    assert held(chain(), seen(chain(), c=Range())) == {"c": "unseen", "d": "unseen"}


def test_integers_and_constants_have_no_range_and_need_none() -> None:
    model = build("g=Gather(w,i);y=MatMul(g,w)", ["y"], constants=WEIGHT, types={"i": "int"}, shapes={"i": [8]})

    assert held(model, seen(model, w=None)) == {}


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


def test_a_hole_beside_pinned_ops_is_filled_where_that_spares_casts() -> None:
    graph = "p=MatMul(x,w);s=Sigmoid(p);t=Tanh(p);c=Max(s,t);y=MatMul(c,w)"
    model = build(graph, ["y"], constants=WEIGHT)

    report = converted(model, seen(model, p=1e5)).report
    assert {row.name: row.dtype for row in report.rows} == {**dict.fromkeys("pstc", "float32"), "y": "float16"}
    assert report.totals.casts_to_low == 1


def test_a_hole_that_spares_nothing_stays_low() -> None:
    graph = "p=MatMul(x,w);s=Sigmoid(p);c=Relu(s);y=MatMul(c,w)"
    model = build(graph, ["y"], constants=WEIGHT)

    assert held(model, seen(model, p=1e5)) == {"p": "overflow", "s": "overflow"}


def test_what_the_user_lowers_stays_lowered() -> None:
    assert held(chain(), seen(chain(), c=1e5), lower=["c"]) == {"d": "overflow"}


def test_an_op_of_a_half_model_is_raised() -> None:
    half = amp_rewrite.convert(chain(), target="onnx", io="low").model
    ranges = seen(half, c=1e5)

    report = converted(half, ranges).report

    assert {row.name: row.dtype for row in report.rows if row.op != "Cast"} == {
        "a": "float16",
        "b": "float16",
        "c": "float32",
        "d": "float32",
        "y": "float16",
    }


def test_ranges_may_come_from_their_file(tmp_path: Path) -> None:
    ranges = seen(chain(), c=1e5)
    ranges.save(tmp_path / "ranges.json")

    from_file = amp_rewrite.convert(chain(), target="onnx", shift="none", ranges=tmp_path / "ranges.json")

    assert from_file.report == converted(chain(), ranges).report


# -- bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("headroom", "said"), [(1.0, "1"), (0.0, "0"), (math.nan, "nan"), (math.inf, "inf")])
def test_a_headroom_must_leave_room(headroom: float, said: str) -> None:
    with pytest.raises(PolicyError) as error:
        converted(chain(), seen(chain()), headroom=headroom)
    assert str(error.value) == f"a headroom of {said} leaves nothing to spare; use a number above 1, as in 2"


def test_ranges_of_another_type_are_refused() -> None:
    with pytest.raises(PolicyError) as error:
        converted(chain(), seen(chain(), to="bfloat16"))
    assert str(error.value) == "the ranges are for bfloat16, not for float16; calibrate with to='float16'"


def test_ranges_of_another_model_are_refused() -> None:
    other = build("y=Relu(x)", ["y"])
    with pytest.raises(
        EvidenceError, match=r"the ranges are of another model, net\.onnx: graph .* differ; calibrate again on this one"
    ):
        converted(chain(), seen(other))


def test_random_data_is_said_to_be_random() -> None:
    report = converted(chain(), replace(seen(chain()), random=True, origin="random, seed 0")).report

    assert [(f.subject, f.message) for f in report.findings] == [
        (
            "random, seed 0",
            "3 batches, headroom 2; random data is not real data: calibrate with yours before you rely on this",
        )
    ]


def mean(terms: int) -> ModelProto:
    constants = {**WEIGHT, "row": np.full((1, 8), 0.5, np.float32), "axes": np.array([0, 1], np.int64)}
    text = "a=MatMul(x,w);m=ReduceMean(a,axes);b=MatMul(m,row);c=MatMul(b,w);y=MatMul(c,w)"
    return build(text, ["y"], constants=constants, shapes={"x": [terms // 8, 8]}, opset=18)


def test_a_mean_stays_float32_whose_sum_does_not_fit_and_its_readers_do_not() -> None:
    model = mean(4096)
    assert held(model, seen(model, m=7.9)) == {}
    assert held(model, seen(model, m=8.1)) == {"m": "overflow"}
    assert findings(model, seen(model, m=8.1)) == [
        ("overflow", "m", "is a mean of 4096 terms, whose sum goes up to 66355.2 with headroom, beyond 65504")
    ]
    assert held(model, seen(model, "bfloat16", m=8.1), to="bfloat16") == {}
