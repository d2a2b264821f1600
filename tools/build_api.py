"""Rebuild docs/reference/api.md and api-train.md from docstrings: `python tools/build_api.py`."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from enum import Enum
from functools import cached_property
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import amp_rewrite
import amp_rewrite.train

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"
HEADERS = {
    "api.md": """# Python API

This page lists every public name of `amp_rewrite` with its docstring; `tools/build_api.py` writes it, and the tests run
the examples. `model.onnx` and `batches.npz` stand for a model and its data. [Options](options.md) describes
`**options`. [Training](api-train.md) has a separate page.""",
    "api-train.md": """# Python API for training

This page lists every public name of `amp_rewrite.train` that is not also in [`amp_rewrite`](api.md), with its
docstring; `tools/build_api.py` writes it. [Training](../how-to/training.md) shows how these names work together.""",
}
HEADING = re.compile(r"(Args|Options|Attributes|Returns|Yields|Raises|Example):")
ARGS = re.compile(r"^Args:\n((?: {4}.*\n?)+)", re.MULTILINE)
ARGUMENT = re.compile(r" {4}(\*{0,2}\w+): .*\n(?: {5}.*\n)*")
WIDTH = 100


def pages() -> dict[str, str]:
    """Return the text of each page by file name."""
    top = objects(amp_rewrite)
    inner = {name: value for name, value in objects(amp_rewrite.train).items() if value not in top.values()}
    return {"api.md": page("api.md", top), "api-train.md": page("api-train.md", inner)}


def objects(package: ModuleType) -> dict[str, Any]:
    """Return the public functions and classes of a package by name."""
    values = {name: getattr(package, name) for name in sorted(package.__all__, key=str.lower)}
    return {name: value for name, value in values.items() if isinstance(value, (FunctionType, type))}


def page(name: str, values: dict[str, Any]) -> str:
    """Return a page with functions, classes and errors, each under a heading."""
    groups: dict[str, dict[str, Any]] = {"Functions": {}, "Classes": {}, "Errors": {}}
    for key, value in values.items():
        error = isinstance(value, type) and issubclass(value, Exception)
        groups["Errors" if error else "Classes" if isinstance(value, type) else "Functions"][key] = value
    parts = [HEADERS[name]]
    for head, group in groups.items():
        if group:
            parts += [f"## {head}", "\n".join(map(_index_line, group, group.values()))]
            parts += [part for key, value in group.items() if head != "Errors" for part in section(key, value)]
    return "\n\n".join(parts) + "\n"


def _index_line(name: str, value: Any) -> str:
    short = (inspect.getdoc(value) or "").partition("\n")[0]
    is_error = isinstance(value, type) and issubclass(value, Exception)
    return f"- `{name}`: {markdown(short)}" if is_error else f"- [`{name}`](#{name.lower()}): {markdown(short)}"


def section(name: str, value: Any) -> list[str]:
    """Return the paragraphs about a function or class, with the members of a class as a list."""
    parts = [f"### {name}", f"```py\n{signature(name, value)}\n```", *body(documented(value))]
    if isinstance(value, type):
        lines = [line for key, member in vars(value).items() if (line := _member(value, key, member))]
        parts += ["**Members**", "\n".join(lines)] if lines else []
    return parts


def documented(value: Any) -> str:
    """Return a docstring; for a class, add its bases' documented arguments, or refer to a public base."""
    text = inspect.getdoc(value) or ""
    for base in value.__mro__[1:] if isinstance(value, type) else ():
        inherited = ARGS.search(inspect.cleandoc(base.__dict__.get("__doc__") or ""))
        own = ARGS.search(text)
        names = {match[1] for match in ARGUMENT.finditer(f"{own[1]}\n" if own else "")}
        entries = {match[1]: match[0] for match in ARGUMENT.finditer(f"{inherited[1]}\n" if inherited else "")}
        missing = [entries[name] for name in inspect.signature(value).parameters if name in entries.keys() - names]
        if missing and base.__name__ in (*amp_rewrite.__all__, *amp_rewrite.train.__all__):
            lead = "Arguments" if own is None else "Further arguments"
            return _added(text, f"{lead} are those of `{base.__name__}`.\n")
        if missing and own is not None:
            text = text[: own.end()].rstrip("\n") + "\n" + "".join(missing) + text[own.end() :]
        elif missing:
            text = _added(text, "Args:\n" + "".join(missing))
    return text


def _added(text: str, part: str) -> str:
    """Return a docstring with a part inserted before its first section."""
    first = re.search(f"^{HEADING.pattern}$", text, re.MULTILINE)
    at = first.start() if first else len(text)
    return f"{text[:at].rstrip()}\n\n{part}\n{text[at:]}"


