"""Arrays that no input takes: named once by each command that reads data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from unit.cli.test_cli import TEXT, run

REMARK = "ignored: 'label', because no input takes it\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(onnx.parser.parse_model(TEXT), "net.onnx")
    np.savez("d.npz", x=np.ones((2, 8), np.float32), label=np.array(["cat", "dog"], dtype=object))


@pytest.mark.parametrize(
    "words",
    [
        "convert net.onnx --dry-run",
        "calibrate net.onnx -o r.json",
        "explain net.onnx first",
        "bench net.onnx --rounds 1 --no-memory",
    ],
)
def test_labels_in_the_data_are_named_once_on_stderr(words: str) -> None:
    done = run(*words.split(), "--data", "d.npz")
    assert (done.exit_code, done.stderr.count(REMARK), "label" in done.stdout) == (0, 1, False), done.output


def test_an_array_named_like_an_input_is_an_error() -> None:
    np.savez("d.npz", x=np.ones((2, 8), np.float32), X1=np.ones(2), x1=np.ones(2))
    done = run("convert", "net.onnx", "--data", "d.npz")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "but the model's input" in done.stderr
