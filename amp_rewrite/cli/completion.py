"""Completion in shells: the scripts in `shells/`, and the answers to them.

A script sends the command line up to the cursor and gets a line for each candidate: its kind, the word and its help,
separated by tabs. Kinds: `plain`; `open`, after which the word goes on; `glob`, files of that pattern and folders;
`file` and `dir`, for any.
"""

from __future__ import annotations

import os
from pathlib import Path

from click.shell_completion import CompletionItem, ShellComplete, add_completion_class, split_arg_string

NAME = "amp-rewrite"
COMPLETE = "_AMP_REWRITE_COMPLETE"
"""The variable in which a shell asks for completions; click derives it from the name."""


class _Complete(ShellComplete):
    """Completion of the command line up to the cursor, however a shell splits it into words."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the complete words after the program's name, and the one at the cursor."""
        words = split_arg_string(f"{os.environ['COMP_LINE']}|")  # the mark ends the last word, even an empty one
        while len(words) > 1 and Path(words[0]).name != self.prog_name:
            words.pop(0)  # assignments, and commands such as nice
        return words[1:-1], words[-1][:-1]

    def source(self) -> str:
        return script(self.name)

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        option, equals, value = incomplete.partition("=")
        if not (equals and option.startswith("--")):
            return [self.fitted(item, "", incomplete) for item in super().get_completions(args, incomplete)]
        return [self.fitted(item, option + equals, value) for item in super().get_completions([*args, option], value)]

    def fitted(self, item: CompletionItem[str], option: str, written: str) -> CompletionItem[str]:
        """Return a candidate as the shell puts it in place of `written`; `option`: "--option=" before it, if any."""
        return item

    def format_completion(self, item: CompletionItem[str]) -> str:
        return f"{item.type}\t{item.value}\t{' '.join((item.help or '').split())}"


class _Bash(_Complete):
    name = "bash"

    def fitted(self, item: CompletionItem[str], option: str, written: str) -> CompletionItem[str]:
        """Drop the text up to the last "=" or ":", the start of a word in bash."""
        current = os.environ.get("COMP_CUR", written)
        if item.type in ("plain", "open") and written.endswith(current):
            return CompletionItem(item.value[len(written) - len(current) :], item.type, item.help)
        return item


class _Zsh(_Complete):
    name = "zsh"


class _Fish(_Complete):
    name = "fish"

    def fitted(self, item: CompletionItem[str], option: str, written: str) -> CompletionItem[str]:
        """Add the option before the value in `--option=value`, one word for fish."""
        if item.type in ("plain", "open"):
            return CompletionItem(option + item.value, item.type, item.help)
        return CompletionItem(item.value, item.type, option)  # the script puts it before each file


_SHELLS: tuple[type[_Complete], ...] = (_Bash, _Zsh, _Fish)


def register() -> None:
    """Let click use these shells in the place of its own."""
    for shell in _SHELLS:
        add_completion_class(shell)


def script(shell: str) -> str:
    """Return the completion script for a shell."""
    from importlib.resources import files  # late: few runs print one

    return files(__package__).joinpath("shells", f"completion.{shell}").read_text("utf-8")


def patterns(incomplete: str) -> list[CompletionItem[str]]:
    """Return candidates for a pattern of ops: keys of terms, and op types behind op=, feeds= and fed_by=."""
    done, comma, term = incomplete.rpartition(",")
    before = done + comma
    key, equals, start = term.partition("=")
    if equals and key in ("op", "feeds", "fed_by"):
        return [CompletionItem(f"{before}{key}={op}") for op in ops(start)]
    keys = ("op=", "name=", "scope=", "feeds=", "fed_by=", "input=", "output=")
    return [CompletionItem(before + key, type="open") for key in keys if key.startswith(term)]


def ops(start: str) -> list[str]:
    """Return the types of ONNX ops with this start."""
    from onnx.defs import get_all_schemas

    return sorted({schema.name for schema in get_all_schemas() if not schema.domain and schema.name.startswith(start)})
