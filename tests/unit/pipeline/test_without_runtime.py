"""Converting, reporting and explaining work without threads, processes and onnxruntime, as in a browser."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import amp_rewrite
from amp_rewrite import convert
from support.paths import ROOT, TESTS

MODELS = ("bert_ts13", "cnn_external_dynamo22", "loop_dynamo21")

# Operations that a browser lacks raise its errors, and every attempt is recorded.
BLOCKED = """
import importlib.abc, os, subprocess, sys, threading, _thread

attempts = []

def refuse(name, error):
    def refused(*_, **__):
        attempts.append(name)
        raise error
    return refused

threading.Thread.start = refuse("thread", RuntimeError("can't start new thread"))
_thread.start_new_thread = refuse("thread", RuntimeError("can't start new thread"))
subprocess.Popen.__init__ = refuse("process", OSError("emscripten does not support processes"))
for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp", "system", "execv", "execve"):
    if hasattr(os, name):
        setattr(os, name, refuse(name, OSError("emscripten does not support processes")))

class NoRuntime(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "onnxruntime":
            refuse(name, ModuleNotFoundError(f"No module named {name!r}", name=name))()

sys.meta_path.insert(0, NoRuntime())
"""
CONVERTS = """
import json, pathlib
import amp_rewrite
from amp_rewrite.cli import program

models, out = json.loads(sys.argv[1]), pathlib.Path(sys.argv[2])
for model in map(pathlib.Path, models):
    for to in ("float16", "bfloat16"):
        amp_rewrite.convert(model, to=to).save(out / f"{model.stem}.{to}.onnx")
assert attempts == [], attempts

def command(*words, code=0):
    try:
        program.main([str(word) for word in words])
    except SystemExit as end:
        assert end.code == code, (words, end.code)

first, low = models[0], out / f"{pathlib.Path(models[0]).stem}.float16.onnx"
node = amp_rewrite.View.of(amp_rewrite.Model.load(first)).ops[0].name
command("convert", first, "--no-check", "-o", out / "command.onnx", "--report", out / "page.html")
command("report", first)
command("explain", first, node, "--no-check")
command("diff", first, low, code=1)
command("emulate", low, "-o", out / "twin.onnx")
command("explain", "MatMul")
command("explain", "rules")
command("train-step", sys.argv[3], "--loss", "cross_entropy(probability)", "-o", out / "step.onnx")
assert attempts == [], attempts

# What runs a model says so, and what is missing.
digits = sys.argv[3]
command("verify", digits, digits, "--random", "--shape", "image=2,1,8,8", "--tolerance", "0.1", code=2)
assert set(attempts) == {"onnxruntime"}, attempts
command("convert", first, "-o", out / "unchecked.onnx")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the calls that are blocked are those of POSIX")
def test_converting_needs_no_thread_process_or_onnxruntime(tmp_path: Path) -> None:
    models = [str(TESTS / "models" / f"{name}.onnx") for name in MODELS]
    trained = ROOT / "examples" / "models" / "digits_cnn.onnx"
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED + CONVERTS, json.dumps(models), str(there), str(trained)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "verify runs models in onnxruntime, but" in done.stderr
    assert "the check stopped: the check of a conversion runs models in" in " ".join(done.stdout.split())
    assert (there / "unchecked.onnx").read_bytes() == (there / "command.onnx").read_bytes()
    for model in map(Path, models):
        for to in ("float16", "bfloat16"):
            convert(model, to=to).save(here / f"{model.stem}.{to}.onnx")
    for file in here.iterdir():
        assert (there / file.name).read_bytes() == file.read_bytes(), file.name


RUNS: dict[str, Callable[[], object]] = {
    "verify": lambda: amp_rewrite.verify("m", "m", "d", tolerance=1),
    "calibrate": lambda: amp_rewrite.calibrate("m", "d"),
    "locate": lambda: amp_rewrite.locate("m", "m", "d"),
    "a conversion with data": lambda: amp_rewrite.repair("m", "d", tolerance=1),
    "bench": lambda: amp_rewrite.bench(["m"], "d"),
    "Session": lambda: amp_rewrite.Session("m"),
    "Trainer": lambda: amp_rewrite.train.Trainer(None),  # type: ignore[arg-type]
    "ModelLoss": lambda: amp_rewrite.train.ModelLoss.of("m", "loss"),
}


@pytest.mark.parametrize("feature", RUNS)
def test_a_feature_that_runs_models_names_itself_and_the_missing_package(
    feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails first: the models and data in these calls do not exist."""
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(amp_rewrite.MachineError, match=f"^{feature} runs models in onnxruntime, but .* install"):
        RUNS[feature]()
