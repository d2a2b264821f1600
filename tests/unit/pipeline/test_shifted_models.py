"""Models as runtimes and exporters spell them, with residual streams beyond float16: bits, errors and products."""

from __future__ import annotations

import pytest

import amp_rewrite
from amp_rewrite.ir.op_classes import HEAVY
from amp_rewrite.pipeline.draft import Draft
from amp_rewrite.pipeline.shift import shift_draft
from amp_rewrite.settings.choices import HEADROOM
from amp_rewrite.settings.request import Request
from support.runtime_models import MODELS
from support.shifting import bits, shifted_at_random

HELD = {"cached_decoder": {"constant_range"}, "detector": {"folded"}}
"""Rules that hold products in float32: a head of words beyond the type, queries that no input reaches."""


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_large_numbers_is_low_and_near_and_no_bit_changes_in_float32(name: str) -> None:
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
