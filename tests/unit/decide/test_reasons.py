"""Reasons: every rule id comes from `decide/reasons.py`, in code and in reports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from amp_rewrite.decide import reasons
from amp_rewrite.decide.reasons import REASONS, Strength

PACKAGE = Path(reasons.__file__).parents[1]
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != Path(reasons.__file__))
CARRIERS = {"Pin", "Paint", "GateRefusal", "RangeFault", "high"}
"""What is built with a rule id."""
OTHER_MEANINGS = {
    "compat": {"keep"},
    "cli": {"check", "keep", "lower", "loss", "deny", "unlisted"},
    "decide": {"epsilon"},
    "evidence": {"overflow", "nonfinite"},
    "reports": {"raised", "folded"},
    "reports/page": {"product", "overflow", "nonfinite", "repair", "table", "raised", "folded"},
    "rewrite": {"epsilon", "folded", "raised"},
    "runtime": {"keep"},
    "settings": {"keep", "lower", "deny", "unlisted", "quantized"},
    "train": {"epsilon", "loss", "update"},
}
"""By wing or part of one the words that are also names of options, list colors, attributes, columns, kinds of change or
elements of HTML, or parts of names of values."""


def literals(tree: ast.AST) -> Iterator[str]:
    """The registered ids among the string literals of a tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in REASONS:
            yield node.value


def as_rules(tree: ast.AST) -> Iterator[str]:
    """The registered ids that stand as literals where a rule id is compared, handed on or looked up."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and any(_is_rule(side) for side in (node.left, *node.comparators)):
            yield from literals(node)
        elif isinstance(node, ast.Call):
            name = _last_name(node.func)
            for argument in node.args[:2] if name in CARRIERS else ():
                yield from literals(argument)
            if name == "get" and node.args and _is_rule(node.args[0]):
                yield from literals(node.func)
        elif isinstance(node, ast.keyword) and node.arg == "rule":
            yield from literals(node.value)


def _is_rule(node: ast.AST) -> bool:
    return _last_name(node) == "rule"


def _last_name(node: ast.AST) -> str:
    """The name that a dotted expression ends in; unparsing all would take ten times as long."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_rule_id_is_a_bare_string(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    *folders, _ = path.relative_to(PACKAGE).parts
    assert list(as_rules(tree)) == []
    assert set(literals(tree)) <= OTHER_MEANINGS.get(
        "/".join(folders[:2]), OTHER_MEANINGS.get(path.relative_to(PACKAGE).parts[0], set())
    )


@pytest.mark.parametrize(
    "code",
    [
        "row.rule == 'raised'",
        "fault.rule not in (None, 'raised')",
        "Pin(op, 'raised', None, note)",
        "coloring.Paint(to, 'raised')",
        "state.high('raised', None)",
        "Row(name, rule='raised')",
        "{'raised': 1}.get(fault.rule, fault.note)",
    ],
)
def test_bare_rule_ids_are_found_where_they_hide(code: str) -> None:
    assert list(as_rules(ast.parse(code))) == ["raised"]


def test_a_constant_is_the_id_in_capitals() -> None:
    assert {name.lower(): getattr(reasons, name) for name in map(str.upper, REASONS)} == {id: id for id in REASONS}
    assert {id: reason.id for id, reason in REASONS.items()} == {id: id for id in REASONS}


def test_tiers_stand_in_the_order_of_the_architecture_page() -> None:
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text("utf-8")
    order = page.partition("Precedence: ")[2].partition(".")[0].replace("\n", " ").split(" > ")
    assert order == [tier.words for tier in sorted(Strength, reverse=True)]


def test_a_rule_of_another_version_is_its_own_words() -> None:
    assert reasons.words("rule_of_tomorrow") == "rule_of_tomorrow"
