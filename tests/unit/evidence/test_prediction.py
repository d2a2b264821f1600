"""Errors predicted by a backward pass: against exact algebra, against emulation, and where no gradient tells."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx.parser
import pytest
from numpy.typing import NDArray

import amp_rewrite
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import GradientError
from amp_rewrite.evidence.instrument.switchable import switchable_model
from amp_rewrite.evidence.metric import MEASURES, MetricBound, criterion
from amp_rewrite.evidence.prediction.prediction import PredictedErrors, PredictedModel, predict
from amp_rewrite.evidence.prediction.probes import Outputs, worst_of
from amp_rewrite.evidence.prediction.profile import _shrunk, _squares
from amp_rewrite.evidence.prediction.shares import Share, Shares, _share
from amp_rewrite.evidence.prediction.single_op_runs import LowOps, SingleOpRuns
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import OpId, View
from amp_rewrite.rewrite.autodiff.vjp.paths import STOP
from suites.models.test_fixtures import batch, source
from support.paths import ROOT

Array = NDArray[Any]


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator of each test's own, so that no test depends on those before it."""
    return np.random.default_rng(3)


def view_of(body: str, signature: str, weights: Mapping[str, Array] | None = None, opset: int = 20) -> View:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> g {signature} {{ {body} }}')
    arrays = (weights or {}).items()
    model.graph.initializer.extend(onnx.numpy_helper.from_array(w.astype(np.float32), n) for n, w in arrays)
    return View.of(Model(model))


def predicted(
    view: View, x: Array, *, alone: bool = True, to: DType = DType.FLOAT16
) -> tuple[PredictedErrors, SingleOpRuns]:
    may = frozenset((op.id, v.name) for op in view.ops for v in view.variables[op.id] if v.type and v.type.dtype)
    twin = switchable_model(view, may, to)
    assert twin is not None
    runs = SingleOpRuns(twin)
    fed = {"x": x.astype(np.float32)}
    return predict(PredictedModel(view, may, to), [(fed, runs.reference(fed))], runs if alone else None), runs


def measured(found: PredictedErrors, runs: SingleOpRuns, op: int, x: Array) -> float:
    return found.error(found.outputs[0].energies(runs(OpId(op), {"x": x.astype(np.float32)})))


@pytest.mark.parametrize("to", [DType.FLOAT16, DType.BFLOAT16], ids=lambda to: to.spelling)
def test_each_op_of_a_small_network_is_predicted_within_a_third(to: DType, rng: np.random.Generator) -> None:
    weights = {"w": rng.standard_normal((24, 32)) / 5, "v": rng.standard_normal((32, 16)) / 5}
    body = "a = MatMul (x, w) b = Tanh (a) c = MatMul (b, v) y = Softmax (c)"
    x = rng.standard_normal((40, 24))
    view = view_of(body, "(float[N,24] x) => (float[N,16] y)", weights)
    found, runs = predicted(view, x, to=to)
    for op in range(4):
        ratio = found.error(found.alone(OpId(op))) / measured(found, runs, op, x)
        assert 0.75 < ratio < 1.33, view.ops[op].name


def test_an_output_of_one_element_is_predicted_by_its_exact_derivative() -> None:
    weights = {"w": np.full((64, 1), 1 / 3)}
    view = view_of("a = MatMul (x, w) y = ReduceSum <keepdims = 1> (a)", "(float[8,64] x) => (float[1,1] y)", weights)
    x = np.full((8, 64), 1 / 3)  # every rounding error is the same: they add up, as no sum of squares tells
    found, runs = predicted(view, x)
    assert found.error(found.alone(OpId(0))) == pytest.approx(measured(found, runs, 0, x), rel=0.1)


def test_a_sum_with_zero_has_nothing_left_to_round(rng: np.random.Generator) -> None:
    view = view_of("y = Add (x, zero)", "(float[N,16] x) => (float[N,16] y)", {"zero": np.zeros(16)})
    x = rng.standard_normal((50, 16))
    found, runs = predicted(view, x)
    assert found.error(found.alone(OpId(0))) == pytest.approx(measured(found, runs, 0, x), rel=0.1)


