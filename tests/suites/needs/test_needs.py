"""What needs float32 has it, so that results are right, and what only looks like it stays low."""

import pytest

from amp_rewrite.dtypes import DType
from suites.harm.case import HIT, NEAR, every, lowered
from suites.needs.case import CASES, NeedCase, error, error_of_products, warned

AS_PRODUCTS = ("raw", "recursions", "states")
"""Classes whose results are right with products alone rounded; a conversion must not be worse there."""
SLACK = {DType.FLOAT16: 1e-3, DType.BFLOAT16: 8e-3}
"""What some low ops beside the products may add to the error: a few roundings of the largest magnitude."""
HITS = [case for case in CASES if case.kind == HIT]


def is_right(case: NeedCase, error: float) -> bool:
    """True if an error is one that the class of the case may have."""
    if case.principle in AS_PRODUCTS:
        return error <= case.tolerance * (1.5 * error_of_products(case) + SLACK[case.to])
    return error <= case.limit


@every(HITS)
def test_results_are_within_tolerance_or_a_finding_warns(case: NeedCase) -> None:
    assert lowered(case).isdisjoint(case.stays.split())
    found = error(case)
    assert is_right(case, found) or (case.principle not in AS_PRODUCTS and warned(case)), found


@every([case for case in CASES if case.kind == NEAR])
def test_what_only_looks_like_a_need_stays_low_and_right(case: NeedCase) -> None:
    assert set(case.lowers.split()) <= lowered(case)
    assert error(case) <= case.limit


@pytest.mark.parametrize("name", dict.fromkeys((case.principle, case.name) for case in HITS), ids=" ".join)
def test_a_hit_is_wrong_without_safety_rules_in_one_type_at_least(name: tuple[str, str]) -> None:
    """With placement or without it: one of them alone may hold an op by chance."""
    cases = [case for case in HITS if (case.principle, case.name) == name]
    ways = ((case, placement) for placement in ("propagate", "mincut") for case in cases)
    assert not all(is_right(case, error(case, "none", placement)) for case, placement in ways)
