"""The README: what it shows is what happens."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from amp_rewrite.cli import door
from amp_rewrite.config import from_file
from amp_rewrite.dtypes import DType
from amp_rewrite.lists import load_lists
from amp_rewrite.repair import Repaired
from amp_rewrite.train.step import TrainingStep

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")


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
        printed = unplaced(CliRunner().invoke(door, shlex.split(words)).stdout)
        start, cut, _ = unplaced(output).partition("…\n")
        assert (printed[: len(start)] if cut else printed) == start


def test_the_readme_names_every_option_of_convert_and_no_other() -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))
    known = {
        command: {name for option in door.commands[command].params for name in (*option.opts, *option.secondary_opts)}
        for command in door.commands
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
            assert "20 of 20 in low precision" in capsys.readouterr().out
            printing += 1
    assert printing == 2
    assert (folder / "model_fp16.onnx").is_file()
    assert isinstance(seen["repaired"], Repaired) and seen["repaired"].solved
    assert isinstance(seen["step"], TrainingStep)
