"""Help: short enough to read, with examples that work, every option in some help, and the same as before.

`make golden` runs this file as a program, which writes the short help of every command as it is.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from importlib import metadata

import click
import pytest

from amp_rewrite.cli import program
from amp_rewrite.cli.examples import EXAMPLES
from amp_rewrite.cli.group import COMMANDS
from support.paths import TESTS
from unit.cli.test_cli import run

FILE = TESTS / "golden" / "help.txt"


def commands(group: click.Group = program, path: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command with its words."""
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        yield f"{path}{name}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{name} ")


ALL = dict(commands())


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_the_help_of_convert_fits_a_page_and_has_four_groups() -> None:
    lines = run("convert", "--help").stdout.splitlines()
    assert len(lines) < 60 and max(map(len, lines)) <= 80
    assert [line for line in lines if line.endswith(":") and not line.startswith(" ")] == [
        "Examples:",
        "Precision:",
        "Data and accuracy:",
        "Output:",
        "Advanced:",
    ]
    assert len(EXAMPLES["convert"]) == 3


def every_help() -> str:
    """The short help of every command, below the release of click that lays it out."""
    shown = (run(*name.split(), "--help").stdout for name in ("", *ALL))
    return "\n".join((f"click {metadata.version('click')}\n", *shown))


def test_the_help_of_every_command_is_what_it_was() -> None:
    before, now = FILE.read_text("utf-8"), every_help()
    if before.partition("\n")[0] != now.partition("\n")[0]:
        pytest.skip(f"the help is that of {before.partition(chr(10))[0]}")
    assert now == before


@pytest.mark.parametrize("name", ALL)
def test_every_option_is_in_the_long_help(name: str) -> None:
    shown = run("help", *name.split(), "--all").stdout.split()
    for param in ALL[name].params:
        if isinstance(param, click.Option):
            assert {*param.opts, *param.secondary_opts} <= {word.rstrip(",") for word in shown}


@pytest.mark.parametrize("name", ["", *ALL])
def test_help_by_word_and_by_option_agree(name: str) -> None:
    asked = run("help", *name.split())
    assert (asked.exit_code, asked.stderr) == (0, "")
    assert asked.stdout == run(*name.split(), "--help").stdout
    assert max(map(len, asked.stdout.splitlines())) <= 80


def test_the_long_help_may_be_asked_for_behind_the_command() -> None:
    assert run("convert", "--help-all").stdout == run("help", "convert", "--all").stdout
    assert "--gray-follows-allow" not in run("convert", "--help").stdout
    assert "--gray-follows-allow" in run("convert", "--help-all").stdout


@pytest.mark.parametrize("name", ["", *ALL])
def test_every_help_has_an_example_that_the_command_takes(name: str) -> None:
    assert "\nExample" in run("help", *name.split()).stdout
    for example in EXAMPLES[name]:
        words = shlex.split(example.partition(" >")[0] if " > " in example and "'" not in example else example)
        with program.make_context("amp-rewrite", ["convert", *words] if words[0] not in COMMANDS else words) as ctx:
            command, rest = program, [*ctx._protected_args, *ctx.args]
            while isinstance(command, click.Group):
                _, chosen, rest = command.resolve_command(ctx, rest)
                assert chosen is not None
                command = chosen
            command.make_context("any", rest, parent=ctx)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["converrt"], "amp-rewrite has no command 'converrt'; did you mean 'convert'?"),
        (["ranges", "shw"], "amp-rewrite ranges has no command 'shw'; did you mean 'show'?"),
        (["convert", "model"], "amp-rewrite convert has no command 'model'; leave it out"),
    ],
)
def test_help_of_no_command_gets_a_hint(words: list[str], hint: str) -> None:
    done = run("help", *words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {hint}")


if __name__ == "__main__":
    os.environ["COLUMNS"] = "80"
    FILE.write_text(every_help(), "utf-8")
