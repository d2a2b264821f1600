"""Options that say what is fed, how outputs are compared, and what is measured or trained: each does what it says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import onnx
import onnx.parser
import pytest
from click.testing import CliRunner, Result

from amp_rewrite.cli import program
from support.paths import ROOT

LOOKUP = """<ir_version: 8, opset_import: ["": 17]>
g (int64[64] ids) => (float[64,1] y) <float[3,1] table = {1, 20, 300}> { y = Gather (table, ids) }"""
NAN_AND_NUMBER = """<ir_version: 8, opset_import: ["": 17]>
g (float[2] x) => (float[2] y) <float[2] none = {0, 1}> { d = Mul (x, none) y = Div (d, none) }"""
LOSS = "cross_entropy(probability, label)"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(onnx.parser.parse_model(LOOKUP), "lookup.onnx")
    onnx.save(onnx.parser.parse_model(NAN_AND_NUMBER), "nan.onnx")
    shutil.copy(ROOT / "examples" / "models" / "digits_cnn.onnx", "cnn.onnx")
    return tmp_path


def run(*words: str) -> Result:
    return CliRunner().invoke(program, words)


def largest(file: str) -> float:
    """The largest magnitude seen of the lookup's output."""
    return float(json.loads(Path(file).read_text("utf-8"))["values"]["y"]["absmax"])


def test_random_integers_are_drawn_from_the_range_given() -> None:
    """64 of them: that one of two is not drawn happens once in 2⁶³ seeds, and the seed is fixed."""
    assert run("calibrate", "lookup.onnx", "--random", "--set", "int-range=ids=0,2", "-o", "two.json").exit_code == 0
    assert run("calibrate", "lookup.onnx", "--random", "--set", "int-range=ids=0,3", "-o", "three.json").exit_code == 0
    assert (largest("two.json"), largest("three.json")) == (20, 300)


@pytest.mark.parametrize("command", ["verify", "locate", "bench"])
def test_every_command_that_draws_integers_takes_a_range_for_them(command: str) -> None:
    """What is out of the table is refused by the runtime; that a wrong range is told shows that it arrives."""
    words = {
        "verify": ("verify", "lookup.onnx", "lookup.onnx", "--set", "rtol=0"),
        "locate": ("locate", "lookup.onnx", "lookup.onnx"),
        "bench": ("bench", "lookup.onnx"),
    }
    done = run(*words[command], "--random", "--set", "int-range=ids=9,3")
    said = "error: the int range 9,3 of input 'ids' is empty or does not fit int64\n"
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", said)


def test_nan_on_both_sides_passes_only_where_that_is_meant() -> None:
    words = ("verify", "nan.onnx", "nan.onnx", "--random", "--set", "rtol=0", "--only", "y")
    assert [run(*words).exit_code, run(*words, "--equal-nan").exit_code] == [1, 0]
    assert "note: NaN on both sides counts as equal" in run(*words, "--equal-nan").output


def onnx_weights(file: str) -> list[str]:
    return [tensor.name for tensor in onnx.load(file).graph.initializer]


def test_memory_is_left_out_of_a_benchmark_on_demand() -> None:
    words = ("bench", "cnn.onnx", "cnn.onnx", "--random", "--rounds", "1", "--json")
    done = run(*words, "--shape", "image=2,1,8,8", "--threads", "1", "--no-memory")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [entry["memory"] for entry in found["entries"]] == [None, None]


def test_fewer_than_no_threads_are_refused() -> None:
    done = run("calibrate", "lookup.onnx", "--random", "--set", "int-range=ids=0,3", "--threads", "-1")
    said = "error: -1 is not a valid number of threads; use 1 or more, or omit it for one per core\n"
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", said)
