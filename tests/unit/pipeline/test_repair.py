"""Repair: the fewest regions, checked to be needed; what it says; and what it does when there is nothing to find."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

import amp_rewrite
import amp_rewrite.pipeline.repair
from amp_rewrite.evidence.metric import criterion
from amp_rewrite.evidence.verdict import FedData, ModelRun, Verdict
from amp_rewrite.evidence.verify import verify
from amp_rewrite.pipeline.repair import repair
from amp_rewrite.pipeline.repaired import Repaired
from support.cases import build
from support.hard_models import HARD

MODULE = sys.modules["amp_rewrite.pipeline.repair"]  # the name in the package is the function
NEAR: dict[str, Any] = {"tolerance": 1e-2}
"""The largest error may be a hundredth of the largest output: 5 to 10 times what float16 costs these models."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in HARD if name != "t5_outlier"])
def test_hard_models_are_repaired_with_most_compute_ops_still_low(name: str) -> None:
    """Without the rules for numbers, which mend some of them before a search."""
    hard = HARD[name]()

    found = repair(hard.model, hard.batch, safety="none", **NEAR)

    totals = found.converted.report.totals
    assert (found.solved, found.minimal) == (True, True)
    assert totals.compute_lowered >= 0.9 * totals.compute_ops
    assert verify(hard.model, found.converted.result, hard.batch, emulate=True, **NEAR).ok


def needy(layers: int = 8, needs: tuple[int, ...] = (5,)) -> ModelProto:
    """A chain in which some layers add 255 and subtract it again: float16 keeps eighths there."""
    parts, x = [], "x"
    for i in range(layers):
        parts.append(f"m{i}=MatMul({x},w)")
        x = f"m{i}"
        if i in needs:
            parts.append(f"u{i}=Add({x},big);d{i}=Sub(u{i},big)")
            x = f"d{i}"
    rng = np.random.default_rng(0)
    weight = np.linalg.qr(rng.standard_normal((8, 8)))[0].astype(np.float32)
    parts.append(f"y=MatMul({x},w)")
    return build(";".join(parts), ["y"], constants={"w": weight, "big": np.float32(255)})


BATCH = {"x": np.random.default_rng(1).standard_normal((8, 8)).astype(np.float32)}


denied = Verdict(
    ModelRun("a", "float32"), ModelRun("b", "float16"), FedData("d", False, 1), criterion(**NEAR), (), ("denied",)
)


def repaired(model: ModelProto, **options: Any) -> Repaired:
    return repair(model, BATCH, target="onnx", **{**NEAR, **options})


def test_one_layer_of_many_is_found_and_named() -> None:
    found = repaired(needy())

    assert (found.solved, found.minimal) == (True, True)
    assert [row.name for row in found.converted.report.rows if row.dtype == "float32"] == ["m5", "u5", "d5"]
    assert len(found.trail) <= 20
    assert [step.pinned for step in found.trail[:3]] == [0, found.candidates, 1]


def test_a_model_that_is_near_enough_is_converted_as_always() -> None:
    model = needy(needs=())
    found = repaired(model)

    assert (found.solved, found.minimal, found.regions, len(found.trail)) == (True, True, (), 1)
    assert found.text() == ""  # the evidence says it
    assert found.text(verbose=True).startswith("repair: no region pinned to float32; 1 trial\n")
    assert found.converted.report.rows == amp_rewrite.convert(model, target="onnx").report.rows


def test_a_budget_that_ends_early_leaves_what_was_found_and_says_so() -> None:
    found = repaired(needy(needs=(1, 5)), budget=3)

    assert (found.solved, found.minimal, len(found.trail)) == (True, False, 3)
    assert "perhaps not all are needed; 3 trials" in found.text()


def test_a_result_that_fails_after_all_is_not_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    real = MODULE.verdict_of
    monkeypatch.setattr(MODULE, "verdict_of", lambda *given: real(*given) if given[3].to_failure else denied)
    found = repaired(needy())
    assert (found.solved, found.minimal, len(found.regions)) == (False, False, 1)
    assert found.converted.report.evidence is not None and found.converted.report.evidence.objection == "denied"


def test_what_cannot_be_pinned_cannot_be_repaired() -> None:
    found = repaired(needy(), lower=["*"])

    assert not found.solved
    assert found.candidates == 0
    told = found.text()
    assert "float16 cannot hold this: with all ops in float32 " in told
    assert "so it passes with a tolerance of 0." in told


def test_a_half_model_is_repaired_against_its_widened_twin() -> None:
    half = amp_rewrite.convert(needy(layers=3, needs=(1,)), target="onnx", io="low").model

    found = repaired(half)

    assert found.solved
    assert [row.name for row in found.converted.report.rows if row.dtype == "float32"] == ["u1", "d1"]


def test_what_only_moves_values_of_raised_ops_does_not_round_them_again() -> None:
    weight = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    chain = build("a=MatMul(x,w);r=Relu(a);t=Transpose(r);y=MatMul(t,w)", ["y"], constants={"w": weight})
    half = amp_rewrite.convert(chain, target="onnx").model

    found = repaired(half, tolerance=1e-6)  # a 500th of what one rounding to float16 costs

    assert found.solved
    assert {row.dtype for row in found.converted.report.rows if row.op != "Cast"} == {"float32"}


def test_the_json_of_a_repair_has_its_outcome_and_its_parts() -> None:
    found = repaired(needy(needs=(1,)))
    document = json.loads(found.to_json())
    stated = {name: getattr(found, name) for name in ("solved", "minimal", "candidates", "budget")}
    assert {name: document[name] for name in ("schema", *stated)} == {"schema": 1, **stated}
    assert document["regions"] == [region.because for region in found.regions]
    assert document.keys() - {"schema", *stated, "regions"} == {"trail", "ranges", "verdict", "report"}
