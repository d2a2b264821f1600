"""Habits from other tools: their words for options and values, and two files in a row."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import onnx.parser
import pytest

import amp_rewrite
from unit.cli.test_cli import TEXT, run

HELP = "see 'amp-rewrite {} --help'\n"
NET = "net.onnx"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(onnx.parser.parse_model(TEXT), NET)


@pytest.mark.parametrize(
    ("word", "option"),
    [
        ("--outptu", "--output"),
        ("--dry_run", "--dry-run"),
        ("--saftey", "--set safety=…"),
        ("--dtype", "--to"),
        ("--precision", "--to"),
        ("--allow_nonfinite", "--set allow-nonfinite=…"),
    ],
)
def test_a_misspelled_option_gets_the_name_it_has_here(word: str, option: str) -> None:
    done = run("convert", NET, word, "x")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"error: no such option {word}; did you mean {option}? S{HELP[1:].format('convert')}"


KEYS = "it reads external-data"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("convert net.onnx --set saftey=none", "--set: unknown key 'saftey'; did you mean 'safety'?"),
        ("convert net.onnx --set safety", "--set takes KEY=VALUE, and 'safety' has no value; write --set safety=…"),
        ("convert net.onnx --set to=bfloat16", "--set to: this setting has an option of its own; write --to bfloat16"),
        (
            "convert net.onnx --set overwrite=true",
            "--set overwrite: this setting has an option of its own; write --overwrite",
        ),
        ("convert net.onnx --set safety=off", "--set safety: unknown value 'off' for safety; use one of default, none"),
        ("convert net.onnx --set headroom=much", "--set headroom: headroom='much' is str; give a number"),
        ("convert net.onnx --set steps=1.5", "--set steps: steps='1.5' is str; give a whole number"),
        ("convert net.onnx --set external-data=1", "--set external-data: external_data='1' is str; give True or False"),
        ("emulate net.onnx --set safety=none", f"--set safety: emulate does not read this setting; {KEYS}"),
    ],
)
def test_a_setting_that_is_wrong_says_what_to_type(words: str, said: str) -> None:
    done = run(*words.split())
    assert (done.exit_code, done.stdout) == (2, "")
    assert (
        done.stderr == f"error: {said}{' S' if said.endswith('?') else '; s'}{HELP[1:].format(words.partition(' ')[0])}"
    )


def test_a_setting_is_what_the_file_and_the_keyword_are() -> None:
    by_word = run(NET, "--dry-run", "--json", "--set", "safety=none", "--set", "allow_nonfinite=TRUE").stdout
    Path("own.toml").write_text('safety = "none"\nallow-nonfinite = true\n')
    by_file = run(NET, "--dry-run", "--json", "--config", "own.toml").stdout
    report = amp_rewrite.convert(NET, safety="none").report
    assert json.loads(by_word)["rows"] == json.loads(by_file)["rows"] == json.loads(report.to_json())["rows"]
    assert json.loads(by_word)["model"]["safety"] == "none"


@pytest.mark.parametrize(
    ("words", "hint"),
    {
        "convert net.onnx --target tensort": "--target: unknown value 'tensort' for target; did you mean 'tensorrt'?",
        "convert net.onnx --fuse contribs": "--fuse: unknown value 'contribs' for fuse; did you mean 'contrib'?",
        "diff net.onnx net.onnx --format jsn": "'jsn' is not one of 'text', 'json', 'markdown', 'github'",
    }.items(),
)
def test_a_value_that_is_misspelled_gets_a_hint(words: str, hint: str) -> None:
    done = run(*words.split())
    assert (done.exit_code, done.stdout) == (2, "")
    assert hint in done.stderr
