"""Names of tests: each fits a line of output, and is defined once in its module."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from support.paths import TESTS

LONGEST = 80
MODULES = sorted(TESTS.rglob("test_*.py"))


def names(path: Path) -> list[str]:
    """The names of the test functions that a module defines, methods of classes included."""
    tree = ast.parse(path.read_text("utf-8"))
    scopes = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
    functions = [node for scope in scopes for node in scope.body if isinstance(node, ast.FunctionDef)]
    return [function.name for function in functions if function.name.startswith("test_")]


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
    assert [name for name, count in Counter(found).items() if count > 1] == []
