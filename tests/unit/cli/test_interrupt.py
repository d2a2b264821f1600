"""Ctrl-C at bad moments, and a runtime that cannot be imported: one line at most, and the exit code of shells."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnx.parser
import pytest
from click.testing import CliRunner

from amp_rewrite.cli import program
from amp_rewrite.cli.interrupts import _raised, ended_by_signals
from amp_rewrite.runtime import runner

MODEL = '<ir_version: 10, opset_import: ["": 20]> g (float[n, 3] x) => (float[n, 3] y) { y = Neg (x) }'

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs signals")


def heard(number: int = signal.SIGINT) -> None:
    """Hear a signal, which a shell may have ignored for the tests."""
    signal.signal(number, signal.SIG_DFL)


@posix
@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("raise KeyboardInterrupt", 130),
        ("exec('raise KeyboardInterrupt')", 130),  # as in the middle of a dataclass
        ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
    ],
)
def test_an_interrupt_while_the_command_line_is_imported_says_nothing(line: str, code: int, tmp_path: Path) -> None:
    """Shells report death by SIGINT as 130, too."""
    (tmp_path / "click.py").write_text(f"import os, signal\n{line}\n")
    path = os.pathsep.join((str(tmp_path), str(Path(runner.__file__).parents[2])))
    command = [sys.executable, "-m", "amp_rewrite", "--help"]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, preexec_fn=heard, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


IN_A_FINALIZER = """
import signal, threading
from amp_rewrite.cli.interrupts import ended_by_signals

class Finalized:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

with ended_by_signals():
    try:
        Finalized()
        threading.Event().wait(600)
        print("lost")
    except KeyboardInterrupt:
        print("ended")
"""


IN_AN_EXTENSION = """
import signal, threading
from amp_rewrite.cli.interrupts import ended_by_signals

class ExtensionFileLoader:
    def create_module(self):
        signal.raise_signal(signal.SIGTERM)

with ended_by_signals():
    ExtensionFileLoader().create_module()
    try:
        threading.Event().wait(600)
        print("lost")
    except KeyboardInterrupt:
        print("ended")
"""


@posix
@pytest.mark.parametrize("program", [IN_A_FINALIZER, IN_AN_EXTENSION], ids=["finalizer", "extension"])
def test_an_interrupt_where_none_may_be_raised_is_raised_after_it(program: str) -> None:
    command = [sys.executable, "-c", program]
    preexec = partial(heard, signal.SIGTERM)
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=preexec, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")


def test_what_a_finalizer_raises_otherwise_is_still_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: told.append(unraisable.exc_value))
    hook = sys.unraisablehook
    with ended_by_signals():
        sys.unraisablehook(SimpleNamespace(exc_value=ValueError("x")))  # type: ignore[arg-type]
    assert (repr(told), sys.unraisablehook) == ("[ValueError('x')]", hook)


def interrupted(*_: object, **__: object) -> None:
    """As a compiled module does that is interrupted while it is loaded."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as cause:
        raise ImportError("initialization failed") from cause


def missing(*_: object, **__: object) -> None:
    raise ModuleNotFoundError("No module named 'onnxruntime'", name="onnxruntime")


def ours(*_: object, **__: object) -> None:
    raise ImportError("cannot import name 'x' from 'amp_rewrite'", name="amp_rewrite")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(onnx.parser.parse_model(MODEL), "m.onnx")
    np.savez("x.npz", x=np.ones((2, 3), np.float32))


def benched() -> tuple[int, str]:
    done = CliRunner().invoke(program, ["bench", "m.onnx", "--data", "x.npz", "--provider", runner.CPU])
    return done.exit_code, done.stderr


def test_an_interrupt_while_onnxruntime_is_imported_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_check_providers", interrupted)
    assert benched() == (130, "")


def test_an_onnxruntime_that_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_check_providers", missing)
    said = "onnxruntime cannot be imported: No module named 'onnxruntime'; `amp-rewrite doctor` says what to install"
    assert benched() == (2, f"error: {said}\n")


def test_another_import_that_fails_is_a_bug_and_shown_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_check_providers", ours)
    code, said = benched()
    assert code == 2
    assert said.startswith("Traceback") and said.endswith("failed inside; please report the lines above\n")


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no such signal")
def test_signals_that_end_a_process_interrupt_it_and_others_handlers_stay() -> None:
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [
        signal.signal(number, handler)
        for number, handler in zip(numbers, (signal.SIG_DFL, signal.SIG_IGN), strict=True)
    ]
    try:
        with ended_by_signals():
            assert [*map(signal.getsignal, numbers)] == [_raised, signal.SIG_IGN]
        assert [*map(signal.getsignal, numbers)] == [signal.SIG_DFL, signal.SIG_IGN]
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