def test_a_value_between_two_low_ops_is_rounded_once(rng: np.random.Generator) -> None:
    view = view_of("a = Exp (x) y = Neg (a)", "(float[N,16] x) => (float[N,16] y)")
    found, _ = predicted(view, rng.standard_normal((50, 16)))
    both = found.error(found.under(LowOps((OpId(0), OpId(1)))))
    assert both == pytest.approx(found.error(found.under(LowOps((OpId(0),)))), rel=1e-6)


def test_a_gradient_that_training_stops_hides_no_error(rng: np.random.Generator) -> None:
    body, x, errors = "a = Exp (x) b = Identity (a) y = Neg (b)", rng.standard_normal((50, 16)), []
    for stopped in (False, True):
        view = view_of(body, "(float[N,16] x) => (float[N,16] y)")
        if stopped:
            view.model.proto.graph.node[1].metadata_props.add(key=STOP, value="")
            view = View.of(view.model)
        found, _ = predicted(view, x)
        errors.append(found.error(found.alone(OpId(0))))
    assert errors[0] == errors[1] > 0


def test_an_overflow_is_infinite_and_fails_every_criterion() -> None:
    view = view_of("a = Mul (x, big) y = Mul (a, small)", "(float[N,4] x) => (float[N,4] y)",
                   {"big": np.full(4, 3e4), "small": np.full(4, 1e-4)})  # fmt: skip
    found, _ = predicted(view, np.full((3, 4), 5.0))
    energies = found.alone(OpId(0))
    assert found.error(energies) == math.inf
    assert found.worst_case(OpId(0)) == math.inf
    by = criterion(tolerance=1e3)
    assert not by.passes(found.score(energies, by))


def test_what_underflows_counts_with_all_of_its_value(rng: np.random.Generator) -> None:
    view = view_of("a = Mul (x, tiny) y = Mul (a, big)", "(float[N,8] x) => (float[N,8] y)",
                   {"tiny": np.full(8, 2.0**-20), "big": np.full(8, 2.0**15)})  # fmt: skip
    found, _ = predicted(view, rng.uniform(2.0**-7, 2.0**-6, (30, 8)))  # the product is below half of 2**-24
    assert found.error(found.alone(OpId(0))) == pytest.approx(1.0, rel=0.1)


def test_ops_that_only_steps_join_to_the_output_are_measured_instead(rng: np.random.Generator) -> None:
    body = "a = Exp (x) t = Greater (a, one) y = Where (t, x, a)"
    view = view_of(body, "(float[N,8] x) => (float[N,8] y)", {"one": np.ones(1)})
    found, runs = predicted(view, x := rng.standard_normal((20, 8)))
    (op,) = found.reasons
    assert view.ops[op].kind == "Greater" and "steps" in found.reasons[op]
    assert found.error(found.alone(op)) == measured(found, runs, op, x)


def test_every_op_before_rounded_outputs_is_measured_or_refused(rng: np.random.Generator) -> None:
    weights = {"w": rng.standard_normal((24, 16)) * 50}
    body = "a = MatMul (x, w) b = Tanh (a) c = Mul (b, a) y = Round (c)"
    view = view_of(body, "(float[N,24] x) => (float[N,16] y)", weights)
    x = rng.standard_normal((40, 24))
    found, runs = predicted(view, x)
    assert set(found.measured) == {0, 1, 2, 3}
    assert found.error(found.alone(OpId(2))) == measured(found, runs, 2, x) > 0
    may = frozenset((op.id, v.name) for op in view.ops for v in view.variables[op.id])
    fed = {"x": x.astype(np.float32)}
    with pytest.raises(GradientError, match="Round"):
        predict(PredictedModel(view, may, DType.FLOAT16), [(fed, runs.reference(fed))], runs, search=True)


