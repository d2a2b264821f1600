"""Rebuild docs/reference/decisions.md from the code and from decisions: `python tools/build_decisions.py`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from decisions import exports, rules  # noqa: E402

from amp_rewrite import convert  # noqa: E402
from amp_rewrite.decide import reasons  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "decisions.md"
FOLDERS = ("decide", "evidence", "train/step")
"""The folders with code that sets reasons; all other code only reads them."""
HEAD = """# Where decisions are made

Each row of a report has a reason. This page lists the functions that set each reason, with an example op from an
exported model in the tests or from the models of a [rule](../rules/README.md). To change a decision, start in that
function. `tools/build_decisions.py` writes this page by converting the models.

| reason | set in | model | op |
|---|---|---|---|"""


def page() -> str:
    """Return the text of the page."""
    uses, examples = _uses(), dict(_examples())
    lines = []
    for reason in reasons.REASONS:
        model, op = examples.get(reason, ("", ""))
        places = "<br>".join(f"`{place}`" for place in uses.get(reason, ()))
        lines.append(
            f"| [`{reason}`](../{reasons.REASONS[reason].docs.removeprefix('docs/')}) | {places} | {model} | {op} |"
        )
    return "\n".join([HEAD, *lines]) + "\n"


def _examples() -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield each reason with the first model and op for it."""
    seen: set[str] = set()
    for source in (*exports(), *rules()):
        for row in convert(source.model(), opset="keep", fuse="none", **source.options).report.rows:
            if row.rule is not None and row.rule not in seen:
                seen.add(row.rule)
                yield row.rule, (source.name, f"{row.name} ({row.op})")


def _uses() -> dict[str, list[str]]:
    """Return the functions that use each reason, by file."""
    ids = {name: value for name, value in vars(reasons).items() if isinstance(value, str) and value in reasons.REASONS}
    uses: dict[str, list[str]] = {}
    package = ROOT / "amp_rewrite"
    for path in sorted(path for part in FOLDERS for path in (package / part).rglob("*.py")):
        if path.name not in ("reasons.py", "rule.py"):
            for name, place in _references(ast.parse(path.read_text("utf-8"))):
                if name in ids:
                    where = f"{path.relative_to(package).as_posix()}: {place}"
                    places = uses.setdefault(ids[name], [])
                    if where not in places:
                        places.append(where)
    return uses


def _references(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield each `reasons.NAME` in a module, with the function or constant around it."""
    for node in tree.body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        for part in inner:
            target = part.targets[0] if isinstance(part, ast.Assign) else getattr(part, "target", None)
            place = getattr(part, "name", None) or (target.id if isinstance(target, ast.Name) else "")
            for name in ast.walk(part):
                if isinstance(name, ast.Attribute) and isinstance(name.value, ast.Name) and name.value.id == "reasons":
                    yield name.attr, place


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
