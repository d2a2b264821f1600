"""Rebuild docs/reference/commands.md from the command line: `python tools/build_commands.py`."""

from __future__ import annotations

import textwrap
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from amp_rewrite.cli import program
from amp_rewrite.cli.group import COMMANDS, EXAMPLES
from amp_rewrite.settings.option import DATA, OUTPUT, PRECISION

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "commands.md"
NAME = "amp-rewrite"
ORDER = ("Options", PRECISION, DATA, OUTPUT)
FEW = 10
"""The number of options from which a command gets headings."""
HEAD = """# Commands and their options

This page lists every command with its options. [Command line](command-line.md) describes the common features of all
commands: exit codes, patterns, settings and environment. `tools/build_commands.py` writes this page.
"""


def page() -> str:
    """Return the text of the page."""
    root = click.Context(
        program, info_name=NAME, **program.context_settings
    )  # a single context, since click caches the help option
    commands = [(name, program.get_command(None, name)) for name in COMMANDS]
    index = [f"| [`{name}`](#amp-rewrite-{name}) | {words} |" for name, words in COMMANDS.items()]
    parts = [HEAD.strip(), "\n".join(["| command | result |", "|---|---|", *index])]
    for name, command in commands:
        assert command is not None
        parts += _section(command, click.Context(command, info_name=name, parent=root))
    return "\n\n".join(parts) + "\n"


def _section(command: click.Command, context: click.Context) -> list[str]:
    """Return the paragraphs about a command."""
    path = context.command_path
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    parts = [f"## {path}", _words(command), f"```\n{usage}\n```"]
    if examples := EXAMPLES.get(path.partition(" ")[2]):
        parts.append("```\n" + "\n".join(f"{NAME} {example}" for example in examples) + "\n```")
    rows = [
        (getattr(param, "heading", "Options"), param) for param in command.get_params(context) if _shown(param, command)
    ]
    if len(rows) < FEW:
        rows = [(ORDER[0], param) for _, param in rows]
    rows.sort(key=lambda row: ORDER.index(row[0]) if row[0] in ORDER else 0)
    groups = [(heading, [param for _, param in group]) for heading, group in groupby(rows, key=lambda row: row[0])]
    for heading, params in groups:
        lines = [
            f"| {heading.lower()} | effect | default |",
            "|---|---|---|",
            *(_row(param, context) for param in params),
        ]
        parts.append("\n".join(lines))
    return parts


def _shown(param: click.Parameter, command: click.Command) -> bool:
    """Return True for the options in the help, except --help."""
    return isinstance(param, click.Option) and not param.hidden and "--help" not in param.opts


def _words(command: click.Command) -> str:
    """Return a command's help as paragraphs of Markdown."""
    text = textwrap.dedent((command.help or "").replace("\b", "")).strip()
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n")).replace("*", "\\*").replace("<", "\\<")


def _row(param: Any, context: click.Context) -> str:
    """Return the table row of an option."""
    record = param.get_help_record(context)
    assert record is not None
    spelled, words = record
    words, _, rest = words.partition("[default: ")
    default = rest.partition("]")[0] if rest else ""
    if default.endswith("("):
        default = rest.rpartition("]")[0]
    cells = (f"`{spelled}`", words.strip().rstrip("."), f"`{default}`" if default else "")
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
