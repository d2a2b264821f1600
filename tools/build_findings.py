"""Rebuild docs/reference/findings.md from the records of findings: `python tools/build_findings.py`."""

from __future__ import annotations

from pathlib import Path

from amp_rewrite.cli.commands.explain import described
from amp_rewrite.decide.reasons import KINDS, REASONS, meaning

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "findings.md"
HEAD = """# Findings

A finding is a fact about a conversion in its report: what happened, what it means, and what to do.
`amp-rewrite explain KIND` prints the same text; `--verbose` prints all findings of a conversion. In JSON, `findings`
lists them with `kind`, `subject` and `message`. `tools/build_findings.py` writes this page from the code.
"""


def page() -> str:
    """Return the text of the page."""
    about = dict(sorted(KINDS.items()))
    values = {id: reason.words for id, reason in REASONS.items() if any(meaning(id))}
    parts = [HEAD, "## Findings about a conversion", _table(about)]
    parts += [
        "## Ops that keep their type",
        'The kind is the op\'s [rule](../rules/README.md); "it" is the op or its result.',
        _table(values),
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _table(kinds: dict[str, str]) -> str:
    lines = ["| kind | what happened | what it means | what to do |", "|---|---|---|---|"]
    for kind, words in kinds.items():
        means, remedy = meaning(kind)
        fact = described(kind)
        shown = f"[`{kind}`](../rules/{Path(fact['docs']).name})" if fact["promise"] else f"`{kind}`"
        cells = [shown, *(text.replace("|", "\\|") for text in (words, means, remedy or "nothing"))]
        lines.append(f'| <a name="{kind}"></a>{" | ".join(cells)} |')
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
