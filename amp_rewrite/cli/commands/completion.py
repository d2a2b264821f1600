"""`amp-rewrite completion`: the script that completes words in a shell."""

from __future__ import annotations

import click

from amp_rewrite.cli import parameters, terminal

_SHELLS = ("bash", "zsh", "fish")


@parameters.command(click.argument("shell", metavar="|".join(_SHELLS), type=parameters.WordChoice(_SHELLS)))
def completion(shell: str) -> None:
    """Print the script that completes commands, options, values and models in a shell.

    Its first lines say how to install it.
    """
    from amp_rewrite.cli.completion import script

    terminal.show(script(shell))
