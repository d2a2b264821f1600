"""What a shift costs in digits: estimates by counts beside the errors themselves, and powers of two that are exact."""

import numpy as np
import pytest

from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array, Fit
from amp_rewrite.rewrite.shift.plan import MAX_ADDED_ERROR, constant_keeps, is_exact, value_keeps

TO = DType.FLOAT16
NORMAL = np.random.default_rng(0).standard_normal(1 << 14)


def fit_of(array: Array) -> Fit:
    sizes = np.abs(array[array != 0])
    return Fit(
        count=array.size,
        absmax=float(sizes.max(initial=0)),
        absmin=float(sizes.min(initial=np.inf)) if sizes.size else 0.0,
        flushed=int((sizes <= TO.smallest_subnormal / 2).sum()),
        subnormal=int(((sizes > TO.smallest_subnormal / 2) & (sizes < TO.tiny)).sum()),
    )


def added(array: Array, exponent: int, *, flush: bool) -> float:
    """The ratio of the rounding errors after and before a shift."""
    shifted = np.ldexp(array, -exponent).astype(np.float16).astype(np.float64)
    if flush:
        shifted = np.where(np.abs(shifted) < TO.tiny, 0, shifted)
    after, before = np.ldexp(shifted, exponent) - array, array.astype(np.float16).astype(np.float64) - array
    return float(np.linalg.norm(after) / np.linalg.norm(before))


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0, 1e4])
def test_counts_tell_a_shift_that_costs_digits_from_one_that_does_not(size: float, flush: bool) -> None:
    array = (NORMAL * size).astype(np.float32).astype(np.float64)
    told = [e for e in range(40) if value_keeps(fit_of(array), e, TO, flush=flush)]
    kept = [e for e in range(40) if e == 0 or added(array, e, flush=flush) <= MAX_ADDED_ERROR]
    assert told == list(range(len(told)))
    assert kept[-1] - 6 <= told[-1] <= kept[-1]
    parts = np.split(array.astype(np.float32), [5000])
    assert [e for e in range(1, 40) if constant_keeps(parts, fit_of(array), e, TO, flush=flush)] == kept[1:]


@pytest.mark.parametrize(
    ("fit", "exponent", "keeps"),
    [
        (Fit(), 20, True),
        (Fit(count=4, absmax=1.0, absmin=1.0), 14, True),
        (Fit(count=4, absmax=1.0, absmin=1.0), 24, False),
        (Fit(count=4, absmax=1.0, absmin=1e-7, flushed=1), 0, True),
        (Fit(count=4, absmax=1.0, absmin=1e-7, flushed=1), -3, True),
    ],
)
def test_no_numbers_no_shift_and_no_small_numbers_keep_all_digits(fit: Fit, exponent: int, keeps: bool) -> None:
    assert value_keeps(fit, exponent, TO, flush=False) is keeps


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_a_constant_may_not_leave_the_range_that_it_is_in(size: int) -> None:
    constant = np.full(size, 0.5, np.float32)
    constant[size // 3] = 2  # of a large one, a sample is rounded
    keeps = [constant_keeps([constant], fit_of(constant), e, TO, flush=False) for e in (-14, -15)]
    assert keeps == [True, False]


@pytest.mark.parametrize(
    ("numbers", "exponent", "exact"),
    [
        ([1.0, 3.0], 126, True),
        ([1.0, 1 + 2.0**-23], 126, True),
        ([1.0, 1 + 2.0**-23], 127, False),
        ([1.0, 3.0], 151, False),
        ([1.0], -127, True),
        ([2.0], -127, False),
        ([2.0**-149], -3, True),
        ([2.0**-149], 1, False),
        ([np.nan, np.inf, 1.0], 3, True),
    ],
)
def test_a_power_of_two_is_exact_unless_numbers_lose_bits(numbers: list[float], exponent: int, exact: bool) -> None:
    array = np.array(numbers, np.float32)
    finite = array[np.isfinite(array)].astype(np.float64)
    assert is_exact(fit_of(finite), [array], exponent) is exact
