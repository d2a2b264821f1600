"""The pages in docs/: links lead somewhere, and what they name is there."""

import re

import click

from amp_rewrite.cli import program
from amp_rewrite.cli.group import COMMANDS
from amp_rewrite.compat import autocast
from support.paths import ROOT


def command_of(name: str) -> click.Command:
    command = program.get_command(None, name)
    assert command is not None
    return command


def test_every_link_leads_somewhere() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").rglob("*.md"))]
    links = [(page, at) for page in pages for at in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8"))]
    assert [f"{page.name}: {at}" for page, at in links if not (page.parent / at).exists()] == []
    assert len(links) > 40


def test_the_page_for_those_who_come_from_elsewhere_names_options_that_are_there() -> None:
    page = (ROOT / "docs" / "how-to" / "migrating.md").read_text("utf-8")
    known = {name for option in command_of("convert").params for name in (*option.opts, *option.secondary_opts)}
    known |= {name for action in autocast.parser()._actions for name in action.option_strings}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z_-]+", page))
    assert named - known == set()
    assert len(named) > 10


def test_every_option_of_the_command_line_is_named_on_a_page() -> None:
    pages = "".join(page.read_text("utf-8") for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
    params = [option for command in map(command_of, COMMANDS) for option in command.params]
    spelled = [(*option.opts, *option.secondary_opts) for option in params if option.opts[0].startswith("-")]
    assert {names for names in spelled if not any(re.search(rf"{name}(?![\w-])", pages) for name in names)} == set()