def test_an_op_without_a_gradient_rule_is_named_and_unknown_without_a_run(rng: np.random.Generator) -> None:
    body = "a = Exp (x) b = Det (a) y = Sin (b)"
    view = view_of(body, "(float[N,4,4] x) => (float[N] y)")
    x = rng.standard_normal((6, 4, 4))
    found, runs = predicted(view, x)
    assert {view.ops[op].kind for op in found.reasons} >= {"Exp", "Det"}
    assert "Det" in found.reasons[OpId(0)]
    assert found.error(found.alone(OpId(0))) == pytest.approx(measured(found, runs, 0, x))
    without, _ = predicted(view, x, alone=False)
    assert math.isnan(without.error(without.alone(OpId(0))))
    assert math.isnan(without.score(without.under(LowOps((OpId(0),))), criterion(tolerance=1.0)))


@pytest.mark.parametrize(
    ("asked", "within"),  # a predicted square has a standard deviation of a seventh: three of them
    [({"tolerance": 1.0}, 0.6), ({"rtol": 1e-2, "atol": 1e-3}, 0.6), ({"metric": "cosine", "at_least": 0.5}, 0.4),
     ({"metric": "snr", "at_least": 20.0}, 0.05), ({"metric": "psnr", "at_least": 20.0}, 0.05)],
)  # fmt: skip
def test_scores_of_all_measures_are_near_those_of_the_emulated_model(
    asked: dict[str, Any], within: float, rng: np.random.Generator
) -> None:
    by = criterion(**asked)
    weights = {"w": rng.standard_normal((24, 32)) / 5, "v": rng.standard_normal((32, 64)) / 5}
    view = view_of("a = MatMul (x, w) b = Tanh (a) y = MatMul (b, v)", "(float[N,24] x) => (float[N,64] y)", weights)
    x = rng.standard_normal((40, 24)).astype(np.float32)
    found, runs = predicted(view, x)
    low = LowOps((OpId(0), OpId(1), OpId(2)))
    results = runs._run(low.ops, {"x": x})["y"].astype(np.float64)
    exact = found.outputs[0].values["y"].astype(np.float64)
    real, expected = by.score(exact, results, np.isfinite(exact)), found.score(found.under(low), by)
    if asked.get("metric") == "cosine":
        real, expected = 1 - real, 1 - expected
    assert expected == pytest.approx(real, rel=within)


def test_the_largest_error_follows_rows_and_columns_that_carry_most_of_it(rng: np.random.Generator) -> None:
    rows, columns = np.exp(np.linspace(-4, 4, 64))[:, None], np.exp(np.linspace(-2, 2, 16))
    view = view_of(
        "y = MatMul (x, w)", "(float[N,24] x) => (float[N,16] y)", {"w": rng.standard_normal((24, 16)) * columns}
    )
    x = rng.permutation(rng.standard_normal((64, 24)) * rows)
    by = MetricBound(MEASURES["scaled"], 1.0)
    ratios = []
    for alone in (True, False):
        found, runs = predicted(view, x, alone=alone)
        (exact,) = found.outputs[0].values.values()
        (low,) = runs(OpId(0), {"x": x.astype(np.float32)}).values()
        largest = float(np.abs(low - exact).max() / np.abs(exact).max())
        ratios.append(found.score(found.alone(OpId(0)), by) / largest)
    assert 1 / 1.5 < ratios[0] < 1.5
    assert ratios[1] < ratios[0]


def test_a_model_without_floating_outputs_is_refused_with_the_reason() -> None:
    view = view_of("y = ArgMax <axis = 1> (x)", "(float[N,4] x) => (int64[N,1] y)")
    with pytest.raises(GradientError, match="no floating output"):
        predict(
            PredictedModel(view, (), DType.FLOAT16),
            [({"x": np.ones((2, 4), np.float32)}, {"y": np.ones((2, 1), np.int64)})],
        )


