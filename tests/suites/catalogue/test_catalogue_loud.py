"""Failures that one sees at once: the conversion dies, or its result does not load."""

from suites.catalogue.case import Case, converted, every, lowered, naive_fails, of_result, table

FAMILIES = ("loud_types", "loud_names", "loud_scopes", "loud_edges", "loud_kinds")
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
