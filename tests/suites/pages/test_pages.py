"""The pages in docs/: links and options exist, and generated pages are up to date."""

import json
import re
import runpy

import click
import pytest

from amp_rewrite.cli import program
from amp_rewrite.cli.group import COMMANDS
from amp_rewrite.compat import autocast
from support.paths import ROOT, imported

REFERENCE = ROOT / "docs" / "reference"
OPTIONS = {
    name: [option for option in command.params if option.opts[0].startswith("-")]
    for name in COMMANDS
    if (command := program.get_command(None, name))
}


def spellings(options: list[click.Parameter]) -> set[str]:
    return {name for option in options for name in (*option.opts, *option.secondary_opts)}


def test_every_link_leads_somewhere() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").rglob("*.md"))]
    links = [(page, at) for page in pages for at in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8"))]
    assert [f"{page.name}: {at}" for page, at in links if not (page.parent / at).exists()] == []
    assert len(links) > 40


def test_the_migration_page_and_the_readme_name_existing_options() -> None:
    page = (ROOT / "docs" / "how-to" / "migrating.md").read_text("utf-8")
    theirs = {name for action in autocast.parser()._actions for name in action.option_strings}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z_-]+", page))
    assert named - spellings(OPTIONS["convert"]) - theirs == set()
    assert len(named) > 10
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", (ROOT / "README.md").read_text("utf-8")))
    assert named <= spellings([option for options in OPTIONS.values() for option in options])


def test_every_option_of_the_command_line_is_named_on_a_page() -> None:
    pages = "".join(page.read_text("utf-8") for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
    spelled = [(*option.opts, *option.secondary_opts) for options in OPTIONS.values() for option in options]
    assert {names for names in spelled if not any(re.search(rf"{name}(?![\w-])", pages) for name in names)} == set()


# -- generated pages: after a change of their code, run make pages -----------------------------------------


@pytest.mark.parametrize("name", ["findings", "commands", "options", "decisions"])
def test_a_page_matches_the_output_of_its_script(name: str) -> None:
    page = runpy.run_path(str(ROOT / "tools" / f"build_{name}.py"))["page"]()
    assert (REFERENCE / f"{name}.md").read_text("utf-8") == page


def test_the_pages_on_rules_and_the_api_match_the_code() -> None:
    pages = runpy.run_path(str(ROOT / "tools" / "build_rules.py"))["pages"]()
    assert {path.name: path.read_text("utf-8") for path in (ROOT / "docs" / "rules").iterdir()} == pages
    pages = runpy.run_path(str(ROOT / "tools" / "build_api.py"))["pages"]()
    assert {name: (REFERENCE / name).read_text("utf-8") for name in pages} == pages


def test_the_page_on_harm_matches_the_measured_rows() -> None:
    harm = imported("benchmarks.harm.harm_page")
    assert harm.PAGE.read_text("utf-8") == harm.page(json.loads(harm.RESULTS.read_text("utf-8")))
