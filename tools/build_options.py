"""Rebuild docs/reference/options.md from the table of options: `python tools/build_options.py`."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from amp_rewrite.settings.option import ADVANCED, DATA, OUTPUT, PRECISION, Kind, Option
from amp_rewrite.settings.options import OPTIONS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "options.md"
HEAD = """# Options

Each option is a keyword of `convert`, `repair` and `Session`, an option of the command line, and a key of `amp.toml` or
of the table `[tool.amp-rewrite]` in `pyproject.toml`. A dash marks a place that does not have it; the sentence then
names the Python function that takes it. The command line wins over the environment, and that over the file. Keys may
have "_" for "-".
"""
WORDS = {
    Kind.TEXT: "text",
    Kind.LIST: "list of text",
    Kind.SWITCH: "true or false",
    Kind.NUMBER: "number",
    Kind.PATH: "path",
}


def page() -> str:
    """Return the text of the page."""
    order = (PRECISION, DATA, OUTPUT, ADVANCED)
    parts = [HEAD]
    for group, rows in groupby(sorted(OPTIONS, key=lambda row: order.index(row.group)), key=lambda row: row.group):
        parts.append(f"\n## {group}\n")
        parts += [_section(row) for row in rows]
    return "".join(parts)


def _section(row: Option) -> str:
    spelled = f"--{row.key}" + (f" {row.metavar}" if row.metavar else "")
    if row.kind is Kind.SWITCH and not row.flag:
        spelled += f", --no-{row.key}"
    facts = {
        "Python": f"`{row.name}={row.default!r}`" if row.keyword else "",
        "command line": f"`{spelled}`" if row.help else "",
        "key": f"`{row.key}`: {WORDS[row.kind]}" if row.setting else "",
        "environment": f"`{row.environment}`" if row.environment else "",
        "stated in report and metadata": row.stated.name.lower() if row.stated else "",
    }
    lines = [f"- {name}: {fact or '–'}" for name, fact in facts.items()]
    return "\n".join([f"\n### {row.name}\n", f"{row.doc[0].upper()}{row.doc[1:]}.\n", *lines, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
