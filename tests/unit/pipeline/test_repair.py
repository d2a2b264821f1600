"""Repair: regions, the search for the fewest of them, its text, and cases without a solution."""

import json
import math
import sys
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import onnx.parser
import pytest
from hypothesis import given
from onnx import ModelProto

import amp_rewrite
import amp_rewrite.pipeline.repair
from amp_rewrite.evidence.metric import criterion
from amp_rewrite.evidence.verify import FedData, ModelRun, Verdict, verify
from amp_rewrite.files.model import Model
from amp_rewrite.pipeline.conversion import Draft
from amp_rewrite.pipeline.repair import BudgetSpent, Region, Repaired, minimal_set, regions_of, repair, suspicion
from amp_rewrite.settings.request import Request
from support.cases import build
from support.hard_models import HARD

MODULE = sys.modules["amp_rewrite.pipeline.repair"]  # the package's name is the function
NEAR: dict[str, Any] = {"tolerance": 1e-2}
"""The allowed error, a hundredth of the largest output: 5 to 10 times the rounding error of these models."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in HARD if name != "t5_outlier"])
def test_hard_models_are_repaired_with_most_compute_ops_still_low(name: str) -> None:
    """Without safety rules, which fix some of them before a search."""
    hard = HARD[name]()
    found = repair(hard.model, hard.batch, safety="none", **NEAR)
    totals = found.converted.report.totals
    assert (found.solved, found.minimal) == (True, True)
    assert totals.compute_lowered >= 0.9 * totals.compute_ops
    assert verify(hard.model, found.converted.result, hard.batch, emulate=True, **NEAR).ok


def needy(layers: int = 8, needs: tuple[int, ...] = (5,)) -> ModelProto:
    """Build a chain in which some layers add 255 and subtract it again, where float16's spacing is an eighth."""
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


def test_the_only_faulty_layer_is_found_and_named() -> None:
    stages: list[tuple[str, int, int]] = []
    found = repaired(needy(), progress=lambda *step: stages.append(step))
    assert list(dict.fromkeys(stage for stage, _, _ in stages)) == ["calibrate", "verify", "search", "local errors"]
    assert all(0 < done <= total for _, done, total in stages)
    assert (found.solved, found.minimal) == (True, True)
    assert [row.name for row in found.converted.report.rows if row.dtype == "float32"] == ["m5", "u5", "d5"]
    assert len(found.trail) <= 20
    assert [step.pinned for step in found.trail[:3]] == [0, found.candidates, 1]


def test_an_accurate_model_is_converted_as_usual() -> None:
    model = needy(needs=())
    found = repaired(model)
    assert (found.solved, found.minimal, found.regions, len(found.trail)) == (True, True, (), 1)
    assert found.text() == ""  # the evidence says it
    assert found.text(verbose=True).startswith("repair: no region pinned to float32; 1 trial\n")
    assert found.converted.report.rows == amp_rewrite.convert(model, target="onnx").report.rows


def test_an_exhausted_budget_keeps_the_pins_found_and_says_so() -> None:
    found = repaired(needy(needs=(1, 5)), budget=3)
    assert (found.solved, found.minimal, len(found.trail)) == (True, False, 3)
    assert "some may not be needed; 3 trials" in found.text()


def test_a_result_that_fails_in_the_end_is_not_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    real = MODULE.verdict_of
    monkeypatch.setattr(MODULE, "verdict_of", lambda *a: real(*a) if a[3].to_failure else denied)
    found = repaired(needy())
    assert (found.solved, found.minimal, len(found.regions)) == (False, False, 1)
    assert found.converted.report.evidence is not None and found.converted.report.evidence.objection == "denied"


def test_errors_without_ops_to_pin_cannot_be_repaired() -> None:
    found = repaired(needy(), lower=["*"])
    assert not found.solved
    assert found.candidates == 0
    text = found.text()
    assert "float16 cannot meet the tolerance: even with all ops in float32 " in text
    assert "so the candidate passes with a tolerance of 0." in text


