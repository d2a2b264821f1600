"""Models with outliers beyond float16 are fully low when shifted, and as accurate as without outliers."""

import json
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

import amp_rewrite
from amp_rewrite.errors import PolicyError
from amp_rewrite.evidence.calibrate import calibrate
from amp_rewrite.evidence.ranges import Range, Ranges
from amp_rewrite.ir.op_classes import HEAVY
from amp_rewrite.pipeline.conversion import Draft
from amp_rewrite.pipeline.measured import _scaled, shift_draft
from amp_rewrite.settings.choices import HEADROOM
from amp_rewrite.settings.request import Request
from support import cases
from support.hard_models import halved
from support.planted_models import planted
from support.runtime_models import MODELS
from support.shifting import bits, shifted_at_random

PLANTED = ("bert_dynamo23", "llama_dynamo21")


def _twins(model: ModelProto, ranges: Ranges, *, widen: bool = False) -> tuple[ModelProto, ModelProto]:
    """Return the model to color, without and with a shift."""
    before = Draft.of(model, Request.of(), widen=widen)
    after = shift_draft(Draft.of(model, Request.of()), ranges, 2.0).draft
    return before.view.model.to_proto(), after.view.model.to_proto()


@pytest.mark.parametrize("name", PLANTED)
def test_every_product_of_a_planted_model_is_low_without_changing_float32_bits(name: str) -> None:
    hard = planted(name)
    ranges = calibrate(hard.model, hard.batch)
    before, after = _twins(hard.model, ranges)
    assert before != after
    assert bits(before, hard.batch) == bits(after, hard.batch)
    converted = amp_rewrite.convert(hard.model, ranges=ranges)
    totals = converted.report.totals
    assert totals.compute_lowered == totals.compute_ops
    verdict = amp_rewrite.verify(hard.model, converted, hard.batch, tolerance=1e-2, emulate=True)  # type: ignore[arg-type]
    assert verdict.ok, verdict.because
    assert any(finding.kind == "shifted" for finding in converted.report.findings)


def test_a_half_precision_model_is_shifted_against_its_widened_twin() -> None:
    hard = planted("bert_dynamo23")
    model = halved(hard.model)
    batch = {name: a.astype(np.float16) if a.dtype == np.float32 else a for name, a in hard.batch.items()}
    ranges = calibrate(model, batch)
    before, after = _twins(model, ranges, widen=True)
    assert before != after
    assert bits(before, batch) == bits(after, batch)
    reference = amp_rewrite.emulate(model, rounding=False, io="float32")
    plain, shift = (amp_rewrite.convert(model, ranges=ranges, shift=how) for how in ("none", "auto"))
    assert shift.report.totals.compute_lowered > plain.report.totals.compute_lowered
    assert amp_rewrite.verify(reference, shift, batch, tolerance=1e-2, emulate=True).ok  # type: ignore[arg-type]


WEIGHTS = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
FEED = {"x": np.random.default_rng(1).standard_normal((8, 8)).astype(np.float32)}
STREAM = "h=MatMul(x,w);r=Relu(h);t=MatMul(r,w);a=Add(t,h);n=LayerNormalization(a,g);y=MatMul(n,w)"


def _model(text: str = STREAM, scale: float = 1.0, **types: str) -> ModelProto:
    constants: dict[str, Any] = {"w": WEIGHTS, "v": WEIGHTS * np.float32(scale), "g": np.ones(8, np.float32)}
    constants = {name: array for name, array in constants.items() if f",{name}" in text}
    return cases.build(text, ["y"], constants=constants, types=types)


LARGE = STREAM.replace("MatMul(x,w)", "MatMul(x,v)")


def test_a_model_without_overflow_is_identical_to_the_byte() -> None:
    model = _model()
    auto, none = (amp_rewrite.convert(model, data=FEED, shift=how) for how in ("auto", "none"))
    entries = list(none.model.metadata_props)
    assert [p.value for p in auto.model.metadata_props] == [p.value.replace(" shift=none", "") for p in entries]
    assert auto.model.graph == none.model.graph
    assert not [f for f in auto.report.findings if "shift" in f.kind]


