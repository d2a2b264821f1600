"""Names and places of tests: each name fits a line and is defined once; `make quick` leaves out what exists."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from support.paths import TESTS

LONGEST = 80
CASES = TESTS / "support" / "train" / "vjp_case.py"
MODULES = sorted(TESTS.rglob("test_*.py"))


def names(path: Path) -> list[str]:
    """The names of the tests that a module defines, methods included."""
    functions = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)]
    return [function.name for function in functions if function.name.startswith("test_")]


INHERITED = set(names(CASES))
"""The tests that every module of gradient rules takes over."""


def test_every_test_module_lies_in_unit_or_suites() -> None:
    assert {path.relative_to(TESTS).parts[0] for path in MODULES} == {"unit", "suites"}


def test_the_folders_of_unit_are_wings() -> None:
    wings = {path.name for path in (TESTS.parent / "amp_rewrite").iterdir() if path.is_dir()}
    folders = {path.name for path in (TESTS / "unit").iterdir() if any(path.glob("test_*.py"))}
    assert folders == {wing for wing in wings if not wing.startswith("_")}


@pytest.mark.parametrize("path", MODULES, ids=[str(path.relative_to(TESTS)) for path in MODULES])
def test_names_are_short_and_each_is_defined_once(path: Path) -> None:
    found = names(path)
    assert [name for name in found if len(name) > LONGEST] == []
    helpers = {"test_step"}  # a function of Keras models, inside a test
    assert [name for name in found if name.count("_") < 2 and name not in helpers] == [], "one word says no behavior"
    assert [name for name, count in Counter(found).items() if count > 1] == []


def test_the_quick_selection_names_tests_that_exist() -> None:
    words = (TESTS / "quick.txt").read_text("utf-8").splitlines()
    assert "tests/unit" in words  # of every wing
    for place in (word.split("=", 1)[-1] for word in words if not word.startswith("-m")):
        path, *parts = place.split("::")
        assert (TESTS.parent / path).exists(), place
        assert not parts or parts[-1].partition("[")[0] in INHERITED | set(names(TESTS.parent / path)), place
