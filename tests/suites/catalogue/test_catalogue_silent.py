"""Failures that nobody sees: the result loads, runs, and is wrong, or slow."""

from suites.catalogue.case import Case, converted, every, lowered, naive_fails, of_result, table

FAMILIES = ("silent_ranges", "silent_constants", "silent_integers")
CASES = tuple(case for family in FAMILIES for case in table(family))


@every(CASES)
def test_the_result_is_valid_opens_and_computes_what_it_did(case: Case) -> None:
    assert of_result(case, converted(case).model) == []


@every(CASES)
def test_what_should_be_low_is_low_and_nothing_that_should_not(case: Case) -> None:
    low = lowered(case)
    assert set(case.lowers.split()) <= low
    assert low.isdisjoint(case.stays.split())


@every(CASES)
def test_naive_conversion_fails_on_every_case(case: Case) -> None:
    assert naive_fails(case)
