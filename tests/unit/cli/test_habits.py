"""Habits from other tools: their words for options and values, and two files in a row."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.parser
import pytest

from amp_rewrite.settings.choices import Target
from unit.cli.test_cli import TEXT, run

HELP = "; see 'amp-rewrite {} --help'\n"
NET = "net.onnx"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(onnx.parser.parse_model(TEXT), NET)


@pytest.mark.parametrize(
    ("word", "option"),
    [
        ("--dtype", "--to"),
        ("--fp16", "--to float16"),
        ("--bf16", "--to bfloat16"),
        ("--half", "--to float16"),
        ("--output-file", "--output"),
        ("--outptu", "--output"),
        ("--op_block_list", "--keep"),
        ("--keep_io_types", "--io"),
        ("--gray_follows_allow", "--gray-follows-allow"),
        ("--trt", "--target tensorrt"),
        ("--force", "--overwrite"),
    ],
)
def test_an_option_of_another_tool_gets_the_name_it_has_here(word: str, option: str) -> None:
    done = run("convert", NET, word, "x")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"error: no such option {word}; did you mean {option}?{HELP.format('convert')}"


def test_only_options_that_the_command_has_are_suggested() -> None:
    assert run("completion", "--fp16").stderr == f"error: no such option --fp16{HELP.format('completion')}"


@pytest.mark.parametrize(("word", "target"), [("cuda", "ort-cuda"), ("GPU", "ort-cuda"), ("trt", "tensorrt")])
def test_targets_have_short_names(word: str, target: str) -> None:
    assert Target.parse(word).value == target
    assert f"target {target}" in run(NET, "--dry-run", "--target", word).stdout


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (
            ["convert", "net.onnx", "--target", "tensort"],
            "--target: unknown value 'tensort' for target; did you mean 'tensorrt'?",
        ),
        (
            ["convert", "net.onnx", "--fuse", "contribs"],
            "--fuse: unknown value 'contribs' for fuse; did you mean 'contrib'?",
        ),
        (["diff", "net.onnx", "net.onnx", "--format", "jsn"], "did you mean 'json'?"),
        (["emulate", "net.onnx", "--io", "float23"], "did you mean 'float32'?"),
    ],
)
def test_a_value_that_is_misspelled_gets_a_hint(words: list[str], hint: str) -> None:
    done = run(*words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert hint in done.stderr
