"""Classes of failures: loud ones, if the conversion or loading fails, and silent ones, with a wrong or slow result.

docs/failures has a page for each class with its test.
"""

import runpy

import pytest

from suites.catalogue import test_catalogue_apart
from suites.catalogue.case import Case, converted, every, lowered, naive_fails, of_naive, of_result, table
from support.paths import ROOT

TOOL = runpy.run_path(str(ROOT / "tools" / "build_failures.py"))
ROWS = TOOL["rows"]()
LOUD = ("loud_types", "loud_names", "loud_scopes", "loud_edges", "loud_kinds")
SILENT = ("silent_ranges", "silent_constants", "silent_integers")
CASES = tuple(case for family in (*LOUD, *SILENT) for case in table(family))
APART = {29, 30, 36, 43, 55, 59, 60}


@every(CASES)
def test_the_result_is_valid_opens_and_computes_the_same(case: Case) -> None:
    assert of_result(case, converted(case).model) == []


@every(CASES)
def test_exactly_the_right_ops_are_lowered(case: Case) -> None:
    low = lowered(case)
    assert set(case.lowers.split()) <= low
    assert low.isdisjoint(case.stays.split())


@every(CASES)
def test_naive_conversion_fails_on_every_case(case: Case) -> None:
    assert naive_fails(case)


# -- the pages ---------------------------------------------------------------------------------------------


def test_the_pages_match_the_scripts_output() -> None:
    """After an edit of failures.yaml, run make pages."""
    folder = ROOT / "docs" / "failures"
    assert {path.name: path.read_text("utf-8") for path in folder.glob("*.md")} == TOOL["pages"]()


def test_every_class_has_its_own_page_in_order() -> None:
    assert list(ROWS) == list(range(1, 61))
    for key in ("page", "title", "test"):
        assert len({row[key] for row in ROWS.values()}) == 60


def test_every_class_has_a_case_or_its_own_test() -> None:
    assert {case.row for case in CASES} | APART == set(range(1, 61))


def test_naive_conversion_fails_on_at_least_one_case_of_each_class() -> None:
    """It succeeds only on rows on which other converters fail."""
    assert {case.row for case in CASES if case.fails} | APART == set(range(1, 61))
    assert {case.row for case in CASES if not case.fails} == {4, 11}


def test_names_on_the_pages_exist_and_belong_to_the_class() -> None:
    known = {case.name: case.row for case in CASES if case.fails}
    for number, row in ROWS.items():
        name = row["test"]
        assert known.get(name) == number or (name.startswith("test_") and hasattr(test_catalogue_apart, name)), name
        assert all((ROOT / "docs" / "rules" / f"{rule}.md").is_file() for rule in row.get("rules", ()))


@pytest.mark.parametrize("number", [number for number, row in ROWS.items() if "seen" in row])
def test_naive_conversion_fails_with_the_message_on_the_page(number: int) -> None:
    messages = [" ".join(text.split()) for case in CASES if case.row == number for text in of_naive(case)]
    assert any(ROWS[number]["seen"] in text for text in messages), messages


def test_case_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
