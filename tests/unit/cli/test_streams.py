"""Standard streams and output folders of commands."""

import os
import sys
from pathlib import Path

import onnx
import onnx.parser
import pytest

from amp_rewrite.cli import group
from unit.cli.test_cli import TEXT, files, run

NET = "net.onnx"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    onnx.save(onnx.parser.parse_model(TEXT), NET)
    return tmp_path


@pytest.mark.parametrize("closed", [(), (0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_closed_standard_streams_are_opened_on_the_null_device(
    closed: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check descriptors, because an opened file gets the smallest free number."""
    free, opened = list(closed), {}

    def fstat(number: int) -> None:
        if number in free:
            raise OSError

    def open_(name: str, flags: int) -> None:
        opened[free.pop(0)] = (name, flags)

    names = {1: "stdout", 2: "stderr"}
    with monkeypatch.context() as patch:
        for number in closed:
            patch.setattr(sys, names.get(number, "stdin"), None)
        patch.setattr(os, "fstat", fstat)
        patch.setattr(os, "open", open_)
        group._open_closed_streams()
        for number in names.keys() & closed:
            with getattr(sys, names[number]) as stream:
                assert stream.fileno() == number
    os.fstat(1), os.fstat(2)  # the descriptors stay open in the process
    flags = {0: os.O_RDONLY, 1: os.O_RDONLY, 2: os.O_WRONLY}
    assert opened == {number: (os.devnull, flags[number]) for number in closed}


# -- folders ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (("convert", NET, "-o", "a/b/out.onnx", "--report", "a/c/report.json"), "a/c/report.json"),
        ((NET, "a/b/out.onnx"), "a/b/out.onnx"),
        (("convert", NET, "--to", "float16", "a/b/out.onnx"), "a/b/out.onnx"),
        (("emulate", NET, "-o", "a/b/out.onnx"), "a/b/out.onnx"),
        (("train-step", NET, "--loss", "mean_squared_error(y,t)", "-o", "a/b/out.onnx"), "a/b/out.onnx"),
        (("calibrate", NET, "--random", "-o", "a/b/out.json"), "a/b/out.json"),
        (("report", NET, "-o", "a/b/out.html"), "a/b/out.html"),
    ],
)
def test_missing_folders_of_an_output_are_created(words: tuple[str, ...], output: str) -> None:
    done = run(*words)
    assert done.exit_code == 0, done.stderr
    assert Path(output).is_file()
    assert words[0] not in ("convert", NET) or "wrote a/b/out.onnx, in a new folder\n" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("convert", NET, "-o", "a/b/out.onnx", "--keep", "nothing"),
        ("convert", NET, "-o", "a/b/out.onnx", "--dry-run"),
        ("convert", NET, "-o", "a/b/out.onnx", "--to", "float8"),
        ("convert", "gone.onnx", "-o", "a/b/out.onnx"),
        ("convert", NET, "-o", "a/b/out.onnx", "--no-such-option"),
        ("calibrate", NET, "-o", "a/b/out.json"),
        ("convert", NET, "-o", "a/b/../out.onnx", "--dry-run"),
        ("convert", NET, "a/b/"),
        ("convert", NET, "-o", "a/b/", "--dry-run"),
    ],
)
def test_created_folders_are_removed_if_nothing_was_written(words: tuple[str, ...]) -> None:
    run(*words)
    assert files() == [NET, "temporary"]
