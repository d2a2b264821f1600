"""`--report` of the commands that measure and compare: the page, its numbers, and what is refused before the work."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from click.testing import CliRunner

from amp_rewrite.cli import program

HEAD = '<ir_version: 10, opset_import: ["": 20]> g (float[3] x) => (float[3] y)'
MODELS = {
    "full.onnx": HEAD + " <float a = {300}, float b = {0.00390625}> { [up] p = Mul (x, a) [down] y = Mul (p, b) }",
    "half.onnx": HEAD + " <float16 a = {23728}, float16 b = {7168}>"
    " { h = Cast <to = 10> (x) [up] p = Mul (h, a) [down] q = Mul (p, b) y = Cast <to = 1> (q) }",
}
COMMANDS = {
    "verify": ("verify", "full.onnx", "half.onnx", "--data", "large.npz", "--tolerance", "1e-2"),
    "locate": ("locate", "full.onnx", "half.onnx", "--data", "large.npz"),
    "diff": ("diff", "full.onnx", "half.onnx"),
    "calibrate": ("calibrate", "full.onnx", "--data", "large.npz", "-o", "r.json", "--overwrite"),
}
FIGURES = {
    "verify": {"outputs"},
    "locate": {"text"},
    "diff": {"graph", "changes"},
    "calibrate": {"ranges"},
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A current folder with models and data."""
    monkeypatch.chdir(tmp_path)
    for name, text in MODELS.items():
        onnx.save(onnx.parser.parse_model(text), name)
    np.savez("large.npz", x=np.float32([1, 300, 1000]))
    np.savez("small.npz", x=np.float32([1, 2, 3]))


def outcome(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(program, words)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_writes_its_page_and_prints_the_same(name: str) -> None:
    words = COMMANDS[name]
    code, stdout, _ = outcome(*words)
    also, same, stderr = outcome(*words, "--report", "deep/page.html")
    assert also == code == {"verify": 1, "diff": 1}.get(name, 0)
    assert stderr.splitlines()[-1].endswith("wrote deep/page.html".replace("/", os.sep))
    assert same == stdout
    html = Path("deep/page.html").read_text("utf-8")
    assert html.startswith("<!doctype html>")
    assert set(re.findall(r'<section id="(\w+)"', html)) == FIGURES[name]
