"""Judges, isolation and page report faults."""

import os
import time
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np
import pytest
from onnx import helper, parser

from amp_rewrite.dtypes import DType
from amp_rewrite.files.protos import clone
from amp_rewrite.pipeline.conversion import Converted
from suites.conformance import trial
from suites.conformance.case import Case
from suites.conformance.judge import DEEP_ENOUGH, bound, objection, unlike
from suites.conformance.page import page, score
from suites.conformance.trial import MODES, Ground, Outcome
from suites.conformance.worker import TRIAL_LIMIT, Results, Worker

EPS = DType.FLOAT16.eps
ONE = np.float32([1.0, -2.0, 0.5])
NAN, INF = np.float32(np.nan), np.float32(np.inf)


# -- outputs -----------------------------------------------------------------------------------------

WIDE = np.float32([INF, -INF, NAN, 1.0])
RIGHT: list[tuple[object, object, float, int]] = [
    ([ONE + np.float32(2 * EPS)], [ONE], EPS, 0),
    ([WIDE.copy()], [WIDE], EPS, 0),
    ([np.array([3, 4])], [np.array([3, 4])], 1.0, 0),
    ([np.uint8([0, 255])], [np.uint8([1, 254])], 0.0, 1),
    ([[ONE, ONE]], [[ONE, ONE]], EPS, 0),
]
WRONG: list[tuple[object, object, float, int]] = [
    ([ONE + np.float32(2.1 * EPS)], [ONE], EPS, 0),
    *(([np.where(np.arange(4) == at, other, WIDE)], [WIDE], 1.0, 0) for at, other in enumerate((-INF, 1.0, 0.0, INF))),
    *(([other], [ONE], 0.01, 0) for other in (-ONE, ONE[:2], ONE.reshape(1, 3), ONE.astype(np.float16), [ONE], None)),
    ([], [ONE], 1.0, 0),
    ([ONE, ONE], [ONE], 1.0, 0),
    ([np.full(3, NAN)], [ONE], 1e9, 0),
    ([np.array([3, 5])], [np.array([3, 4])], 1.0, 0),
    ([np.array([True])], [np.array([False])], 1.0, 0),
    ([np.array(["a"], object)], [np.array(["b"], object)], 1.0, 0),
    ([np.uint8([255])], [np.uint8([0])], 0.0, 1),
    ([[ONE, -ONE]], [[ONE, ONE]], EPS, 0),
    ([[ONE]], [[ONE, ONE]], EPS, 0),
]


def test_outputs_agree_only_up_to_the_bound() -> None:
    assert [case for case in RIGHT if objection(*case[:3], quantum=case[3]) is not None] == []  # type: ignore[arg-type]
    assert [case for case in WRONG if objection(*case[:3], quantum=case[3]) is None] == []  # type: ignore[arg-type]


def test_the_bound_grows_with_the_square_root_of_the_roundings_up_to_a_limit() -> None:
    assert [bound(DType.FLOAT16, n) / EPS for n in (0, 1, 4, 10_000)] == [1.0, 2.0, 3.0, DEEP_ENOUGH]
    assert bound(DType.BFLOAT16, 1) == 2 * DType.BFLOAT16.eps


def test_random_results_must_agree_in_their_share_of_zeros_and_in_size() -> None:
    rng = np.random.default_rng(0)

    def dropped(ratio: float, scale: float) -> np.ndarray:
        return ((rng.random(2000) >= ratio) * scale).astype(np.float32)

    assert unlike([dropped(0.5, 2.0)], [dropped(0.5, 2.0)]) is None
    for wrong in (dropped(0.25, 2.0), dropped(0.5, 1.0), np.zeros(2000, np.float32), dropped(0.5, 2.0).reshape(2, -1)):
        assert unlike([wrong], [dropped(0.5, 2.0)]) is not None
    assert unlike([np.full(2000, NAN)], [dropped(0.0, 2.0)]) is not None


# -- trials ------------------------------------------------------------------------------------------

MATMUL = """<ir_version: 10, opset_import: ["" : 20]>
g (float[2,4] x) => (float[2,2] y) <float[4,2] w = {1, -2, 3, 0.5, 0.25, 7, -1, 1}>
{ h = MatMul(x, w)  y = Relu(h) }"""
CASE = Case("node", "made_here", helper)  # type: ignore[arg-type]
FORCED = MODES["unsafe-force-all to float16"]


