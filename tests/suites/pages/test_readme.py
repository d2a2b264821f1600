"""Commands, code and figures in the README are correct."""

import json
import os
import re
import shlex
import shutil
from importlib import import_module
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from amp_rewrite.cli import program
from amp_rewrite.pipeline.repair import Repaired
from support.hard_models import HARD
from support.paths import ROOT

OUTLIER = ROOT / "examples" / "outlier"
README = (ROOT / "README.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder with the README's model and data, without settings in the environment."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("AMP_REWRITE_")]:
        monkeypatch.delenv(name)
    for name in ("model.onnx", "batches.npz"):
        shutil.copy(OUTLIER / name, tmp_path)
    return tmp_path


def test_the_first_screen_shows_its_commands_output(folder: Path) -> None:
    command, *shown = blocks("console")[0].splitlines()
    done = CliRunner().invoke(program, shlex.split(command)[2:])
    assert done.exit_code == 0
    printed = iter(done.stdout.splitlines())
    assert [line for line in shown if line.strip() != "…" and line not in printed] == [], done.stdout


def test_the_commands_shown_run_and_each_result_passes(folder: Path) -> None:
    shown = re.findall(r"^\$ amp-rewrite (.*)$", "\n".join(blocks("console")[1:]), re.MULTILINE)
    assert [words.split()[0] for words in shown] == ["model.onnx", "verify", "model.onnx"]
    plain, verify, repaired = map(shlex.split, shown)
    codes = [CliRunner().invoke(program, words).exit_code for words in (plain, verify, repaired, verify)]
    assert codes == [0, 0, 0, 0]


def test_the_python_shown_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = blocks("python")
    names: dict[str, object] = {}
    exec(compile(shown, "README.md", "exec"), names)
    assert isinstance(names["result"], Repaired)
    assert "46 of 46" in capsys.readouterr().out
    assert (folder / "model_fp16.onnx").is_file()


def test_the_model_shown_is_a_hard_model_of_the_tests() -> None:
    shipped = onnx.load(OUTLIER / "model.onnx")
    hard = HARD["llama_outlier"]()
    assert shipped == hard.model
    with np.load(OUTLIER / "batches.npz") as batch:
        assert {name: array.tolist() for name, array in batch.items()} == {
            name: array.tolist() for name, array in hard.batch.items()
        }


def test_the_page_on_other_converters_matches_the_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python benchmarks/run.py peers_page --write` writes it."""
    monkeypatch.syspath_prepend(ROOT)
    module = import_module("benchmarks.peers.peers_page")
    measured = json.loads((ROOT / "benchmarks" / "results" / "peers.json").read_text("utf-8"))
    assert module.page(measured) == (ROOT / "docs" / "evidence" / "peers.md").read_text("utf-8")
    costs = {row["tool"]: (row["cpu"], row["peak"] / 1e9) for row in measured["rows"] if row["model"] == "bert_base"}
    tools = ("amp-rewrite", "onnxruntime_float16", "onnxconverter_common", "modelopt_autocast")
    cells = [f"{cpu:.{cpu < 10:d}f} s, {peak:.1f} GB" for cpu, peak in map(costs.__getitem__, tools)]
    (row,) = (line for line in README.splitlines() if line.startswith("| [converting BERT-base]("))
    assert [cell.strip(" *") for cell in row.strip("| ").split("|")][1:] == cells


def test_the_conformance_figures_match_their_page() -> None:
    page = (ROOT / "docs" / "conformance.md").read_text("utf-8")
    rows = {cells[1]: cells for cells in (re.split(r"\s*\|\s*", line) for line in page.splitlines()) if len(cells) > 6}
    _, _, cases, right, with_data, wrong, half, *_ = rows["default to float16"]
    brain, readme = rows["default to bfloat16"][6], " ".join(README.split())
    assert (int(right) + int(with_data), wrong, with_data) == (int(cases), "0", "6")
    assert f"{right} of {cases} backend models are correct" in readme
    assert f"changes {half} models in float16 and {brain} in bfloat16" in readme
    limits = " ".join((ROOT / "docs" / "reference" / "limits.md").read_text("utf-8").split())
    assert f"{half} of the {cases} models of the ONNX standard change in float16" in limits