def _member(owner: type, name: str, member: Any) -> str:
    inner = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
    if name.startswith("_") or not isinstance(inner, (FunctionType, property, cached_property)):
        return ""
    text = " ".join((inspect.getdoc(getattr(owner, name)) or "").partition("\n\n")[0].split())
    if not text and isinstance(inner, (property, cached_property)):
        text = inspect.getdoc(inner) or ""
    call = str(_plain(inner)) if isinstance(inner, FunctionType) else ""
    return f"- `{name}{call}`: {markdown(text)}"


def signature(name: str, value: Any) -> str:
    """Return a signature as code, split into lines if it is long; for an enumeration, its values."""
    if isinstance(value, type) and issubclass(value, Enum):
        return "\n".join(f"{name}.{member.name} = {json.dumps(member.value)}" for member in value)
    try:
        sig = _plain(value)
    except (ValueError, TypeError):
        return f"class {name}"
    text = f"{name}{sig}"
    if len(text) <= WIDTH:
        return text
    inside = ",\n".join(_lines(sig))
    returns = text.rpartition(" -> ")[2] if sig.return_annotation is not inspect.Signature.empty else ""
    return f"{name}(\n{textwrap.indent(inside, '    ')},\n)" + (f" -> {returns}" if returns else "")


def _lines(sig: inspect.Signature) -> list[str]:
    lines, starred = [], False
    for parameter in sig.parameters.values():
        starred |= parameter.kind is parameter.VAR_POSITIONAL
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            lines.append("*")
            starred = True
        lines.append(str(parameter))
    return lines


def _plain(value: Any) -> inspect.Signature:
    """Return a signature without `self` and the keywords from the table of options."""
    sig = inspect.signature(value)
    parameters = list(sig.parameters.values())
    if parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    returned = sig.return_annotation
    returned = _Raw(returned) if isinstance(returned, str) else returned
    return sig.replace(parameters=[_shown(parameter) for parameter in parameters], return_annotation=returned)


class _Raw(str):
    """A string shown without quotes in a signature."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _shown(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a parameter as code, without quotes around its annotation or addresses in its default."""
    annotation = parameter.annotation
    default = ... if " at 0x" in repr(parameter.default) else parameter.default
    return parameter.replace(
        annotation=_Raw(annotation) if isinstance(annotation, str) else annotation, default=default
    )


def body(text: str) -> list[str]:
    """Return a docstring as Markdown, with sections as lists and examples as code blocks."""
    parts: list[str] = []
    head, lines = "", []
    for line in [*text.splitlines(), "End:"]:
        found = HEADING.fullmatch(line) or line == "End:"
        if found:
            parts += _part(head, lines)
            head, lines = line.removesuffix(":"), []
        else:
            lines.append(line)
    return [part for part in parts if part]


def _part(head: str, lines: list[str]) -> list[str]:
    block = textwrap.dedent("\n".join(lines)).strip("\n")
    if not head:
        return [_prose(block)]
    if head == "Example":
        return ["**Example**", f"```pycon\n{block}\n```"]
    if head in ("Returns", "Yields"):
        return [f"**{head}** " + markdown(" ".join(block.split()))]
    entries = re.findall(r"^(\*{0,2}\w+): (.*(?:\n +.*)*)", block, re.MULTILINE)
    rows = [f"- `{name}`: {markdown(' '.join(words.split()))}" for name, words in entries]
    return [f"**{head}**", "\n".join(rows)] if rows else [f"**{head}** " + markdown(" ".join(block.split()))]


def _prose(block: str) -> str:
    """Return the paragraphs of a docstring as Markdown; indented ones are code."""
    shown = []
    for part in re.split(r"\n\n+", block):
        indented = all(line.startswith("    ") for line in part.splitlines()) and part
        shown.append(f"```\n{textwrap.dedent(part)}\n```" if indented else markdown(part))
    return "\n\n".join(shown)


def markdown(text: str) -> str:
    """Return a docstring's text with Markdown escaped, except in code."""
    pieces = re.split(r"(`[^`]*`|\[[^]]*\]\([^)]*\)|\bdocs/[\w/-]+\.md\b)", text)
    return "".join(_piece(piece) for piece in pieces)


def _piece(piece: str) -> str:
    if piece.startswith("`") or piece.endswith(".md)"):
        return piece
    if piece.startswith("docs/") and piece.endswith(".md"):
        return f"[{piece}](../{piece.removeprefix('docs/')})"
    return re.sub(r"([*_<\[\]])", r"\\\1", piece)


if __name__ == "__main__":
    for file, made in pages().items():
        (FOLDER / file).write_text(made, "utf-8")
