"""Casting to lower types, and predictions of its effects."""

import ml_dtypes
import numpy as np
import pytest

from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import BLOCK, Fit, cast, scaled

LOW = [DType.FLOAT16, DType.BFLOAT16]
KINDS = [(DType.FLOAT16, np.float32), (DType.FLOAT16, np.float64), (DType.BFLOAT16, np.float32)]


def numbers(to: DType) -> np.ndarray:
    """Return all nonnegative finite numbers of a 16-bit type in order of their codes."""
    with np.errstate(invalid="ignore"):
        every = np.arange(1 << 15, dtype=np.uint16).view(to.numpy).astype(np.float64)
    return every[np.isfinite(every)]


def edges(to: DType) -> np.ndarray:
    """Return float64 values at, between and next to the numbers of a low type, of both signs."""
    finite = numbers(to)
    last = finite[-1] + (finite[-1] - finite[-2]) / 2
    halves = [*((finite[1:] + finite[:-1]) / 2), last, 1e300]
    out = np.concatenate([finite, halves, np.nextafter(halves, 0), np.nextafter(halves, np.inf)])
    return np.concatenate([out, -out])


def nearest(values: np.ndarray, to: DType) -> np.ndarray:
    """Round to nearest even by search among all numbers of the type, and saturate: the definition."""
    known = numbers(to)
    sizes = np.minimum(np.abs(values), known[-1])
    above = np.searchsorted(known, sizes).clip(1)
    low, high = sizes - known[above - 1], known[above] - sizes
    code = np.where((high < low) | ((high == low) & (above % 2 == 0)), above, above - 1).astype(np.uint16)
    return (code | (np.signbit(values).astype(np.uint16) << 15)).view(to.numpy)


@pytest.mark.parametrize(("to", "kind"), KINDS)
def test_every_number_and_every_tie_rounds_to_nearest_even_and_saturates(to, kind):
    with np.errstate(over="ignore"):
        values = edges(to).astype(kind)
    values = values[np.isfinite(values)]
    np.testing.assert_array_equal(cast(values, to).view(np.uint16), nearest(values.astype(float), to).view("u2"))


@pytest.mark.parametrize("to", [*LOW, DType.FLOAT])
def test_infinity_and_nan_stay_and_finite_overflow_saturates(to):
    values = np.array([np.inf, -np.inf, np.nan, 1e300, -1e300])
    found = cast(values, to).astype(np.float64)
    np.testing.assert_array_equal(found, [np.inf, -np.inf, np.nan, to.max, -to.max])


@pytest.mark.parametrize(("to", "kind"), KINDS)
def test_a_fit_counts_the_effects_of_casting(to, kind):
    with np.errstate(over="ignore"):
        values = np.concatenate([edges(to).astype(kind), np.array([np.nan, np.inf, 0], kind)])
    finite = values[np.isfinite(values)]
    low = np.abs(cast(finite, to).astype(np.float64))
    with np.errstate(all="ignore"):
        overflow = (np.abs(finite).astype(float) >= to.max * (1 + to.eps / (2 - to.eps) / 2)).sum()
    expected = Fit(
        count=values.size,
        nonfinite=values.size - finite.size,
        absmax=float(np.abs(finite).max()),
        absmin=float(np.abs(finite[finite != 0]).min()),
        overflow=int(overflow),
        flushed=int(((low == 0) & (finite != 0)).sum()),
        subnormal=int(((low > 0) & (low < to.tiny)).sum()),
    )
    assert Fit.of(np.array_split(values, 7), to) == expected
    assert min(expected.overflow, expected.flushed, expected.subnormal) > 0


@pytest.mark.parametrize("values", [[], [0.0, -0.0], [np.nan, np.inf]])
def test_a_fit_without_finite_nonzero_values_has_no_bounds(values):
    found = Fit.of([np.array(values, np.float32)], DType.FLOAT16)
    bad = sum(not np.isfinite(v) for v in values)
    assert found == Fit(count=len(values), nonfinite=bad)


@pytest.mark.parametrize("exponent", [-120, -3, 0, 5, 120])
def test_scaled_values_are_float32_or_wider_and_wide_ones_are_scaled_in_place(exponent: int) -> None:
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
        values = np.array([1, -3, 0, 640], dtype)
        wide = dtype if values.dtype.itemsize >= 4 else np.float32
        with np.errstate(over="ignore", under="ignore"):
            expected = np.ldexp(np.array([1, -3, 0, 640], np.float64), -exponent).astype(wide)
        result = scaled(values, exponent)
        assert result.dtype == wide and np.shares_memory(result, values) == (wide is dtype)
        np.testing.assert_array_equal(result, expected)


def test_one_block_with_an_overflow_saturates_and_the_others_are_as_before() -> None:
    values = np.linspace(-3, 3, 3 * BLOCK + 5, dtype=np.float32).reshape(1, -1)
    values[0, BLOCK + 7] = 1e6
    values[0, BLOCK + 8] = -np.inf
    found = cast(values, DType.FLOAT16)
    expected = np.clip(values, -65504, 65504).astype(np.float16)
    expected[0, BLOCK + 8] = -np.inf
    assert found.shape == values.shape
    np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))
