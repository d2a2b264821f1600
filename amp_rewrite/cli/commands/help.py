"""`amp-rewrite help`: the help of a command."""

from __future__ import annotations

import click

from amp_rewrite.cli import parameters, terminal
from amp_rewrite.errors import advice


@parameters.command(
    parameters.argument("words", metavar="[COMMAND]...", nargs=-1, choices=parameters.commands),
    parameters.flag("--all whole", "Show options that are rarely used, too."),
)
@click.pass_context
def help(ctx: click.Context, words: tuple[str, ...], whole: bool) -> None:
    """Print the help of COMMAND, or this program's."""
    shown = ctx.find_root()
    for word in words:
        group = shown.command
        command = group.get_command(shown, word) if isinstance(group, click.Group) else None
        if command is None:
            known = group.list_commands(shown) if isinstance(group, click.Group) else []
            hint = advice(word, known, f"commands are {', '.join(known)}" if known else "leave it out")
            raise click.UsageError(f"{shown.command_path} has no command {word!r}; {hint}", shown)
        shown = click.Context(command, info_name=word, parent=shown)
    terminal.show(parameters.help_of(shown.command, shown, whole=whole))