def trial_of(monkeypatch: pytest.MonkeyPatch, text: str, feed: np.ndarray, expected: np.ndarray) -> Outcome:
    """Try a model, forced to float16."""
    model = parser.parse_model(text)
    monkeypatch.setattr(Case, "original", property(lambda _: model))
    monkeypatch.setattr(Case, "samples", property(lambda _: (([feed], [expected]),)))
    monkeypatch.setattr(trial, "cases", lambda: {"made": CASE})
    trial._baseline.cache_clear()
    trial._ranges.cache_clear()
    try:
        return trial.attempt("made", FORCED)
    finally:
        trial._baseline.cache_clear()


X = np.float32([[1, 2, 3, 4], [-4, 3, -2, 1]])
Y = np.maximum(X @ np.float32([[1, -2], [3, 0.5], [0.25, 7], [-1, 1]]), 0)


def test_a_correct_conversion_is_judged_right_against_expected_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = trial_of(monkeypatch, MATMUL, X, Y)
    assert (found.verdict, found.how) == ("right", "expected")


def test_another_operator_in_the_converted_model_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, lambda m: setattr(m.graph.node[-2], "op_type", "Neg"))
    assert trial_of(monkeypatch, MATMUL, X, Y).verdict == "wrong"


def test_a_model_that_fails_the_checker_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, lambda m: m.graph.node.pop(0))
    assert trial_of(monkeypatch, MATMUL, X, Y).verdict == "check"


def spoil(monkeypatch: pytest.MonkeyPatch, change: object) -> None:
    """Change the model after every conversion."""
    convert = trial._converted

    def spoiled(*arguments: object) -> Converted:
        found = convert(*arguments)  # type: ignore[arg-type]
        model = clone(found.result.proto)
        change(model)  # type: ignore[operator]
        return replace(found, result=replace(found.result, proto=model))

    monkeypatch.setattr(trial, "_converted", spoiled)


def test_an_overflowing_model_is_right_only_with_data(monkeypatch: pytest.MonkeyPatch) -> None:
    for scale, values in ((1e4, 2), (2e4, 3)):  # 80 000 is an input
        found = trial_of(monkeypatch, MATMUL, X * np.float32(scale), Y * np.float32(scale))
        assert (found.verdict, found.note) == ("data", f"{values} values beyond 65504, the largest above 1e5")


# -- isolation ---------------------------------------------------------------------------------------


def misbehave(connection: Connection, file: str) -> None:
    """Replace the process of trials; the mode selects its behavior."""
    connection.send((("a",), ("a",)))
    while (request := connection.recv()) is not None:
        key, mode = request
        if mode == "die":
            os._exit(7)
        if mode == "sleep":
            time.sleep(60)
        connection.send(Outcome(key, mode, "right"))


def test_a_crash_and_a_hang_cost_one_trial_each() -> None:
    worker, verdicts = Worker(misbehave), []
    try:
        for mode in ("well", "die", "well", "sleep", "well"):
            worker.limit = 0.0 if mode == "sleep" else TRIAL_LIMIT
            verdicts.append(worker.attempt("a", mode).verdict)
    finally:
        worker.close()
    assert verdicts == ["right", "crash", "right", "hang", "right"]


# -- the page ----------------------------------------------------------------------------------------


def results_with(verdict: str) -> Results:
    results = Results()
    results.add(Ground("node/a", "counted"), [Outcome("node/a", mode, "right", "expected") for mode in MODES])
    results.add(Ground("node/b", "counted"), [Outcome("node/b", mode, verdict, note="so\nso") for mode in MODES])
    results.add(Ground("node/c", "refused"), [Outcome("node/c", mode, "right", "valid") for mode in MODES])
    return results


def test_the_page_lists_wrong_models_and_those_that_data_corrects() -> None:
    line = next(line for line in score(results_with("hang")).splitlines() if "default to float16" in line)
    assert [cell.strip() for cell in line.strip("|").split("|")[1:]] == ["2", "1", "0", "1", "1", "1 of 1"]
    wrong, right = (page(results_with(verdict)) for verdict in ("wrong", "right"))
    assert wrong.split("## Failures")[1].split("##")[0].strip() == "- `node/b`: every mode (wrong: so so)"
    assert right.split("## Failures")[1].split("##")[0].strip() == "None."
    assert "### data" not in right
    assert "- `node/b`: every mode (data: so so)" in page(results_with("data")).split("### data")[1]
