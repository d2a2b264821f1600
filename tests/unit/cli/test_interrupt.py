"""Ctrl-C and SIGTERM: exit code 130 without a traceback, partial files or processes; and a broken onnxruntime."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from click.testing import CliRunner

from amp_rewrite.cli import program
from amp_rewrite.runtime import runner
from support.repositories import net

MODEL = '<ir_version: 10, opset_import: ["": 20]> g (float[n, 3] x) => (float[n, 3] y) { y = Neg (x) }'
AMP = "from amp_rewrite.__main__ import main; print('begun', flush=True); main()"
SIGNALS = (signal.SIGINT, signal.SIGTERM)

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs signals")


def heard() -> None:
    """Restore the signals, which a shell may have ignored for the tests."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def group(leader: int) -> Iterator[str]:
    """Yield the names of a group's running processes; ended ones may still be zombies."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
        except OSError:
            continue
        state, _, of, *_ = rest.split()
        if int(of) == leader and state != "Z":
            yield name


@posix
@pytest.mark.parametrize("number", SIGNALS)
def test_an_interrupted_batch_ends_with_whole_files_and_no_process(tmp_path: Path, number: signal.Signals) -> None:
    """At random moments: while modules load or processes start, and while models are written."""
    for i in range(400):
        net(tmp_path / "src" / f"{i}.onnx", seed=i)
    chance = random.Random(int(number))
    for turn in range(2):
        out = tmp_path / f"out{turn}"
        process = subprocess.Popen(
            [sys.executable, "-c", AMP, tmp_path / "src", "-o", out, "-j", "2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=heard,
        )
        assert process.stdout is not None
        process.stdout.readline()
        if turn:
            process.stdout.readline()  # one is written
        time.sleep(0.05 + chance.random())
        (os.killpg if turn == 1 else os.kill)(process.pid, number)  # to all processes, like a terminal
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130, errors
        assert "Traceback" not in errors and "Exception" not in errors
        end = time.monotonic() + 10
        while (remaining := list(group(process.pid))) and time.monotonic() < end:
            time.sleep(0.01)  # multiprocessing's resource tracker ends once its pipe is closed
        assert not remaining
        written = [path for path in out.rglob("*") if path.is_file()]
        assert {path.suffix for path in written} <= {".onnx"}
        for path in written:
            onnx.load(path)
        assert len(written) < 400


IMPORTING = """
import signal, sys, threading, types
from amp_rewrite.__main__ import main

def run():
    import interrupting
    threading.Event().wait(60)
    print("lost")

sys.path.insert(0, sys.argv[1])
sys.modules["amp_rewrite.cli"] = types.SimpleNamespace(main=run)
main()
"""


@posix
@pytest.mark.parametrize("number", SIGNALS)
def test_an_interrupt_during_an_import_waits_for_its_end(number: signal.Signals, tmp_path: Path) -> None:
    """Compiled modules crash on an exception during their import, and import locks swallow it."""
    (tmp_path / "interrupting.py").write_text(f"import os\nos.kill(os.getpid(), {number:d})\nprint('loaded')\n")
    command = [sys.executable, "-c", IMPORTING, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=heard, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("loaded\n", "", 130)


LOADING = """
import importlib, os, signal, sys, time
from multiprocessing import Pipe
from amp_rewrite.pipeline.batch.processes import _serve

class Named:
    def __set_name__(self, *_):  # Python before 3.12 makes a RuntimeError of an exception here
        os.kill(os.getpid(), signal.SIGTERM)

class Job:
    def __reduce__(self):
        return importlib.import_module, ("loading",)

def do(job):
    time.sleep(60)
    print("lost")

sys.path.insert(0, sys.argv[1])
theirs, ours = Pipe()
ours.send((do, Job()))
sys.modules["named"] = sys.modules["__main__"]
_serve(theirs)
"""


@posix
def test_a_process_ended_while_modules_load_prints_nothing(tmp_path: Path) -> None:
    (tmp_path / "loading.py").write_text("import named\nclass Loading:\n    name = named.Named()\nprint('loaded')\n")
    command = [sys.executable, "-c", LOADING, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=heard, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("loaded\n", "", 0)


HIDING = """
    class Named:
        def __set_name__(self, *_):
            signal.raise_signal(signal.SIGINT)

    class Body:
        name = Named()
"""


@posix
@pytest.mark.parametrize("line", ["raise KeyboardInterrupt", "exec('raise KeyboardInterrupt')", HIDING])
def test_every_interrupt_of_a_command_is_exit_code_130(line: str, tmp_path: Path) -> None:
    """Python itself would exit by SIGINT after an interrupt in an exec, for example of a dataclass."""
    (tmp_path / "interrupting.py").write_text("")
    command = [sys.executable, "-c", IMPORTING.replace("import interrupting", line), tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=heard, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 130)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(onnx.parser.parse_model(MODEL), "m.onnx")
    np.savez("x.npz", x=np.ones((2, 3), np.float32))


@pytest.mark.usefixtures("folder")
def test_only_a_missing_onnxruntime_shows_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def benched(error: ImportError) -> str:
        def fail(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(runner, "check_providers", fail)
        done = CliRunner().invoke(program, ["bench", "m.onnx", "--data", "x.npz", "--provider", runner.CPU])
        assert done.exit_code == 2
        return done.stderr

    text = "onnxruntime cannot be imported: No module named 'onnxruntime'; `amp-rewrite doctor` says what to install"
    missing = ModuleNotFoundError("No module named 'onnxruntime'", name="onnxruntime")
    assert benched(missing) == f"error: {text}\n"
    text = benched(ImportError("cannot import name 'x' from 'amp_rewrite'", name="amp_rewrite"))
    assert text.startswith("Traceback")
    assert text.endswith("internal error in amp-rewrite; please report the lines above\n")
