"""Rebuild `docs/rules` from the records of safety rules and fusions: `python tools/build_rules.py`."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from amp_rewrite.cli.commands.explain import described, records
from amp_rewrite.decide.reasons import DOCS, REASONS, Strength

FOLDER = Path(__file__).resolve().parent.parent / DOCS
INDEX = """# Rules

`tools/build_rules.py` generates these pages from the code. `amp-rewrite explain NAME` prints the same text.

The tiers are in order of precedence: if two reasons disagree about an op, the one in the higher tier applies.
"""


def main() -> None:
    """Write all pages, and remove those of deleted rules."""
    made = pages()
    for path in FOLDER.glob("*.md"):
        if path.name not in made:
            path.unlink()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in made.items():
        (FOLDER / name).write_text(text, "utf-8")


def pages() -> dict[str, str]:
    """Return the text of each page by file name."""
    return {"README.md": index(), **{f"{name}.md": page(name) for name in _records()}}


def index() -> str:
    """Return the tables of all rules and reasons, with a section for each tier."""
    lines = [INDEX]
    for tier in sorted(Strength, reverse=True):
        ids = [reason.name for reason in REASONS.values() if reason.strength is tier]
        lines += [f'<a name="{tier.name.lower()}"></a>\n## {tier.words.capitalize()}\n', *_table("rule", ids)]
    lines += [
        "## Fusions\n",
        "The findings `fused` and `not_fused` report fusions; [Findings](../reference/findings.md) lists all kinds.\n",
        *_table("fusion", ["fused"]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _table(head: str, ids: list[str]) -> list[str]:
    lines = [f"| {head} | meaning |", "|---|---|"]
    for name in (name for id in ids for name in _rules_of(id)):
        fact = described(name)
        meaning = (fact["promise"] or fact["words"]).replace("|", "\\|")
        lines.append(f"| [`{name}`]({name}.md) | {meaning} |" if fact["promise"] else f"| `{name}` | {meaning} |")
    return [*lines, ""]


def _records() -> dict[str, Any]:
    return {record.name: record for record in records().values()}


def _rules_of(reason: str) -> list[str]:
    """Return the rules with a reason, or the reason itself if there are none."""
    return [name for name, record in _records().items() if record.reason == reason] or [reason]


def page(name: str) -> str:
    """Return the page of one rule."""
    fact = described(name)
    same = _rules_of(fact["reason"]) if fact["reason"] in REASONS else ()
    others = [f"[`{other}`]({other}.md)" for other in same if other != name]
    shared = f" {', '.join(others)} {'gives' if len(others) == 1 else 'give'} the same reason." if others else ""
    words = f'In reports: `{fact["reason"]}`, "{fact["words"]}".'
    if fact["reason"] not in REASONS:
        words = f"Reported as the finding `{fact['reason']}`: {fact['words']}."
    parts = [f"# {name}", fact["promise"], words + shared]
    for head, text in fact["sections"].items():
        parts += [f"## {head}", textwrap.fill(text, 120, break_on_hyphens=False)]
    for head, text in fact["models"].items():
        parts += [f"## {head}", f"```\n{text.rstrip()}\n```"]
    parts.append("[All rules](README.md)")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
