"""Count the words of the documentation by group: `python tools/count_words.py [CHECKOUT]`."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MADE = {
    "generated from code": (
        *("rules/*.md", "failures/*.md", "reference/api*.md"),
        *(f"reference/{name}.md" for name in ("commands", "findings", "options")),
    ),
    "measured": (
        "conformance.md",
        *(f"evidence/{name}.md" for name in ("hard_models", "harm", "peers", "gpu", "webgpu")),
    ),
}
"""Pages that nobody writes by hand, by who does."""
WRITTEN = re.compile(r"<!-- written by .*?<!-- end -->", re.DOTALL)
"""Part of a page that a benchmark writes."""


def words(checkout: Path = ROOT) -> Counter[str]:
    """Return the number of words in each group of pages in docs/."""
    docs = checkout / "docs"
    groups = {path: group for group, patterns in MADE.items() for pattern in patterns for path in docs.glob(pattern)}
    counted: Counter[str] = Counter()
    for path in sorted(docs.rglob("*.md")):
        text = path.read_text("utf-8")
        measured = sum(len(part.split()) for part in WRITTEN.findall(text))
        folder = path.relative_to(docs).parts[0] if path.parent != docs else "overview, architecture"
        counted[groups.get(path, folder)] += len(re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL).split()) - measured
        counted["measured"] += measured
    return counted


def main() -> None:
    """Print a line for each group, and the sum of what people write."""
    counted = words(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT)
    for group in sorted(set(counted) - set(MADE)):
        print(f"{counted[group]:7d}  {group}")
    print(f"{sum(counted.values()) - sum(counted[group] for group in MADE):7d}  written by hand")
    for group in MADE:
        print(f"{counted[group]:7d}  {group}")


if __name__ == "__main__":
    main()