def test_locate_predicts_the_error_of_a_converted_model() -> None:
    name = "bert_dynamo23"
    low = amp_rewrite.convert(source(name)).model
    located = amp_rewrite.locate(source(name), low, batch(name, "input"), predict=True)
    shares = located.shares
    assert shares is not None
    assert shares.error == pytest.approx(shares.measured, rel=0.3)
    assert sum(row.share for row in shares.rows) == pytest.approx(1.0, rel=0.3)
    assert all(row.worst >= row.error for row in shares.rows if row.by == "gradient")
    assert "predicted error of the outputs" in located.text()
    assert [figure.name for figure in located.figures()] == ["errors", "effects"]
    given = json.loads(located.to_json())
    schema = json.loads((ROOT / "docs" / "reference" / "locate.schema.json").read_text("utf-8"))
    pytest.importorskip("jsonschema").validate(given, schema)
    assert len(given["shares"]["rows"]) == len(shares.rows)


def test_the_expected_worst_score_is_unknown_without_outputs_or_finite_errors() -> None:
    outputs, by = [Outputs.of(0, {"y": np.ones((2, 3), np.float32)}, 2)], criterion(tolerance=1e-2)
    assert [math.isnan(worst_of(*asked, by)) for asked in (([], np.zeros(0)), (outputs, np.array([0.0, np.inf])))] == [
        True,
        True,
    ]
    assert worst_of(outputs, np.zeros(2), by) == 0 < worst_of(outputs, np.full(2, 1e-6), by) < 0.1


@pytest.mark.parametrize(("whole", "share"), [(4.0, 0.25), (0.0, math.nan), (math.inf, math.nan), (math.nan, math.nan)])
def test_a_share_needs_a_finite_error_of_the_whole(whole: float, share: float, rng: np.random.Generator) -> None:
    view = view_of("y = Exp (x)", "(float[N,4] x) => (float[N,4] y)")
    found, _ = predicted(view, rng.standard_normal((3, 4)))
    assert _share(found, OpId(0), 1.0, whole).share == pytest.approx(share, nan_ok=True)


def test_shares_are_a_table_of_the_largest() -> None:
    rows = (
        Share("a", "Exp", 0.1, 0.2, 0.25, "gradient"),
        Share("b", "Det", 0.3, math.nan, 0.7516, "measured", "no rule"),
        Share("c", "Add", math.nan, math.nan, math.nan, "unknown", "no rule"),
        Share("d", "Mul", 0.001, 0.002, 0.0001, "gradient"),
    )
    found = Shares(rows, 0.5, math.nan, ("y",), 4, ("a note",))
    assert list(found.lines(3)) == [
        "predicted error of the outputs 0.5, measured -",
        "  op  type  share  error  worst case",
        "  c   Add       -      -           -  unknown",
        "  b   Det    75 %    0.3           -  measured",
        "  a   Exp    25 %    0.1         0.2",
        "note: a note",
    ]


@pytest.mark.parametrize("elements", [1, 12, 10_000])
def test_squares_of_few_elements_are_drawn_towards_the_mean_of_all(elements: int) -> None:
    squares = np.repeat([[1.0], [4.0], [7.0]], elements, axis=1)
    low, middle, high = _shrunk(squares, 1)[:, 0]
    assert middle == pytest.approx(4.0) and high - middle == pytest.approx(middle - low)
    assert (high - middle) / 3 == pytest.approx(elements / (elements + 12))
    assert _shrunk(squares, 0).shape == (1, elements)


def test_squares_of_errors_are_by_row_and_unknown_for_other_shapes_and_overflow() -> None:
    values = {name: np.array([[1.0, 2.0], [3.0, np.inf]], np.float32) for name in ("y", "short", "over")}
    low = {"y": np.array([[1.5, 2.0], [1.0, 9.0]], np.float16), "short": np.zeros(4, np.float16)}
    low["over"] = np.array([[np.inf, 2.0], [3.0, 4.0]], np.float16)
    found = {name: rows.tolist() for name, rows in _squares(values, low).items()}
    assert found == {"y": [[0.25, 0.0], [4.0, 0.0]]}