def test_a_region_takes_the_smallest_exponent_or_the_requested_one() -> None:
    model = _model(LARGE, 1e5)
    largest = calibrate(model, FEED).values["h"].absmax
    found = {how: _exponent(amp_rewrite.convert(model, data=FEED, shift=how)) for how in ("auto", 9)}
    assert found["auto"] == int(np.ceil(np.log2(max(largest, calibrate(model, FEED).values["a"].absmax) * 2 / 65504)))
    assert found[9] == 9


def _exponent(converted: amp_rewrite.Converted) -> int:
    return next(row.exponent for row in converted.report.shifts if row.exponent)


def test_an_exponent_needs_data() -> None:
    with pytest.raises(PolicyError, match="shift=4 needs to know which values exceed float16; pass data or ranges"):
        amp_rewrite.convert(_model(), shift=4)


def test_a_value_with_too_wide_a_range_stays_float32_and_is_named() -> None:
    converted = amp_rewrite.convert(_model(LARGE, 1e15), data=FEED)
    named = [f for f in converted.report.findings if f.kind == "not_shifted"]
    assert named and "too wide for any shift" in named[0].message
    rows = [row for row in converted.report.shifts if not row.exponent]
    assert rows
    for row in rows:
        assert row.values == 1
        assert row.headroom == row.headroom_after == 65504 / row.absmax


def test_a_model_in_training_mode_is_not_shifted() -> None:
    text = "h=MatMul(x,v);b,m,s=BatchNormalization[training_mode=1](h,g,g,g,g);y=MatMul(b,w)"
    constants = {"w": WEIGHTS, "v": WEIGHTS * 2e4, "g": np.ones(8, np.float32)}
    model = cases.build(text, ["y"], constants=constants)
    converted = amp_rewrite.convert(model, data=FEED)
    assert [f.message for f in converted.report.findings if f.kind == "not_shifted"]
    assert not any("shifted" in node.output[0] for node in converted.model.graph.node)


def test_an_embedding_tied_to_the_head_is_stored_once() -> None:
    rng = np.random.default_rng(2)
    table = rng.standard_normal((1024, 8)).astype(np.float32)
    constants = {"e": table, "v": WEIGHTS * np.float32(2e4), "g": np.ones(8, np.float32)}
    text = "b=Gather(e,i);h=MatMul(b,v);a=Add(b,h);n=LayerNormalization(a,g);t=Transpose(e);y=MatMul(n,t)"
    model = cases.build(text, ["y"], shapes={"i": (4,), "y": (4, 1024)}, types={"i": "int"}, constants=constants)
    feed = {"i": np.array([1, 5, 900, 7])}
    ranges = calibrate(model, feed)
    before, after = _twins(model, ranges)
    assert before != after
    assert bits(before, feed) == bits(after, feed)
    assert sum(list(tensor.dims) == [1024, 8] for tensor in after.graph.initializer) == 1


def test_a_cache_keeps_its_meaning_for_callers() -> None:
    text = "k=MatMul(x,v);c=Concat[axis=0](past,k);s=MatMul(c,w);y=Softmax(s)"
    constants = {"w": WEIGHTS * np.float32(1e-5), "v": WEIGHTS * np.float32(1e5)}
    shapes = {"past": (4, 8), "c": (12, 8), "y": (12, 8)}
    model = cases.build(text, ["c", "y"], shapes=shapes, constants=constants)
    feed = {**FEED, "past": np.full((4, 8), 1e5, np.float32)}
    before, after = _twins(model, calibrate(model, feed))
    assert before != after
    assert [value.name for value in after.graph.output] == ["c", "y"]
    assert bits(before, feed) == bits(after, feed)


OUTLIERS = "b=Gather(e,i);c=Mul(b,s);n=LayerNormalization(c,g);h=MatMul(n,w);a=Add(c,h)"
TOKENS = {"i": np.array([1, 5, 60, 7])}


