"""Help: short, complete, unchanged, with working examples; rules in `explain`.

`make golden` runs this file as a program, which writes the current help of every command.
"""

import os
import re
import shlex
import textwrap
from dataclasses import replace
from importlib import metadata

import click
import pytest

from amp_rewrite.cli import program
from amp_rewrite.cli.commands.explain import described
from amp_rewrite.cli.group import COMMANDS, EXAMPLES, GROUPS
from amp_rewrite.decide.reasons import DOCS, KINDS, REASONS, RULES, Reason
from amp_rewrite.reports.explain import explained
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.rows import Row
from amp_rewrite.rewrite.fusions import FUSIONS, FusionRule
from support.paths import ROOT, TESTS
from unit.cli.test_cli import run

FILE = TESTS / "golden" / "help.txt"


ALL = {name: command for name in COMMANDS if (command := program.get_command(None, name))}


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def every_help() -> str:
    """Return the help of every command, after the release of click that formats it."""
    helps = (run(*name.split(), "--help").stdout for name in ("", *ALL))
    return "\n".join((f"click {metadata.version('click')}\n", *helps))


def test_the_help_of_every_command_is_unchanged() -> None:
    before, now = FILE.read_text("utf-8"), every_help()
    if before.partition("\n")[0] != now.partition("\n")[0]:
        pytest.skip(f"the help is that of {before.partition(chr(10))[0]}")
    assert now == before


@pytest.mark.parametrize("name", ALL)
def test_every_option_of_a_command_is_in_its_help(name: str) -> None:
    words = run(*name.split(), "--help").stdout.split()
    for param in ALL[name].params:
        if isinstance(param, click.Option) and not getattr(param, "borrowed", False):
            assert {*param.opts, *param.secondary_opts} <= {word.rstrip(",") for word in words}


@pytest.mark.parametrize("name", ["", *ALL])
def test_help_fits_eighty_columns(name: str) -> None:
    done = run(*name.split(), "--help")
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 40


@pytest.mark.parametrize("name", ["", *ALL])
def test_every_help_has_an_example_that_parses(name: str) -> None:
    assert "\nExample" in run(*name.split(), "--help").stdout
    for example in EXAMPLES[name]:
        words = shlex.split(example.partition(" >")[0] if " > " in example and "'" not in example else example)
        with program.make_context("amp-rewrite", ["convert", *words] if words[0] not in COMMANDS else words) as ctx:
            _, command, rest = program.resolve_command(ctx, [*ctx._protected_args, *ctx.args])
            assert command is not None
            command.make_context("any", rest, parent=ctx)


REPEATED = {"--shape", "--lists", "--keep", "--lower", "--io", "--fail-on"}
"""Options that may be repeated although their help does not say so: one each for inputs, ops or files."""


def test_options_may_be_repeated_as_in_the_help_and_modules_define_commands() -> None:
    options = [(name, p) for name, command in ALL.items() for p in command.params if isinstance(p, click.Option)]
    assert {(name, p.opts[0]) for name, p in options if p.multiple} == {
        (name, p.opts[0])
        for name, p in options
        if "repeatable" in (p.help or "") or (p.opts[0] in REPEATED and not isinstance(p.type, click.Choice))
    }
    folder = ROOT / "amp_rewrite" / "cli" / "commands"
    modules = {path.stem for path in folder.glob("*.py") if path.stem != "__init__"}
    assert {command.callback.__module__.rpartition(".")[2] for command in ALL.values()} == modules
    assert len(COMMANDS) == sum(map(len, GROUPS.values())) <= 14


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_has_the_first_sentence_of_a_commands_help(name: str) -> None:
    command = ALL[name]
    assert command.name == name
    assert command.get_short_help_str(1000) == COMMANDS[name]


# -- `amp-rewrite explain` of rules, and the links to their pages -----------------------------------------

RECORDS = (*RULES, *FUSIONS)
NAMES = {*REASONS, *KINDS, *(record.name for record in RECORDS)}


def test_without_a_name_all_rules_reasons_and_kinds_are_listed() -> None:
    head, *lines = run("explain", "rules").stdout.splitlines()
    assert head.split() == ["rule", "tier", "meaning"]
    listed = [line.split()[0] for line in lines]
    assert (len(listed), set(listed)) == (len(NAMES), NAMES)
    assert re.split("  +", next(line for line in lines if line.startswith("deny "))) == [
        "deny",
        "lists and level",
        "on the deny list",
    ]


@pytest.mark.parametrize("rule", RECORDS, ids=[record.name for record in RECORDS])
def test_a_rule_is_printed_with_headings_models_and_page(rule: Reason | FusionRule) -> None:
    text = run("explain", rule.name).stdout
    assert text.startswith(f"{rule.name}: {rule.summary}\n")
    assert all(f"\n\n{head}\n  " in text for head in rule.sections)
    assert all(
        textwrap.indent(rule.model(end, case), "  ") in f"{text}\n" for case in rule.pairs for end in ("hit", "near")
    )
    assert f"docs        {DOCS}/{rule.name}.md" in text


def test_each_case_of_a_rule_has_its_own_model() -> None:
    fact = described("accumulators")
    assert (fact["name"], fact["reason"]) == ("running_sum", "running_sum")
    ends = ("Smallest model that triggers it", "Closest model that does not trigger it")
    cases = ("accumulators", "state", "recursion", "small_step", "disguise", "weighted_mean")
    assert set(fact["models"]) == {f"{end}: {case}" for end in ends for case in cases}
    assert "--json explains ops of a model" in run("explain", "accumulators", "--json").stderr


def test_a_rule_page_has_a_remedy_and_explain_names_the_page() -> None:
    report = Report.from_json((ROOT / "tests" / "golden" / "report.json").read_bytes(), "report.json")
    rows = (Row("a", "Sin", "float32", rule="position"), Row("b", "Exp", "float32", rule="deny"))
    report_of_b = replace(report, rows=rows, casts=())
    assert "    more: amp-rewrite explain position, or docs/rules/position.md\n" in str(explained(report_of_b, ["a"]))
    assert "docs/rules" not in str(explained(report_of_b, ["b"]))
    text = run("explain", "overflow").stdout
    assert "  meaning     the ops that compute with them stay float32\n" in text
    assert "  what to do  try --to bfloat16, which represents larger values\n" in text
    assert "what to do" not in run("explain", "allow_root").stdout


if __name__ == "__main__":
    os.environ["COLUMNS"] = "80"
    FILE.write_text(every_help(), "utf-8")
