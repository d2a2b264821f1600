"""A conversion is never worse than rounding what products read and give, and does not lower less than it may."""

from suites.harm.case import CASES, HIT, Case, errors, every, lowered


@every(CASES)
def test_results_are_within_tolerance_where_a_reference_is(case: Case) -> None:
    found = errors(case)
    if case.kind == HIT or found.results <= case.limit or found.operands <= case.limit:
        assert found.ours <= case.limit, found


@every(CASES)
def test_what_may_be_low_is_low_and_nothing_that_may_not(case: Case) -> None:
    low = lowered(case)
    assert set(case.lowers.split()) <= low
    assert low.isdisjoint(case.stays.split())