def _embedded(text: str, largest: float) -> ModelProto:
    """Build a model of tokens; two channels of its table, times a constant, reach 16 times `largest`."""
    table = np.random.default_rng(3).standard_normal((64, 8)).astype(np.float32)
    table[:, 3], table[:, 5] = largest, -largest
    constants = {"e": table, "w": WEIGHTS, "g": np.ones(8, np.float32), "s": np.float32(16)}
    shapes, types = {"i": (4,), "y": (4, 8)}, {"i": "int"}
    return cases.build(text, ["y"], shapes=shapes, types=types, constants=constants)


def test_a_shift_is_applied_even_if_it_only_saves_casts() -> None:
    model = _embedded(f"{OUTLIERS};k=LayerNormalization(a,g);y=MatMul(k,w)", 12288)
    counts = {
        (fuse, how): amp_rewrite.convert(model, data=TOKENS, shift=how, fuse=fuse).report.totals
        for fuse in ("basic", "auto")
        for how in ("auto", "none")
    }
    assert {totals.compute_lowered for totals in counts.values()} == {2}
    casts = {ways: totals.casts_to_low + totals.casts_to_float32 for ways, totals in counts.items()}
    assert (casts["basic", "auto"], casts["basic", "none"]) == (1, 4)  # of the output
    assert casts["auto", "auto"] == casts["auto", "none"] == 4  # a norm that adds first stays float32


def test_a_useless_shift_is_undone_and_named() -> None:
    model = _embedded(f"{OUTLIERS};y=MatMul(n,w)", 12288)  # a Mul for a Cast
    model.graph.output.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, (4, 8)))
    converted = amp_rewrite.convert(model, data=TOKENS)
    row = next(row for row in converted.report.shifts if row.value == "c")
    assert row.exponent == 0 and "nor save ops and Casts" in row.why
    assert any(f.kind == "not_shifted" and f.subject == "c" for f in converted.report.findings)


def test_explain_lists_shifted_ops_with_reasons() -> None:
    hard = planted("bert_dynamo23")
    converted = amp_rewrite.convert(hard.model, data=hard.batch)
    (region,) = [row for row in converted.report.shifts if row.exponent]
    maker = next(op for op in converted.view.ops if f"{region.value}_shifted_{region.exponent}" in op.node.output)
    text = amp_rewrite.explain(converted, maker.name).text()
    assert f"shifted: its results are scaled by 2^-{region.exponent}\n" in text
    (chain,) = json.loads(amp_rewrite.explain(converted, maker.name).to_json())["chains"]
    assert chain["shift"] == region.exponent
    unmoved = next(row.name for row in converted.report.rows if row.op == "MatMul" and row.name != maker.name)
    assert "shifted" not in amp_rewrite.explain(converted, unmoved).text()


def test_a_scaled_range_overflows_exactly_if_its_largest_number_does() -> None:
    known = Range(count=100, absmax=2.0**17, absmin=1.0, overflow=3, flushed=2, subnormal=20)
    assert _scaled(known, 1).overflow == 3
    small = _scaled(known, 3)
    assert (small.absmax, small.absmin, small.overflow) == (2.0**14, 0.125, 0)
    assert (small.flushed, small.subnormal) == (16, 100)


HELD = {"cached_decoder": {"constant_range"}, "detector": {"folded"}}
"""Rules that keep products in float32: a head that overflows, queries without an input."""


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_large_numbers_is_low_accurate_and_exact_in_float32(name: str) -> None:
    model, feeds = MODELS[name]()
    ranges = amp_rewrite.calibrate(model, feeds)
    assert max(known.absmax for known in ranges.values.values()) > 65504
    converted = amp_rewrite.convert(model, ranges=ranges)
    high = {row.rule for row in converted.report.rows if row.op in HEAVY and row.dtype == "float32"}
    assert high == HELD.get(name, set())
    assert amp_rewrite.verify(model, converted, feeds, tolerance=1e-2, emulate=True)
    draft = Draft.of(model, Request.of())
    before = bits(draft.view.model.to_proto(), feeds)
    for view in (shift_draft(draft, ranges, HEADROOM).draft.view, shifted_at_random(draft.view, 0).view):
        assert bits(view.model.to_proto(), feeds) == before
