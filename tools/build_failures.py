"""Rebuild docs/failures from failures.yaml there: `python tools/build_failures.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "failures"
TESTS = "../../tests/suites/catalogue"
INDEX = f"""# Failures of half-precision conversion

These pages list 60 ways in which a conversion to float16 or bfloat16 can fail, by error text or symptom. Each has a
minimal model in [tests/suites/catalogue]({TESTS}). Tests convert it with the default settings and with other types,
targets, opsets and fusions. The result must pass the checker, load, lower exactly the intended ops, and compute the
same outputs as the float32 model does when every lowered result is rounded. Another test shows that a naive whole-graph
converter fails on the model with the error quoted on its page (except for two additional models, in rows 4 and 11).
[failures.yaml](failures.yaml) contains the text of these pages, and `tools/build_failures.py` generates them.
"""
PLAIN = "Convert the float32 model: `amp-rewrite model.onnx -o model.float16.onnx`. No option is needed."
GROUPS = {
    "The conversion fails, or its result does not load": range(1, 37),
    "Wrong or slow results": range(37, 61),
}


def rows() -> dict[int, dict[str, Any]]:
    """Return the failures by number."""
    loaded: dict[int, dict[str, Any]] = yaml.safe_load((FOLDER / "failures.yaml").read_text("utf-8"))
    return loaded


def pages() -> dict[str, str]:
    """Return the text of each page by file name."""
    return {"README.md": index(), **{f"{row['page']}.md": page(number, row) for number, row in rows().items()}}


def index() -> str:
    """Return the table of all failures."""
    known = rows()
    parts = [INDEX.rstrip()]
    for head, numbers in GROUPS.items():
        lines = [f"| {number} | [{_plain(known[number]['title'])}]({known[number]['page']}.md) |" for number in numbers]
        parts += [f"## {head}", "\n".join(["| # | error or symptom |", "|---|---|", *lines])]
    return "\n\n".join(parts) + "\n"


def page(number: int, row: dict[str, Any]) -> str:
    """Return the page of one failure."""
    case, is_test = row["test"], row["test"].startswith("test_")
    where = f"Test: `{case}`" if is_test else f"Smallest model: *{case}*"
    rules = ", ".join(f"[`{name}`](../rules/{name}.md)" for name in row.get("rules", ()))
    parts = [f"# {_plain(row['title'])}", f"**Cause.** {row['cause']}"]
    if "seen" in row and number < GROUPS["Wrong or slow results"].start:
        parts.append(f"**Error** from a naive conversion of the smallest model:\n\n```\n{row['seen']}\n```")
    parts += [f"**What amp-rewrite does.** {row['here']}" + (f" Rules: {rules}." if rules else "")]
    parts += [f"**What to do.** {row['do'].replace('Nothing.', PLAIN)}"]
    parts += [f"{where} ([catalogue]({TESTS}), row {number}). [All failures](README.md)"]
    return "\n\n".join(parts) + "\n"


def _plain(title: str) -> str:
    """Return a title as Markdown text."""
    return title.replace("_", "\\_").replace("*", "\\*").replace("[", "\\[").replace("]", "\\]")


def main() -> None:
    """Write all pages, and remove those of deleted failures."""
    made = pages()
    for path in FOLDER.glob("*.md"):
        if path.name not in made:
            path.unlink()
    for name, text in made.items():
        (FOLDER / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
