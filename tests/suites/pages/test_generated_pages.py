"""Pages of docs/ that are made from code are those that the code makes. Red after a change of it: make pages."""

import runpy

import pytest

from support.paths import ROOT

REFERENCE = ROOT / "docs" / "reference"


@pytest.mark.parametrize("name", ["findings", "commands"])
def test_a_page_is_that_which_the_script_makes(name: str) -> None:
    made = runpy.run_path(str(ROOT / "tools" / f"build_{name}.py"))["page"]()
    assert (REFERENCE / f"{name}.md").read_text("utf-8") == made


def test_the_pages_of_the_api_are_those_of_the_docstrings() -> None:
    made = runpy.run_path(str(ROOT / "tools" / "build_api.py"))["pages"]()
    assert {name: (REFERENCE / name).read_text("utf-8") for name in made} == made
