"""docs/how-to/training.md: the Python shown runs, and the options shown are there."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import amp_rewrite.train
from amp_rewrite.cli import program
from support.paths import ROOT

PAGE = (ROOT / "docs" / "how-to" / "training.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "examples" / "models" / "digits_cnn.onnx", "model.onnx")
    shutil.copy(ROOT / "examples" / "models" / "digits_test.npz", "digits.npz")
    return tmp_path


def test_the_python_shown_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for block in blocks("python"):
        if "torch" in block:  # runs in test_binding, where PyTorch is
            continue
        exec(compile(block, "training.md", "exec"), names)

    assert "Scores(loss=" in capsys.readouterr().out
    assert {"checkpoint.npz", "trained.onnx"} <= {file.name for file in folder.iterdir()}
    assert names["optimizer"].iterations == 6


def test_the_command_shown_runs(folder: Path) -> None:
    (line,) = re.findall(r"^\$ amp-rewrite (.*)$", blocks("console")[0], re.MULTILINE)
    assert CliRunner().invoke(program, shlex.split(line)).exit_code == 0
    assert (folder / "step.onnx").is_file()


def test_every_public_name_of_training_is_there() -> None:
    assert all(getattr(amp_rewrite.train, name) is not None for name in amp_rewrite.train.__all__)
    assert sorted(dir(amp_rewrite.train)) == sorted(amp_rewrite.train.__all__)
    with pytest.raises(AttributeError, match=r"^module 'amp_rewrite.train' has no attribute 'tape'$"):
        amp_rewrite.train.tape  # noqa: B018
