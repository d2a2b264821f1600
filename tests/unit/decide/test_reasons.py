"""Reasons: ids, words and tiers."""

from __future__ import annotations

from pathlib import Path

from amp_rewrite.decide import reasons
from amp_rewrite.decide.reasons import REASONS, Strength

PACKAGE = Path(reasons.__file__).parents[1]


def test_a_constant_is_the_id_in_capitals() -> None:
    assert {name.lower(): getattr(reasons, name) for name in map(str.upper, REASONS)} == {id: id for id in REASONS}
    assert {id: reason.id for id, reason in REASONS.items()} == {id: id for id in REASONS}


def test_tiers_stand_in_the_order_of_the_architecture_page() -> None:
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text("utf-8")
    order = page.partition("Precedence: ")[2].partition(".")[0].replace("\n", " ").split(" > ")
    assert order == [tier.words for tier in sorted(Strength, reverse=True)]


def test_a_rule_of_another_version_is_its_own_words() -> None:
    assert reasons.words("rule_of_tomorrow") == "rule_of_tomorrow"
