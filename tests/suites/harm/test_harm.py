"""A conversion is never worse than the references, which only round operands and results of products."""

from typing import Any

import ml_dtypes
import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto

from amp_rewrite.dtypes import DType
from suites.harm.case import CASES, HIT, Case, errors, every, lowered
from support import objections
from support.rounded_products import relative_error, rounded_products


@every(CASES)
def test_results_are_within_tolerance_wherever_the_reference_is(case: Case) -> None:
    found = errors(case)
    if case.kind == HIT or found.results <= case.limit or found.operands <= case.limit:
        assert found.ours <= case.limit, found


@every(CASES)
def test_exactly_the_permitted_ops_are_lowered(case: Case) -> None:
    low = lowered(case)
    assert set(case.lowers.split()) <= low
    assert low.isdisjoint(case.stays.split())


# -- the references ---------------------------------------------------------------------------------------

X, W = (np.random.default_rng(seed).standard_normal((4, 4)).astype(np.float32) for seed in (0, 1))
FEEDS = {"x": X, "w": W}
KINDS = {DType.FLOAT16: np.float16, DType.BFLOAT16: ml_dtypes.bfloat16}
HEAD = '<ir_version: 8, opset_import: ["": 17, "own": 1]>'
PLAIN = "{HEAD} g (float[4,4] x, float[4,4] w) => (float[4,4] y) {{ a = Exp (x)  y = MatMul (a, w) }}"
BODY = """{HEAD} g (float[4,4] x, float[4,4] w, bool c) => (float[4,4] y) {{ a = Exp (x)
    y = If (c) <then_branch = t () => (float[4,4] p) {{ p = MatMul (a, w) }},
                else_branch = e () => (float[4,4] q) {{ q = Identity (a) }}> }}"""
FUNCTION = """{HEAD} g (float[4,4] x, float[4,4] w) => (float[4,4] y) {{ y = own.F (x, w) }}
    <domain: "own", opset_import: ["": 17]> F (u, v) => (r) {{ a = Exp (u)  r = MatMul (a, v) }}"""


def model(text: str) -> ModelProto:
    return onnx.parser.parse_model(text.format(HEAD=HEAD))


def rounded(array: Any, to: DType) -> Any:
    return array.astype(KINDS[to]).astype(np.float32)


@pytest.mark.parametrize("text", [PLAIN, BODY, FUNCTION], ids=["plain", "body", "function"])
@pytest.mark.parametrize("to", KINDS)
def test_operands_are_rounded_and_results_on_request(to: DType, text: str) -> None:
    source = model(text)
    feeds = {**FEEDS, **({"c": np.array(True)} if text is BODY else {})}
    exact = rounded(np.exp(X), to) @ rounded(W, to)
    for results, expected in ((False, exact), (True, rounded(exact, to))):
        (found,) = objections.run(rounded_products(source, to, results=results), feeds, "BASIC")
        # Float32 sums of four terms depend on their order; near a tie a rounded result may differ by one step.
        np.testing.assert_allclose(found, expected, rtol=float(to.eps) if results else 1e-5, atol=1e-6)
    assert np.abs(exact - np.exp(X) @ W).max() > 1e-4


@pytest.mark.parametrize(
    ("exact", "result", "error"),
    [
        ([1.0, -4.0], [1.0, -4.0], 0.0),
        ([1.0, -4.0], [1.5, -4.0], 0.125),
        ([np.inf, 1.0], [np.inf, 1.0], 0.0),
        ([np.inf, 1.0], [9.0, 1.0], np.inf),
        ([1.0, 1.0], [np.nan, 1.0], np.inf),
        ([np.nan, 1.0], [np.nan, 1.0], 0.0),
        ([3, 4], [3, 5], np.inf),
        ([True], [False], np.inf),
        ([], [], 0.0),
    ],
)
def test_an_error_is_relative_to_the_largest_number(exact: list[Any], result: list[Any], error: float) -> None:
    assert relative_error([np.array(exact)], [np.array(result)]) == error


@pytest.mark.parametrize("text", [PLAIN, BODY, FUNCTION], ids=["plain", "body", "function"])
@pytest.mark.parametrize("to", KINDS)
def test_random_roundings_differ_and_stay_within_the_rounding_error(to: DType, text: str) -> None:
    source = model(text)
    feeds = {**FEEDS, **({"c": np.array(True)} if text is BODY else {})}
    exact = np.exp(X) @ W
    drawn = [rounded_products(source, to, results=True, draw=draw) for draw in range(3)]
    results = [objections.run(each, feeds, "BASIC")[0] for each in drawn]
    bound = 1.6 * float(to.eps) * (np.exp(X) @ np.abs(W))  # three factors of half an eps each
    assert all((np.abs(found - exact) <= bound).all() for found in results)
    assert len({np.asarray(found).tobytes() for found in results}) == 3
    assert np.array_equal(results[0], objections.run(drawn[0], feeds, "BASIC")[0])
