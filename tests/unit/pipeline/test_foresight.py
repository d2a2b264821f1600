"""Repair that starts from the prediction, and the curve of time against error."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

import amp_rewrite
from amp_rewrite.errors import PolicyError
from amp_rewrite.evidence.metric import criterion
from amp_rewrite.evidence.verdict import Verdict
from amp_rewrite.pipeline.draft import Draft
from amp_rewrite.pipeline.foresight import Foresight
from amp_rewrite.pipeline.pareto import FLOAT32, LOW, _Curve
from amp_rewrite.pipeline.regions import Region
from amp_rewrite.settings.request import Request
from suites.models.test_fixtures import batch, source
from support.hard_models import HARD
from support.paths import ROOT


def test_repair_finds_the_op_to_blame_with_two_trials() -> None:
    hard = HARD["offset_norm"]()
    found = amp_rewrite.repair(hard.model, hard.batch, shift="none", rtol=1e-2, atol=1e-2)
    assert found.solved and found.minimal
    assert [region.name for region in found.regions] == ["offset"]
    assert found.trials == 2
    assert "to the outputs" in found.text()


def test_a_tight_tolerance_takes_few_trials() -> None:
    found = amp_rewrite.repair(source("bert_dynamo23"), batch("bert_dynamo23", "input"), tolerance=1e-3)
    assert found.solved and found.regions
    assert found.trials <= 5
    assert found.chosen is not None and found.chosen.float32_ops < 30


def test_trials_that_are_left_go_to_smaller_choices() -> None:
    found = amp_rewrite.repair(source("bert_dynamo20"), batch("bert_dynamo20", "input"), tolerance=1e-3)

    assert found.solved and found.chosen is not None
    passed = [step.float32_ops for step in found.trail if step.ok]
    assert len(passed) > 1 and found.chosen.float32_ops == min(passed) < passed[0]


def test_where_the_real_model_denies_a_choice_the_next_one_that_passed_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = sys.modules["amp_rewrite.pipeline.repair"]  # the name in the package is the function
    real, verdicts = module.verdict_of, []

    def verdict_of(*arguments: Any) -> Verdict:
        verdicts.append(real(*arguments))
        return replace(verdicts[-1], refusals=("denied",)) if len(verdicts) == 2 else verdicts[-1]

    monkeypatch.setattr(module, "verdict_of", verdict_of)
    found = amp_rewrite.repair(source("bert_dynamo20"), batch("bert_dynamo20", "input"), tolerance=1e-3)

    assert found.solved and found.chosen is not None
    assert len(verdicts) == 3 and found.trials <= 5  # the plain model, the choice that is denied, and the next one
    assert found.chosen.float32_ops > min(step.float32_ops for step in found.trail if step.ok)


def test_the_search_takes_over_where_nothing_is_predicted() -> None:
    model, fed = source("bert_dynamo23"), batch("bert_dynamo23", "input")

    def nearest(a: np.ndarray, b: np.ndarray) -> float:  # zero of all noise: no prediction ever meets it
        return float(np.abs(a - b).max())

    found = amp_rewrite.repair(model, fed, metric=nearest, at_most=0.0, budget=6)
    assert not found.solved or found.chosen is not None


@pytest.fixture(scope="module")
def curve() -> amp_rewrite.Pareto:
    return amp_rewrite.pareto(source("bert_dynamo23"), batch("bert_dynamo23", "input"), points=3, placement="mincut:T4")


def test_a_curve_goes_from_the_conversion_to_float32(curve: amp_rewrite.Pareto) -> None:
    kinds = [point.kind for point in curve.points]
    assert kinds[-1] == FLOAT32 and LOW in kinds and len(kinds) <= 5
    times, errors = ([getattr(p, name) for p in curve.points if p.kind != LOW] for name in ("seconds", "error"))
    assert times == sorted(times)
    assert errors == sorted(errors, reverse=True)


ERRORS = [9.0, 8.0, 8.5, 7.0, math.nan, 6.0, 5.0, 4.0, 3.0, 2.0]
"""Predicted errors of choices that take 0, 1, 2 … seconds; float32 takes 8."""


@pytest.mark.parametrize(
    ("errors", "most", "kept"),
    [
        (ERRORS, 20, [0, 1, 3, 5, 6, 7]),
        (ERRORS, 3, [0, 3, 7]),
        (ERRORS, 2, [0, 7]),
        (ERRORS, 1, [0]),
        ([9.0, 0.0], 20, [0]),
    ],
)
def test_choices_of_a_curve_are_those_that_none_beats_from_end_to_end(
    errors: list[float], most: int, kept: list[int]
) -> None:
    choices = [SimpleNamespace(held=frozenset({n}), coloring=n, energies=error) for n, error in enumerate(errors)]
    plain = SimpleNamespace(held=frozenset(), coloring=-1, energies=10.0)
    foresight: Any = SimpleNamespace(
        painted=lambda held: plain,
        at=lambda price: choices[round(math.log(price, 4)) % len(choices)],
        unit=1.0,
        trade=SimpleNamespace(seconds=float, float32=8.0),
        prediction=SimpleNamespace(error=float),
    )
    curve: Any = _Curve(foresight, (None, None), ())  # type: ignore[arg-type]
    assert [choice.coloring for choice in curve.chosen(most)] == [-1, *kept]
    assert curve.considered == len(choices) + 1


@pytest.mark.parametrize(("limit", "held"), [(51.0, []), (30.0, [1]), (17.0, [1, 2]), (1.0, [0, 1, 2]), (0.0, None)])
def test_regions_are_held_in_order_of_their_effect_for_each_op(limit: float, held: list[int] | None) -> None:
    """Effects of 16/8, 25/2 and 9/1 for each op."""
    errors = (4.0, 5.0, 3.0)
    regions = [Region("", "", tuple(range(ops)), error, False) for ops, error in zip((8, 2, 1), errors, strict=True)]

    def painted(which: Any) -> Any:
        rest = sum(error**2 for i, error in enumerate(errors) if i not in which)
        return SimpleNamespace(held=list(which), energies=1.0 + rest)

    foresight: Any = SimpleNamespace(
        regions=regions, painted=painted, prediction=SimpleNamespace(score=lambda energies, by: energies)
    )
    foresight._effect_per_op = partial(Foresight._effect_per_op, foresight)
    by: Any = SimpleNamespace(passes=lambda score: score <= limit)
    chosen: Any = Foresight._ranked(foresight, by, 1.0)
    assert (chosen and sorted(chosen.held)) == held


def test_every_point_of_a_curve_is_verified(curve: amp_rewrite.Pareto) -> None:
    for point in curve.points:
        assert point.measured_error == pytest.approx(point.error, rel=0.5)
    assert curve.points[-1].measured_error == 0.0


def test_a_point_of_a_curve_is_a_conversion(curve: amp_rewrite.Pareto) -> None:
    number = next(i for i, point in enumerate(curve.points) if point.kind == "between")
    made = curve.converted(number)
    assert made.coloring.float32_ops == curve.points[number].float32_ops
    with pytest.raises(PolicyError, match="float32"):
        curve.converted(len(curve.points) - 1)


def test_a_curve_is_a_table_a_picture_and_json_of_its_schema(curve: amp_rewrite.Pareto) -> None:
    assert "float32 ops" in curve.text()
    assert [figure.name for figure in curve.figures()] == ["pareto"]
    assert "<svg" in curve.to_html()
    schema = json.loads((ROOT / "docs" / "reference" / "pareto.schema.json").read_text("utf-8"))
    pytest.importorskip("jsonschema").validate(json.loads(curve.to_json()), schema)


def test_a_half_model_has_the_curve_of_its_float32_twin() -> None:
    half = amp_rewrite.convert(source("bert_dynamo23"), io="low").model
    fed = batch("bert_dynamo23", "input")
    curve = amp_rewrite.pareto(half, fed, points=2)
    assert any("half already" in note for note in curve.notes)
    number = next(i for i, point in enumerate(curve.points) if point.kind == LOW)
    made = curve.converted(number).model
    ends = [{port.name: port.type for port in (*graph.input, *graph.output)} for graph in (half.graph, made.graph)]
    assert ends[0] == ends[1]
    assert any(type_.tensor_type.elem_type == TensorProto.FLOAT16 for type_ in ends[0].values())
    assert curve.points[number].measured_error > curve.points[-1].measured_error == 0.0
    twin = amp_rewrite.emulate(half, rounding=False, io="float32")
    assert amp_rewrite.verify(twin, made, fed, tolerance=1e-2, emulate=True)


@pytest.mark.parametrize(
    ("score", "predicted", "factor"),
    [
        (1.5, 1.0, 1.5),
        (0.75, 1.0, 0.75),
        (100.0, 1.0, 32.0),
        (1.0, 1.0, 1.0),
        (None, 1.0, 1.0),
        (np.inf, 1.0, 1.0),
        (2.0, np.nan, 1.0),
    ],
)
def test_a_measured_error_says_how_much_larger_errors_are_than_predicted(
    score: float | None, predicted: float, factor: float
) -> None:
    prediction = SimpleNamespace(score=lambda energies, by: predicted * energies**0.5)
    foresight: Any = SimpleNamespace(prediction=prediction)
    choice: Any = SimpleNamespace(energies=1.0)
    found = Foresight.factor(foresight, choice, score, criterion(tolerance=1e-2))
    assert factor <= found <= 1.03 * factor


@pytest.mark.parametrize("factor", [1.0, 2.0])
@pytest.mark.parametrize("least", [-10.0, -9.4, 0.3, 7.9, 15.99, 16.5])
def test_the_cheapest_choice_is_that_of_the_lowest_price_that_meets_a_criterion(least: float, factor: float) -> None:
    """Of energies that fall as the price rises."""
    priced: list[float] = []

    def at(price: float) -> Any:
        priced.append(math.log(price / 3.0, 4.0))
        return SimpleNamespace(energies=np.array(-priced[-1]), exponent=priced[-1])

    prediction = SimpleNamespace(score=lambda energies, by: float(energies / factor**2))
    fake: Any = SimpleNamespace(unit=3.0, at=at, prediction=prediction)
    by: Any = SimpleNamespace(passes=lambda score: score <= -least + 1e-9)
    found: Any = Foresight.cheapest(fake, by, factor)
    if least > 16:
        assert found is None
    else:
        assert 0 <= found.exponent - least + 1e-6 < 0.25 and len(priced) <= 10


@pytest.mark.parametrize("placement", ["auto", "mincut:T4"])
@pytest.mark.parametrize("islands", [False, True])
@pytest.mark.parametrize("twin", [None, ("board", "runner")])
def test_a_prediction_searches_and_runs_ops_alone_if_there_is_a_twin(
    twin: Any, islands: bool, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    module = "amp_rewrite.evidence.prediction"
    monkeypatch.setattr(f"{module}.prediction.predict", lambda *given, **words: asked.append((*given, words)))
    monkeypatch.setattr(f"{module}.single_op_runs.SingleOpRuns", lambda *parts: parts)
    draft = Draft.of(source("cnn_ts13"), Request.of(placement=placement))
    base = draft.paint(())
    made = Foresight.of(draft, (), base, [], twin, islands=islands)
    assert made is not None and made.islands is (islands or draft.request.placement.islands)
    ((model, batches, alone, words),) = asked
    assert (model.view, batches, alone, words) == (draft.view, [], twin, {"search": True})
