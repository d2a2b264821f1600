"""Options that may be given again, and arguments that may be left out, in every command."""

from __future__ import annotations

from collections.abc import Iterator

import click

from amp_rewrite.cli import program
from amp_rewrite.cli.group import COMMANDS

REPEATED = {
    "--shape",
    *("--lists", "--keep", "--lower", "--io", "--fail-on"),
}
"""Options that may be given again without saying so: one each for inputs, ops or files."""
ANY = -1
ARGUMENTS = {
    "bench": {"models": (ANY, True)},
    "convert": {"model": (1, True), "out": (ANY, False)},
    "doctor": {"model": (1, False)},
    "explain": {"words": (ANY, False)},
    "gate": {"files": (ANY, True)},
    "completion": {"shell": (1, True)},
    **{name: {"model": (1, True)} for name in ("calibrate", "emulate", "report", "train-step")},
    **{name: {"a": (1, True), "b": (1, True)} for name in ("diff", "locate", "verify")},
}
"""Arguments of commands that have any: how many, and whether they are required."""


def commands() -> Iterator[tuple[str, click.Command]]:
    for name in COMMANDS:
        command = program.get_command(None, name)
        assert command is not None
        yield name, command


def test_an_option_may_be_given_again_where_its_help_says_so() -> None:
    options = [(name, p) for name, command in commands() for p in command.params if isinstance(p, click.Option)]
    found = {(name, p.opts[0]) for name, p in options if p.multiple}
    assert found == {
        (name, p.opts[0])
        for name, p in options
        if "repeatable" in (p.help or "") or (p.opts[0] in REPEATED and not isinstance(p.type, click.Choice))
    }


def test_arguments_are_required_and_counted_as_the_usage_says() -> None:
    found = {
        name: {p.name: (p.nargs, p.required) for p in command.params if isinstance(p, click.Argument)}
        for name, command in commands()
    }
    assert {name: arguments for name, arguments in found.items() if arguments} == ARGUMENTS
