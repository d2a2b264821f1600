"""docs/evidence/failures.md has a row for each class, and names what tests it."""

from __future__ import annotations

import re

from suites.catalogue import test_catalogue_apart, test_catalogue_loud, test_catalogue_silent
from support.paths import ROOT

PAGE = ROOT / "docs" / "evidence" / "failures.md"
CASES = (*test_catalogue_loud.CASES, *test_catalogue_silent.CASES)
APART = {29, 30, 36, 43, 55, 59, 60}


def rows() -> list[tuple[int, str]]:
    """The number of each row and the name in its last column."""
    found = (re.match(r"\| (\d+) \|.*\| `([^`]+)` \|$", line) for line in PAGE.read_text("utf-8").splitlines())
    return [(int(match[1]), match[2]) for match in found if match]


def test_the_page_has_every_class_once_and_in_order() -> None:
    assert [number for number, _ in rows()] == list(range(1, 61))


def test_every_class_has_a_case_or_a_test_of_its_own() -> None:
    assert {case.row for case in CASES} | APART == set(range(1, 61))


def test_a_naive_conversion_fails_on_one_case_of_each_class_at_least() -> None:
    """It survives what only other converters are known to fail on."""
    assert {case.row for case in CASES if case.fails} | APART == set(range(1, 61))
    assert {case.row for case in CASES if not case.fails} == {4, 11}


def test_what_the_page_names_is_there_and_of_that_class() -> None:
    known = {case.name: case.row for case in CASES if case.fails}
    for number, name in rows():
        assert known.get(name) == number or (name.startswith("test_") and hasattr(test_catalogue_apart, name)), name


def test_no_two_cases_have_one_name() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
