"""docs/architecture.md: its paths, names and lists match the repository."""

import re

import pytest

from support.paths import ROOT

PACKAGE = ROOT / "amp_rewrite"
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
TABLE = PAGE.partition("## Where to find")[2].partition("\n\nPaths")[0]


def paths(text: str) -> list[str]:
    """Return quoted names of files and folders."""
    quoted = re.findall(r"`([\w./-]+)`", text)
    return [name for name in quoted if "/" in name or re.search(r"\.(py|pyi|json|yaml|yml|md|txt)$", name)]


def test_each_path_on_the_page_exists() -> None:
    named = paths(PAGE)
    assert [name for name in named if not any((place / name).exists() for place in (ROOT, PACKAGE))] == []
    assert len(named) > 60


@pytest.mark.parametrize(
    "wing", sorted(path.name for path in PACKAGE.iterdir() if path.name.isalpha() and path.is_dir())
)
def test_each_wing_has_a_row_in_both_tables(wing: str) -> None:
    assert re.search(rf"^\| `{wing}` \| ", PAGE, re.MULTILINE)
    assert any(name.startswith(f"{wing}/") for name in paths(TABLE)), (
        f"nothing of {wing} is in the table 'Where to find'"
    )


def test_the_page_lists_the_modules_outside_the_wings() -> None:
    listed = re.search(r"top-level modules \(([^)]+)\)", PAGE)
    assert listed is not None
    loose = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert set(re.findall(r"`(\w+)`", listed[1])) == loose
