"""Comparing two arrays: every number against one worked out by hand, and everything that must never be near enough."""

import math

import numpy as np
import pytest

from amp_rewrite.errors import PolicyError
from amp_rewrite.evidence.metric import MEASURES, compare, criterion
from amp_rewrite.reports.evidence import ALLCLOSE, Criterion, Difference

ANY = Criterion(ALLCLOSE, rtol=1e9, atol=1e9)
INF, NAN = np.float32(np.inf), np.float32(np.nan)


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


# -- tolerance -----------------------------------------------------------------------------------------


def test_a_tolerance_is_numpys_allclose_and_shows_the_element_that_decides() -> None:
    a, b = f32(100, -1, 0), f32(101, -1.5, 0.25)
    found = compare(a, b, Criterion(ALLCLOSE, rtol=0.25, atol=0.5))
    # Errors 1, 0.5, 0.25 against 25.5, 0.75, 0.5: the second has used two thirds of what it may.
    assert found == Difference(
        elements=3,
        ok=True,
        because="error in units of the allowed one 0.6667, at most 1 required",
        compared=3,
        max_abs=1.0,
        scaled=0.01,
        score=0.5 / 0.75,
        where=(1,),
        reference="-1",
        candidate="-1.5",
    )


# -- what is never ok ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "because"),
    [
        (f32(1, 2), f32(1, NAN), "1 of 2 values are NaN or infinite where the reference is finite"),
        (f32(1, 2), f32(1, INF), "1 of 2 values are NaN or infinite where the reference is finite"),
        (f32(1, INF), f32(1, 3e38), "1 of 2 values are not finite, and differ"),
        (f32(INF), f32(-INF), "1 of 1 values are not finite, and differ"),
        (f32(NAN, 1), f32(NAN, 1), "1 of 2 values are NaN on both sides, which shows nothing"),
        (f32(NAN), f32(INF), "1 of 1 values are not finite, and differ"),
        (np.zeros((2, 3)), np.zeros((3, 2)), "the shape is [2, 3] in the reference and [3, 2] here"),
        (np.zeros(1), np.zeros(()), "the shape is [1] in the reference and [] here"),
        (f32(1), np.array([1]), "the element type is float32 in the reference and int64 here"),
        (np.array([True]), np.array([1]), "the element type is bool in the reference and int64 here"),
        (np.array(["1"], object), np.array([1]), "the element type is string in the reference and int64 here"),
        (np.array([1, 2, 3]), np.array([1, 2, 4]), "1 of 3 values differ, and integer values must be equal"),
        (np.array([True]), np.array([False]), "1 of 1 values differ, and bool values must be equal"),
        (
            np.array(["a", "b"], object),
            np.array(["a", "c"], object),
            "1 of 2 values differ, and string values must be equal",
        ),
    ],
)
def test_no_tolerance_however_wide_admits(a: np.ndarray, b: np.ndarray, because: str) -> None:
    found = compare(a, b, ANY)
    assert (found.ok, found.because) == (False, because)


@pytest.mark.parametrize("name", sorted(MEASURES))
def test_no_metric_admits_nan_on_both_sides(name: str) -> None:
    worst = -math.inf if (name != "scaled") else math.inf
    by = Criterion(name, worst)
    assert compare(f32(1, 2), f32(1, 2), by).ok
    assert not compare(f32(NAN, 2), f32(NAN, 2), by).ok


# -- what is ok, and said ------------------------------------------------------------------------------


def test_nan_on_both_sides_is_ok_only_if_it_is_asked_for() -> None:
    a = f32(1, NAN)
    assert compare(a, a, ANY, equal_nan=True).ok
    assert not compare(a, f32(NAN, 1), ANY, equal_nan=True).ok


def test_a_complex_number_counts_as_two() -> None:
    found = compare(np.array([1 + 2j]), np.array([1 + 2.5j]), Criterion(ALLCLOSE, atol=0.4))
    assert (found.ok, found.compared, found.where, found.max_abs) == (False, 2, (0, 1), 0.5)


