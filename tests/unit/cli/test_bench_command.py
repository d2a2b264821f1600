"""`bench` on the command line: what it prints and where, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from click.testing import CliRunner

from amp_rewrite.cli import program
from amp_rewrite.runtime.runner import CPU

HEAD = '<ir_version: 10, opset_import: ["": 20]> '
FULL = HEAD + "g (float[n, 3] x) => (float[n, 3] y) <float a = {300}> { [up] p = Mul (x, a) [down] y = Neg (p) }"
SEE = "see 'amp-rewrite bench --help'"
QUICK = ("--provider", CPU, "--rounds", "2", "--no-memory")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A current folder with a model and a batch."""
    monkeypatch.chdir(tmp_path)
    onnx.save(onnx.parser.parse_model(FULL), "full.onnx")
    np.savez("x.npz", x=np.ones((2, 3), np.float32))


def outcome(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(program, ["bench", *words])
    return result.exit_code, result.stdout, result.stderr


def test_two_models_are_timed_side_by_side() -> None:
    code, out, err = outcome("full.onnx", "full.onnx", "--data", "x.npz", *QUICK)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[:2] == ["full.onnx, full.onnx (2)", f"  runs on   {CPU}"]
    assert "  data      x.npz: x [2, 3]" in lines
    assert any(line.startswith("  measured  2 rounds of ") for line in lines)
    assert [line.split()[:4] for line in lines if line.startswith("  latency")] == [["latency,", "ms", "median", "p5"]]


def test_json_stands_alone_on_stdout() -> None:
    code, out, err = outcome("full.onnx", "--random", "--shape", "x=1,3", "--json", *QUICK)
    told = json.loads(out)
    assert (code, err, told["provider"], told["rounds"], told["fed"]) == (0, "", CPU, 2, "random, seed 0: x [1, 3]")


@pytest.mark.parametrize(
    ("words", "said"),
    {
        "full.onnx": "error: no input data; add --data FILE, or --random; see 'amp-rewrite bench --help'",
        "--data x.npz": (
            "error: Missing argument 'A [B]...', as in `amp-rewrite bench model.onnx model.float16.onnx --random`"
        ),
    }.items(),
)
def test_what_is_wrong_is_said_before_anything_runs(words: str, said: str) -> None:
    code, out, err = outcome(*words.split())
    assert (code, out, err.rstrip()) == (2, "", said)