def test_a_half_model_is_repaired_against_its_widened_twin() -> None:
    half = amp_rewrite.convert(needy(layers=3, needs=(1,)), target="onnx", io="low").model
    found = repaired(half)
    assert found.solved
    assert [row.name for row in found.converted.report.rows if row.dtype == "float32"] == ["u1", "d1"]


def test_ops_that_move_values_of_raised_ops_do_not_round_them_again() -> None:
    weight = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    chain = build("a=MatMul(x,w);r=Relu(a);t=Transpose(r);y=MatMul(t,w)", ["y"], constants={"w": weight})
    half = amp_rewrite.convert(chain, target="onnx").model
    found = repaired(half, tolerance=1e-6)  # a 500th of what one rounding to float16 costs
    assert found.solved
    assert {row.dtype for row in found.converted.report.rows if row.op != "Cast"} == {"float32"}


def test_the_json_of_a_repair_has_its_outcome_and_its_parts() -> None:
    found = repaired(needy(needs=(1,)))
    document = json.loads(found.to_json())
    fields = {name: getattr(found, name) for name in ("solved", "minimal", "candidates", "budget")}
    assert {name: document[name] for name in ("schema", *fields)} == {"schema": 1, **fields}
    assert document["regions"] == [region.because for region in found.regions]
    assert document.keys() - {"schema", *fields, "regions"} == {"trail", "ranges", "verdict", "report"}


def blames(*guilty: int) -> tuple[list[frozenset[int]], Callable[[frozenset[int]], bool]]:
    """Return a test that passes if all of these are kept, and the list of its calls."""
    tests: list[frozenset[int]] = []

    def enough(kept: frozenset[int]) -> bool:
        tests.append(kept)
        return kept.issuperset(guilty)

    return tests, enough


def test_nothing_is_chosen_if_even_all_candidates_are_not_enough() -> None:
    assert minimal_set(100, lambda kept: False) is None


@pytest.mark.parametrize("guilty", [0, 1, 5, 499, 998, 999])
def test_one_of_a_thousand_is_found_in_some_thirty_tests(guilty: int) -> None:
    tests, enough = blames(guilty)
    chosen = minimal_set(1000, enough)
    assert chosen == (guilty,)
    assert len(tests) <= 24  # none, all; log2(1000) to double and to bisect; only the one


@given(st.integers(1, 60), st.data())
def test_the_choice_is_sufficient_and_minimal(suspects: int, data: st.DataObject) -> None:
    guilty = data.draw(st.sets(st.integers(0, suspects - 1)))
    _, enough = blames(*guilty)
    assert minimal_set(suspects, enough) == tuple(sorted(guilty))


@given(st.integers(1, 40), st.integers(1, 30), st.data())
def test_the_choice_at_the_end_of_the_budget_passes(suspects: int, budget: int, data: st.DataObject) -> None:
    guilty = data.draw(st.sets(st.integers(0, suspects - 1)))
    tests, enough = blames(*guilty)

    def bounded(kept: frozenset[int]) -> bool:
        if len(tests) == budget:
            raise BudgetSpent
        return enough(kept)

    chosen = minimal_set(suspects, bounded)

    assert chosen is None or guilty.issubset(chosen)


@given(st.integers(2, 7), st.data())
def test_even_without_monotonicity_the_choice_was_tested(suspects: int, data: st.DataObject) -> None:
    table: dict[frozenset[int], bool] = {frozenset(): False}

    def enough(kept: frozenset[int]) -> bool:
        return table.setdefault(kept, data.draw(st.booleans()))

    chosen = minimal_set(suspects, enough)

    if chosen is not None:
        assert table[frozenset(chosen)]
        assert not any(table[frozenset(chosen) - {i}] for i in chosen)