# -- measures --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "a", "b", "expected"),
    [
        ("cosine", f32(3, 4), f32(4, 3), 24 / 25),
        ("cosine", f32(1, 0), f32(-1, 0), -1.0),
        ("cosine", f32(0, 0), f32(0, 0), 1.0),
        ("cosine", f32(0, 0), f32(1, 0), 0.0),
        # 10 log10((9 + 16) / 0.25)
        ("snr", f32(3, 4), f32(3, 4.5), 20.0),
        ("snr", f32(3, 4), f32(-3, 4), 10 * math.log10(25 / 36)),
        ("snr", f32(1, 0), f32(0, 0), 0.0),
        ("snr", f32(3, 4), f32(3, 4), math.inf),
        ("snr", f32(0, 0), f32(1, 0), -math.inf),
        ("scaled", f32(1, -4), f32(1.5, -4), 0.125),
        ("scaled", f32(0, 0), f32(0, 0), 0.0),
        ("top1", np.array([[1, 2, 0], [5, 1, 1]], np.float32), np.array([[0, 9, 0], [1, 5, 1]], np.float32), 0.5),
        ("top1", np.array([[-np.inf, 2.0]]), np.array([[-np.inf, 3.0]]), 1.0),
    ],
)
def test_a_measure_is_its_formula(name: str, a: np.ndarray, b: np.ndarray, expected: float) -> None:
    found = compare(a, b, Criterion(name, -math.inf if (name != "scaled") else math.inf))
    assert found.score == pytest.approx(expected, rel=1e-12)  # a few roundings of float64


@pytest.mark.parametrize("size", [1e300, 1e-300])
@pytest.mark.parametrize("name", ["cosine", "snr"])
def test_squares_neither_overflow_nor_vanish(name: str, size: float) -> None:
    a, b = np.array([3.0, 4.0]), np.array([3.0, 4.5])
    function = MEASURES[name].function
    assert function(a * size, b * size) == pytest.approx(function(a, b), rel=1e-12)


@pytest.mark.parametrize("shape", [(), (3, 1), (1,)])
def test_top1_of_one_class_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(PolicyError) as refused:
        compare(np.zeros(shape), np.zeros(shape), criterion(metric="top1=1"))
    assert str(refused.value) == (
        f"top1 needs two classes or more along the last axis, and the shape is {list(shape)}; choose another metric,"
        " or the outputs that hold classes"
    )


# -- criteria --------------------------------------------------------------------------------------------

NONE = (
    "no criterion given, and there is no default; give tolerance=, rtol= and/or atol=, or metric= with its bound;"
    " to start with, a tolerance of 1e-2 for float16, 8e-2 for bfloat16"
)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, NONE),
        ({"rtol": -1.0}, "rtol=-1.0: use a finite number, 0 or more"),
        ({"atol": math.nan}, "atol=nan: use a finite number, 0 or more"),
        ({"tolerance": math.inf}, "tolerance=inf: use a finite number, 0 or more"),
        ({"metric": "snr=1", "rtol": 1.0}, "rtol= and metric= are given; choose one of them"),
        ({"tolerance": 1.0, "rtol": 1.0, "atol": 1}, "tolerance= and rtol= and atol= are given; choose one of them"),
        ({"metric": "cos=1"}, "unknown metric 'cos'; did you mean 'cosine'?"),
        ({"metric": "snr"}, "metric='snr' has no finite number as its bound; write metric='snr=40', say"),
        ({"metric": "snr=high"}, "metric='snr=high' has no finite number as its bound; write metric='snr=40', say"),
        ({"metric": "top1=2"}, "metric='top1=2' has no finite number from 0 to 1 as its bound; write"),
        ({"metric": "scaled=-1"}, "metric='scaled=-1' has no finite number from 0 to inf as its bound; write"),
    ],
)
def test_a_criterion_that_decides_nothing_is_refused(given: dict[str, float], message: str) -> None:
    with pytest.raises(PolicyError) as refused:
        criterion(**given)  # type: ignore[arg-type]
    assert str(refused.value).startswith(message)
