"""The tool that dumps and compares decisions, and the list of scripts in benchmarks/run.py."""

import re
import sys
from pathlib import Path

import onnx

from support.commands import output_of, run
from support.corpus import text_model
from support.paths import ROOT, imported

TOOL = (sys.executable, ROOT / "tools" / "decisions.py")


def dumped(folder: Path, text: str, model: onnx.ModelProto) -> Path:
    (folder / text).mkdir()
    onnx.save(model, folder / text / "model.onnx")
    path = folder / f"{text}.json.xz"
    output_of(*TOOL, "dump", path, "--group", "--also", f"mine={folder / text}", "--jobs", 1)
    return path


def test_dumps_differ_only_where_their_models_do(tmp_path: Path) -> None:
    before = dumped(tmp_path, "before", text_model("tied_weights"))
    same = run(*TOOL, "compare", before, before)
    assert same.returncode == 0 and "all 1: " in same.stdout

    after = dumped(tmp_path, "after", text_model("rotary"))
    other = run(*TOOL, "compare", before, after, "--mode", "default", "--to", "float16")
    assert "mine/model: not the same model" in other.stdout


def test_decisions_compare_by_variable_cast_and_reason() -> None:
    decisions = imported("decisions", ROOT / "tools")
    Decisions, differences = decisions.Decisions, decisions.differences
    low = {"ops": [["a", "MatMul", {"T": "float16"}, "allow", ""]], "casts": [["x", "float32", "float16", "inserted"]]}
    high = {"ops": [["a", "MatMul", {"T": "float32"}, "keep", "b"]], "casts": [["x", "float16", "float32", "folded"]]}
    before, after = Decisions.of(low), Decisions.of(high)
    assert (before.low, after.low) == ({("a", "T")}, set())
    assert (before.net, after.net, before.inserted, after.inserted) == (1, -1, 1, 0)
    assert list(differences(before, before)) == []
    assert list(differences(before, after)) == [
        "a T: float16 (allow) → float32 (keep because of b)",
        "Cast of x, float16 → float32, folded: +1",
        "Cast of x, float32 → float16, inserted: -1",
    ]
    assert next(differences(before, Decisions.of({"refused": "no"}))) == "refused: not before → no"


def test_run_lists_each_script_with_arguments_once() -> None:
    listed = re.findall(r"^  (\w+) ", imported("benchmarks.run").listing(), re.MULTILINE)
    paths = [*(ROOT / "benchmarks").glob("*/*.py")]
    scripts = {path.stem for path in paths if "ArgumentParser(" in path.read_text("utf-8")}
    assert sorted(listed) == sorted(scripts - {"export"})  # started by architectures
    assert len({path.stem for path in paths}) == len(paths)
