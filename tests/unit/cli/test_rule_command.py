"""`amp-rewrite explain` of rules, the pages in docs/rules, and the links to them."""

import re
import textwrap
from dataclasses import replace

import pytest
from click.testing import CliRunner, Result

from amp_rewrite.cli import program
from amp_rewrite.cli.commands.explain import described
from amp_rewrite.decide.reasons import DOCS, KINDS, REASONS, RULES, Reason
from amp_rewrite.reports.explain import explained
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.rows import Row
from amp_rewrite.rewrite.fusions import FUSIONS, FusionRule
from support.paths import ROOT

RECORDS = (*RULES, *FUSIONS)
NAMES = {*REASONS, *KINDS, *(record.name for record in RECORDS)}


def run(*words: str) -> Result:
    return CliRunner().invoke(program, ["explain", *words])


def test_without_a_name_all_rules_reasons_and_kinds_are_listed() -> None:
    head, *lines = run("rules").stdout.splitlines()
    assert head.split() == ["rule", "tier", "says"]
    listed = [line.split()[0] for line in lines]
    assert (len(listed), set(listed)) == (len(NAMES), NAMES)
    assert re.split("  +", next(line for line in lines if line.startswith("deny "))) == [
        "deny",
        "lists and level",
        "on the deny list",
    ]


@pytest.mark.parametrize("rule", RECORDS, ids=[record.name for record in RECORDS])
def test_a_rule_is_printed_with_headings_models_and_page(rule: Reason | FusionRule) -> None:
    text = run(rule.name).stdout
    assert text.startswith(f"{rule.name}: {rule.promise}\n")
    assert all(f"\n\n{head}\n  " in text for head in rule.sections)
    assert all(
        textwrap.indent(rule.model(end, case), "  ") in f"{text}\n" for case in rule.pairs for end in ("hit", "near")
    )
    assert f"docs        {DOCS}/{rule.name}.md" in text


def test_cases_of_a_rule_have_models_of_their_own() -> None:
    fact = described("accumulators")
    assert (fact["name"], fact["reason"]) == ("running_sum", "running_sum")
    ends = ("Smallest model that needs it", "Nearest model that it leaves alone")
    cases = ("accumulators", "state", "recursion", "small_step", "disguise", "weighted_mean")
    assert set(fact["models"]) == {f"{end}: {case}" for end in ends for case in cases}
    assert "--json explains ops of a model" in run("accumulators", "--json").stderr


def test_a_rule_page_says_what_to_do_and_explain_names_that_page() -> None:
    report = Report.from_json((ROOT / "tests" / "golden" / "report.json").read_bytes(), "report.json")
    rows = (Row("a", "Sin", "float32", rule="position"), Row("b", "Exp", "float32", rule="deny"))
    told = replace(report, rows=rows, casts=())
    assert "    more: amp-rewrite explain position, or docs/rules/position.md\n" in str(explained(told, ["a"]))
    assert "docs/rules" not in str(explained(told, ["b"]))
    said = run("overflow").stdout
    assert "  meaning     the ops that compute with it stay float32\n" in said
    assert "  what to do  --to bfloat16 holds larger values\n" in said
    assert "what to do" not in run("allow_root").stdout
