"""Models that break in half precision as documented, and that repair fixes while most ops stay low."""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

import amp_rewrite
from amp_rewrite.evidence.verify import Verdict
from amp_rewrite.pipeline.repair import Repaired
from support.hard_models import HARD, Hard, halved
from support.paths import ROOT, imported

# Outputs are of size 1, so this is one percent; bfloat16 has three bits fewer.
NEAR: Mapping[str, Mapping[str, float]] = {
    "float16": {"rtol": 1e-2, "atol": 1e-2},
    "bfloat16": {"rtol": 8e-2, "atol": 8e-2},
}
# bfloat16 has float32's range, but not its digits.
WRONG_IN_BFLOAT16 = {"offset_norm", "masked_rows", "far_rotary"}
KEPT: Mapping[str, set[str]] = {
    "llama_outlier": {"block1_down"},
    "t5_outlier": {"block2_wo"},
    "large_logits": {"logits"},
    "vae_decoder": {"level1_block1_conv2", "level1_upsample"},
    "offset_norm": {"offset"},
    "masked_rows": set(),
    "far_rotary": set(),
}
# The op at which the error first jumps in a half-precision export.
GUILTY = {
    "llama_outlier": "block0_square",
    "t5_outlier": "block2_square_2",
    "large_logits": "logits",
    "vae_decoder": "level1_block1_conv2",
    "offset_norm": "norm",
    "masked_rows": "block0_weights",
    "far_rotary": "cos",
}


def judged(hard: Hard, candidate: object, to: str = "float16", reference: object | None = None) -> Verdict:
    return amp_rewrite.verify(reference or hard.model, candidate, hard.batch, emulate=True, **NEAR[to])


def repaired(hard: Hard, model: object) -> Repaired:
    """Repair a model without shifts, so that ops that overflow stay float32."""
    return amp_rewrite.repair(model, hard.batch, shift="none", **NEAR["float16"])  # type: ignore[arg-type]


def products(converted: amp_rewrite.Converted, dtype: str) -> set[str]:
    return {row.name for row in converted.report.rows if row.color == "allow" and row.dtype == dtype}


# The T5 is like the Llama but the slowest; the page covers it.
SEARCHED = tuple(name for name in HARD if name != "t5_outlier")


@cache
def hard_model(name: str) -> Hard:
    return HARD[name]()


@cache
def ranges(name: str) -> amp_rewrite.Ranges:
    return amp_rewrite.calibrate(hard_model(name).model, hard_model(name).batch)


# -- float32 models ----------------------------------------------------------------------------------


@pytest.mark.parametrize("to", NEAR)
@pytest.mark.parametrize("name", HARD)
def test_in_half_precision_they_fail_and_the_wider_range_helps_four(name: str, to: str) -> None:
    hard = hard_model(name)
    assert judged(hard, halved(hard.model, to), to).ok == (to == "bfloat16" and name not in WRONG_IN_BFLOAT16)


@pytest.mark.parametrize("name", SEARCHED)
def test_with_data_they_pass_and_only_these_products_stay_float32(name: str) -> None:
    hard = hard_model(name)
    found = repaired(hard, hard.model)

    assert (found.solved, found.minimal) == (True, True)
    assert judged(hard, found.converted.result).ok
    assert products(found.converted, "float32") == KEPT[name]
    assert len(products(found.converted, "float16")) >= 0.9 * found.converted.report.totals.compute_ops


# -- half-precision exports --------------------------------------------------------------------------


@pytest.mark.parametrize("name", SEARCHED)
def test_in_a_half_export_the_guilty_op_is_located(name: str) -> None:
    hard = hard_model(name)
    half = halved(hard.model, clipped=True)
    jump = amp_rewrite.locate(half, half, hard.batch).first_jump
    assert jump is not None
    assert jump.op == GUILTY[name]


@pytest.mark.parametrize("name", ["large_logits", "offset_norm", "masked_rows", "far_rotary"])
def test_a_half_export_is_raised_where_necessary(name: str) -> None:
    hard = hard_model(name)
    half = halved(hard.model, clipped=True)
    found = repaired(hard, half)
    twin = amp_rewrite.emulate(half, rounding=False, io="float32")

    assert not judged(hard, half, reference=twin).ok
    assert (found.solved, found.minimal) == (True, True)
    assert judged(hard, found.converted.result, reference=twin).ok
    assert GUILTY[name] in {row.name for row in found.converted.report.raised}
    assert products(found.converted, "float32") == KEPT[name]


# -- the page ----------------------------------------------------------------------------------------


def _rows(kind: Any, results: str) -> list[Any]:
    found = json.loads((ROOT / "benchmarks" / "results" / f"{results}.json").read_text("utf-8"))["rows"]
    return [kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}) for row in found]


def test_the_page_matches_the_measurements() -> None:
    benchmark = imported("benchmarks.evidence.hard_models")
    page = (ROOT / "docs" / "evidence" / "hard_models.md").read_text("utf-8")
    assert page == benchmark.page(_rows(benchmark.Row, "hard_models"), _rows(benchmark.Outlier, "planted_models"))
