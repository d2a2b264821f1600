"""Records of the safety rules and reasons: headings, models, names, ids and tiers."""

from pathlib import Path

import onnx.parser
import pytest

from amp_rewrite import Report, convert, decide
from amp_rewrite.decide import reasons
from amp_rewrite.decide.reasons import HEADINGS, REASONS, RULES, Reason, Strength
from support import objections

named = pytest.mark.parametrize("rule", RULES, ids=[rule.name for rule in RULES])
CASES = [(rule, case) for rule in RULES for case in rule.pairs]


def report_of(text: str, target: str = "", safety: str = "default") -> Report:
    model = onnx.parser.parse_model(text)
    onnx.checker.check_model(model, full_check=True)
    result = convert(model, target=target or None, safety=safety)
    assert objections.of_checker(result.model) == objections.of_casts(result.model) == []
    return result.report


def speaks(rule: Reason, report: Report) -> bool:
    """Whether a rule speaks in a report, in a row or by a finding."""
    said = {row.rule for row in report.rows} | {finding.kind for finding in report.findings}
    return not said.isdisjoint((rule.reason, *rule.findings))


@named
def test_a_rule_has_its_promise_and_something_under_each_heading(rule: Reason) -> None:
    assert rule.promise.endswith(".") and "\n" not in rule.promise
    assert tuple(rule.sections) == HEADINGS
    assert all(text[-1] in ".;" for text in rule.sections.values())


@pytest.mark.parametrize(("rule", "case"), CASES, ids=[case for _, case in CASES])
def test_a_rule_speaks_of_its_model_and_not_of_the_nearest_one(rule: Reason, case: str) -> None:
    assert speaks(rule, report_of(rule.model("hit", case), rule.target))
    assert not speaks(rule, report_of(rule.model("near", case), rule.target))
    unsafe = report_of(rule.model("hit", case), rule.target, safety="none")
    assert rule.reason not in {row.rule for row in unsafe.rows}


def test_every_model_beside_the_rules_belongs_to_one() -> None:
    held = {path.name for path in (Path(decide.__file__).parent / "needs/models").iterdir()}
    assert held == {f"{case}.{end}.onnxtxt" for _, case in CASES for end in ("hit", "near")}


def test_every_reason_of_a_safety_rule_has_the_record_of_that_name() -> None:
    safety = {name for name, reason in REASONS.items() if reason.strength is Strength.SAFETY}
    assert {rule.name for rule in RULES} == safety


PACKAGE = Path(reasons.__file__).parents[1]


def test_a_constant_is_the_id_in_capitals() -> None:
    assert {name.lower(): getattr(reasons, name) for name in map(str.upper, REASONS)} == {id: id for id in REASONS}
    assert {id: reason.name for id, reason in REASONS.items()} == {id: id for id in REASONS}


def test_tiers_stand_in_the_order_of_the_architecture_page() -> None:
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text("utf-8")
    order = page.partition("Precedence: ")[2].partition(".")[0].replace("\n", " ").split(" > ")
    assert order == [tier.words for tier in sorted(Strength, reverse=True)]


def test_a_rule_of_another_version_is_its_own_words() -> None:
    assert reasons.words("rule_of_tomorrow") == "rule_of_tomorrow"
