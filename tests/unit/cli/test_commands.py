"""The table of commands and the modules behind it."""

from __future__ import annotations

import click
import pytest

from amp_rewrite.cli import program
from amp_rewrite.cli.group import COMMANDS
from support.paths import ROOT


def test_every_command_has_a_module_and_a_line_in_the_table() -> None:
    folder = ROOT / "amp_rewrite" / "cli" / "commands"
    modules = {path.stem.replace("_", "-") for path in folder.glob("*.py") if path.stem != "__init__"}
    assert modules == set(COMMANDS)
    assert list(COMMANDS) == sorted(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_has_the_first_sentence_of_a_commands_help(name: str) -> None:
    command = program.get_command(click.Context(program), name)
    assert command is not None
    assert command.name == name
    assert command.get_short_help_str(1000) == COMMANDS[name]
