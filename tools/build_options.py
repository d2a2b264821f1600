"""Rebuild docs/reference/options.md from the table of options: `python tools/build_options.py`."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from amp_rewrite.settings.option import DATA, OUTPUT, PRECISION, Kind, Option
from amp_rewrite.settings.request import KEYWORDS, OPTIONS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "options.md"
HEAD = """# Options

Each option is a keyword of `convert`, `repair` and `Session`, and a key of `amp.toml`. The command line has options for
the common ones, and takes the others as `--set KEY=VALUE`. A dash means that there is no such keyword, option, key or
variable; if there is no keyword, the description names the Python function that takes the option. The command line
overrides the environment, which overrides the file. Keys may contain "_" instead of "-".
"""
WORDS = {
    Kind.TEXT: "string",
    Kind.LIST: "list of strings",
    Kind.SWITCH: "true or false",
    Kind.NUMBER: "number",
    Kind.WHOLE: "integer",
    Kind.PATH: "path",
}


def page() -> str:
    """Return the text of the page."""
    order = (PRECISION, DATA, OUTPUT)
    parts = [HEAD]
    options = sorted(OPTIONS.values(), key=lambda row: order.index(row.group))
    for group, rows in groupby(options, key=lambda row: row.group):
        parts.append(f"\n## {group}\n")
        parts += [_section(row) for row in rows]
    return "".join(parts)


def _section(row: Option) -> str:
    value = row.metavar or ("true|false" if row.kind is Kind.SWITCH else "X")
    own = f"--{row.key}" + (f" {row.metavar}" if row.metavar else "")
    spelled = own if row.help else f"--set {row.key}={value}"
    facts = {
        "Python": f"`{row.name}={row.default!r}`" if row.name in KEYWORDS else "",
        "command line": f"`{spelled}`" if spelled else "",
        "key": f"`{row.key}`: {WORDS[row.kind]}",
        "environment": f"`{row.environment}`" if row.environment else "",
        "shown in report and metadata": row.recorded,
    }
    lines = [f"- {name}: {fact or '–'}" for name, fact in facts.items()]
    return "\n".join([f"\n### {row.name}\n", f"{row.doc[0].upper()}{row.doc[1:]}.\n", *lines, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
