"""Help: short enough to read, with examples that work, every option in it, and the same as before.

`make golden` runs this file as a program, which writes the help of every command as it is.
"""

import os
import shlex
from importlib import metadata

import click
import pytest

from amp_rewrite.cli import program
from amp_rewrite.cli.group import COMMANDS, EXAMPLES, GROUPS
from support.paths import ROOT, TESTS
from unit.cli.test_cli import run

FILE = TESTS / "golden" / "help.txt"


ALL = {name: command for name in COMMANDS if (command := program.get_command(None, name))}


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def every_help() -> str:
    """The help of every command, below the release of click that lays it out."""
    shown = (run(*name.split(), "--help").stdout for name in ("", *ALL))
    return "\n".join((f"click {metadata.version('click')}\n", *shown))


def test_the_help_of_every_command_is_what_it_was() -> None:
    before, now = FILE.read_text("utf-8"), every_help()
    if before.partition("\n")[0] != now.partition("\n")[0]:
        pytest.skip(f"the help is that of {before.partition(chr(10))[0]}")
    assert now == before


@pytest.mark.parametrize("name", ALL)
def test_every_option_of_its_own_is_in_the_help(name: str) -> None:
    shown = run(*name.split(), "--help").stdout.split()
    for param in ALL[name].params:
        if isinstance(param, click.Option) and not getattr(param, "borrowed", False):
            assert {*param.opts, *param.secondary_opts} <= {word.rstrip(",") for word in shown}


@pytest.mark.parametrize("name", ["", *ALL])
def test_help_fits_eighty_columns(name: str) -> None:
    asked = run(*name.split(), "--help")
    assert (asked.exit_code, asked.stderr) == (0, "")
    lines = asked.stdout.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 40


@pytest.mark.parametrize("name", ["", *ALL])
def test_every_help_has_an_example_that_the_command_takes(name: str) -> None:
    assert "\nExample" in run(*name.split(), "--help").stdout
    for example in EXAMPLES[name]:
        words = shlex.split(example.partition(" >")[0] if " > " in example and "'" not in example else example)
        with program.make_context("amp-rewrite", ["convert", *words] if words[0] not in COMMANDS else words) as ctx:
            _, command, rest = program.resolve_command(ctx, [*ctx._protected_args, *ctx.args])
            assert command is not None
            command.make_context("any", rest, parent=ctx)


REPEATED = {"--shape", "--lists", "--keep", "--lower", "--io", "--fail-on"}
"""Options that may be given again without saying so: one each for inputs, ops or files."""


def test_options_may_be_repeated_where_help_says_so_and_modules_define_commands() -> None:
    options = [(name, p) for name, command in ALL.items() for p in command.params if isinstance(p, click.Option)]
    assert {(name, p.opts[0]) for name, p in options if p.multiple} == {
        (name, p.opts[0])
        for name, p in options
        if "repeatable" in (p.help or "") or (p.opts[0] in REPEATED and not isinstance(p.type, click.Choice))
    }
    folder = ROOT / "amp_rewrite" / "cli" / "commands"
    modules = {path.stem for path in folder.glob("*.py") if path.stem != "__init__"}
    assert {command.callback.__module__.rpartition(".")[2] for command in ALL.values()} == modules
    assert len(COMMANDS) == sum(map(len, GROUPS.values())) <= 14


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_has_the_first_sentence_of_a_commands_help(name: str) -> None:
    command = ALL[name]
    assert command.name == name
    assert command.get_short_help_str(1000) == COMMANDS[name]


if __name__ == "__main__":
    os.environ["COLUMNS"] = "80"
    FILE.write_text(every_help(), "utf-8")
