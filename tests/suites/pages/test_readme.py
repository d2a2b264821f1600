"""The README: what it shows is what happens."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner

from amp_rewrite.cli import program
from amp_rewrite.cli.group import COMMANDS
from amp_rewrite.dtypes import DType
from amp_rewrite.pipeline.repair import Repaired
from amp_rewrite.settings.config_file import from_file
from amp_rewrite.settings.op_lists import load_lists
from amp_rewrite.train.step.step import TrainingStep
from support.paths import ROOT

README = (ROOT / "README.md").read_text("utf-8")


def command_of(name: str) -> click.Command:
    command = program.get_command(None, name)
    assert command is not None
    return command


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def unplaced(text: str) -> str:
    """Text without what every new entry of the lists changes: their fingerprint and the numbers of their lines."""
    return re.sub(r"(?<=\()[0-9a-f]{12}(?=\))|(?<=\.yaml:)\d+", "#", text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The README's model in the current folder, and no settings in the environment."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("AMP_REWRITE_")]:
        monkeypatch.delenv(name)
    shutil.copy(ROOT / "examples" / "models" / "digits_vit.onnx", tmp_path / "model.onnx")
    images = np.random.default_rng(0).random((4, 1, 8, 8), dtype=np.float32)
    np.savez(tmp_path / "batches.npz", image=images)
    return tmp_path


def test_the_first_screen_is_what_is_printed(folder: Path) -> None:
    """A line of "…" stands for whatever else a command prints; where an entry of the lists stands is not compared."""
    shown = re.findall(r"^\$ amp-rewrite (.*)\n((?:[^$].*\n|\n)*)", blocks("console")[0], re.MULTILINE)
    assert [words.split()[0] for words, _ in shown] == ["model.onnx", "explain"]
    for words, output in shown:
        printed = unplaced(CliRunner().invoke(program, shlex.split(words)).stdout)
        start, cut, _ = unplaced(output).partition("…\n")
        assert (printed[: len(start)] if cut else printed) == start


def test_the_readme_names_every_option_of_convert_and_no_other() -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))
    known = {
        command: {name for option in command_of(command).params for name in (*option.opts, *option.secondary_opts)}
        for command in COMMANDS
    }
    short = {"--output", "--quiet", "--verbose"}  # as -o, -q and -v
    assert {name for name in known["convert"] if name.startswith("--")} - short <= named
    assert named <= set().union(*known.values())


def test_the_settings_shown_are_accepted(folder: Path) -> None:
    (folder / "pyproject.toml").write_text(blocks("toml")[0], "utf-8")
    assert from_file(folder / "pyproject.toml")["fail_on"] == ("raised", "casts")


def test_the_op_lists_shown_are_accepted(folder: Path) -> None:
    (folder / "my.yaml").write_text(blocks("yaml")[0], "utf-8")
    lists = load_lists(DType.FLOAT16, [folder / "my.yaml"])
    assert lists.entries_of("", "Softmax")[0].because == "our logits reach 1e5"


@pytest.mark.filterwarnings("ignore:.*is not converted and runs as it is")
def test_the_python_shown_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: dict[str, object] = {"images": np.load(folder / "batches.npz")["image"]}
    printing = 0
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), seen)
        if "print(" in block:
            assert "20 of 20 in float16" in capsys.readouterr().out
            printing += 1
    assert printing == 2
    assert (folder / "model_fp16.onnx").is_file()
    assert isinstance(seen["repaired"], Repaired) and seen["repaired"].solved
    assert isinstance(seen["step"], TrainingStep)


def test_the_training_shown_runs_in_a_program_of_its_own(folder: Path) -> None:
    """Not only where another import has brought the module along."""
    shown = next(block for block in blocks("python") if "training_step" in block)
    ran = subprocess.run([sys.executable, "-c", shown], cwd=folder, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_what_it_says_of_other_converters_is_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python benchmarks/run.py readme_table --write` puts it there."""
    monkeypatch.syspath_prepend(ROOT)
    table = import_module("benchmarks.peers.readme_table")
    measured = json.loads((ROOT / "benchmarks" / "results" / "peers.json").read_text("utf-8"))
    assert table.replaced(README, table.passage(measured)) == README
    with pytest.raises(ValueError, match="the README has no passage"):
        table.replaced(README.replace("The others:", ""), "")


def point(model: str, tool: str, cpu: float, casts: int, l2: float, lowered: int = 2) -> dict[str, Any]:
    """A row of results/peers.json."""
    judged = {"casts": casts, "lowered": lowered, "compute": 2, "l2": l2}
    return {"model": model, "megabytes": 9, "tool": tool, "cpu": cpu, "peak": cpu * 1e6, "fault": "", "judged": judged}


def test_a_tool_counts_if_its_model_runs_and_its_error_if_all_products_are_low(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT)
    rows = [
        point("unet", "amp-rewrite", 2, 3, 1e-3),
        point("unet", "onnxruntime_float16", 1, 0, 0) | {"fault": "[ONNXRuntimeError] : 1 : FAIL"},
        point("unet", "onnxruntime_onnxmodel", 6, 2, 0.25),
        point("unet", "onnxconverter_common", 5, 9, 2e-3),
        point("unet", "modelopt_autocast", 7, 1, 1e-4, 1),
        point("llama", "amp-rewrite", 4, 1, 3e-3),
        point("llama", "modelopt_autocast", 9, 0, 0) | {"fault": "stopped after 9 s"},
    ]
    said = import_module("benchmarks.peers.readme_table").passage({"machine": {"load": 0.5, "cores": 4}, "rows": rows})
    assert said.splitlines()[5:] == [
        "| Llama, 9 MB | 4.0 / – | 4 / – | 1 / – | 3.0e-3 / – |",
        "| UNet, 9 MB | 2.0 / 5.0 | 2 / 5 | 3 / 1 | 1.0e-3 / 2.0e-3 (with 9 casts; with 2: 0.25) |",
        "",
        "The others: onnxruntime's two float16 tools, onnxconverter-common, ModelOpt AutoCast.",
        "No model that runs: UNet by onnxruntime's `float16` (onnxruntime refuses it); Llama by ModelOpt AutoCast"
        " (stopped after",
        "9 s).",
    ]
