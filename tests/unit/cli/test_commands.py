"""The table of commands and the modules behind it."""

from __future__ import annotations

import click
import pytest

from amp_rewrite.cli import program
from amp_rewrite.cli.group import COMMANDS, GROUPS
from support.paths import ROOT


def test_every_module_defines_a_command_and_each_command_has_a_place_in_the_help() -> None:
    folder = ROOT / "amp_rewrite" / "cli" / "commands"
    modules = {path.stem for path in folder.glob("*.py") if path.stem != "__init__"}
    found = [program.get_command(click.Context(program), name) for name in COMMANDS]
    assert {command.callback.__module__.rpartition(".")[2] for command in found if command is not None} == modules
    assert len(COMMANDS) == sum(map(len, GROUPS.values())) <= 14


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_has_the_first_sentence_of_a_commands_help(name: str) -> None:
    command = program.get_command(click.Context(program), name)
    assert command is not None
    assert command.name == name
    assert command.get_short_help_str(1000) == COMMANDS[name]