WEIGHTS = ",".join(str(n % 9 + 1) for n in range(32))
REGIONED = """<ir_version: 8, opset_import: ["": 17]>
g (float[2,8] x, int64[2] ids) => (float[4,2] y, float[2,4] z)
<float[2,2] v = {1,2,3,4}, float[8,4] w = {WEIGHTS},
 float[3,4] table = {1,2,3,4,5,6,7,8,9,8,7,6}>
{
  [product] p = MatMul (x, w)
  [rows] r = Gather (table, ids)
  [sum] s = Add (p, r)
  [turned] t = Transpose (s)
  [head] y = MatMul (t, v)
  [last] z = Exp (p)
}""".replace("WEIGHTS", WEIGHTS)
GELU = """<ir_version: 8, opset_import: ["": 17]>
g (float[2,8] x) => (float[2,4] y)
<float[8,4] w = {WEIGHTS}, float[4,4] v = {1,2,3,4,5,6,7,8,9,8,7,6,5,4,3,2},
 float root = {1.4142135}, float one = {1}, float half = {0.5}>
{
  [product] p = MatMul (x, w)
  [scaled] a = Div (p, root)  [bell] e = Erf (a)  [shifted] o = Add (e, one)
  [gated] m = Mul (p, o)  [halved] g = Mul (m, half)
  [second] y = MatMul (g, v)
}""".replace("WEIGHTS", WEIGHTS)


def regions(text: str, errors: dict[str, float] | None = None, **options: object) -> dict[str, Region]:
    draft = Draft.of(Model(onnx.parser.parse_model(text)), Request.of(**options))  # type: ignore[arg-type]
    return {region.name: region for region in regions_of(draft, draft.paint(), errors or {})}


def test_a_region_is_a_low_op_that_rounds_or_reads_weights() -> None:
    """A Transpose does not round; a Gather is exact, but its table is stored low; Exp is float32."""
    assert list(regions(REGIONED)) == ["product", "rows", "sum", "head"]


def test_casts_constants_and_ops_with_bodies_are_not_regions() -> None:
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float16[2,2] h, bool c) => (float16[2,2] y) {
      [wide] w = Cast <to = 1> (h)  [narrow] n = Cast <to = 10> (w)  [fixed] k = Constant <value = float16[1] {2}> ()
      [noise] r = RandomNormal <dtype = 10, shape = [2,2]> ()
      [product] p = MatMul (n, r)  [scaled] s = Mul (p, k)
      [branch] y = If (c) <then_branch = t () => (float16[2,2] a) { [inner] a = Exp (s) },
                           else_branch = e () => (float16[2,2] b) { [copy] b = Identity (s) }>
    }"""
    found = regions(text)
    assert {"noise", "product", "scaled"} <= found.keys()
    assert not found.keys() & {"wide", "narrow", "fixed", "branch", "copy"}


def test_a_cluster_is_one_region_named_after_its_largest_error() -> None:
    found = regions(GELU, {"scaled": 0.25, "gated": 0.5, "product": 0.125}, fuse="none")
    assert list(found) == ["product", "gated", "second"]
    assert (found["gated"].kind, len(found["gated"].ops), found["gated"].error) == ("gelu_erf", 5, 0.5)
    assert found["product"].error == 0.125
    assert found["second"].error == 0.0


def test_pins_of_a_region_name_all_its_ops_and_the_reason() -> None:
    region = regions(GELU, {"bell": 0.5}, fuse="none")["bell"]
    assert [pin.op for pin in region.pins] == list(region.ops)
    assert {(pin.rule, pin.raises, pin.note) for pin in region.pins} == {
        ("repair", True, "bell (gelu_erf) alone adds a relative error of 0.5")
    }


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Region("a", "Add", (), math.inf, True), Region("b", "Add", (), 1e9, False)),
        (Region("a", "Add", (), 0.5, True), Region("b", "Add", (), 0.2, False)),
        (Region("a", "Add", (), 0.51, False), Region("b", "MatMul", (), 0.99, True)),
        (Region("a", "Add", (), 0.99, False), Region("b", "Add", (), 0.51, False)),
        (Region("a", "Add", (), 0.01, False), Region("b", "Add", (), 0.0, False)),
    ],
    ids=["infinity", "power of two", "cheaper at the same power", "larger at the same power", "none at all"],
)
def test_the_most_suspicious_region_comes_first(first: Region, second: Region) -> None:
    assert sorted([second, first], key=suspicion) == [first, second]
