"""Candidates for completion in shells, whose scripts are those of click."""

from __future__ import annotations

from click.shell_completion import CompletionItem

NAME = "amp-rewrite"
COMPLETE = "_AMP_REWRITE_COMPLETE"
"""The variable in which a shell asks for completions; click derives it from the name."""
SHELLS = ("bash", "zsh", "fish")


def patterns(incomplete: str) -> list[CompletionItem[str]]:
    """Return candidates for a pattern of ops: keys of terms, and op types behind op=, feeds= and fed_by=."""
    done, comma, term = incomplete.rpartition(",")
    before = done + comma
    key, equals, start = term.partition("=")
    if equals and key in ("op", "feeds", "fed_by"):
        return [CompletionItem(f"{before}{key}={op}") for op in ops(start)]
    keys = ("op=", "name=", "scope=", "feeds=", "fed_by=", "input=", "output=")
    return [CompletionItem(before + key) for key in keys if key.startswith(term)]


def ops(start: str) -> list[str]:
    """Return the types of ONNX ops with this start."""
    from onnx.defs import get_all_schemas

    return sorted({schema.name for schema in get_all_schemas() if not schema.domain and schema.name.startswith(start)})
