"""Models of skl2onnx and tf2onnx in the most common commands with default options."""

import shutil
import subprocess
from pathlib import Path

import pytest

from support.paths import TESTS
from unit.cli.test_cli import folder, run
from unit.cli.test_gate import AUTHOR

__all__ = ["folder"]

MODELS = TESTS / "models"
SKLEARN = sorted(path.stem for path in (MODELS / "sklearn").glob("*.onnx"))
KERAS = sorted(path.stem for path in (MODELS / "tf2onnx").glob("*.onnx"))
LOWERED = {name for name in SKLEARN if "mlp" in name} | set(KERAS)
"""Models with products and convolutions; the others only have operators of ai.onnx.ml."""
NEAR = ("--data", "batches.npz", "--tolerance", "1e-2")


@pytest.fixture(params=["forest", "logistic_str", "mlp_plain", "scaled_mlp_str", "svr", "cnn_17", "lstm_12"])
def name(request: pytest.FixtureRequest, folder: Path) -> str:
    """Enter a folder with a model and its batches; return the model's name."""
    name = str(request.param)
    source = MODELS / ("sklearn" if name in SKLEARN else "tf2onnx")
    shutil.copy(source / f"{name}.onnx", "model.onnx")
    data = "data" if name in SKLEARN else name.partition("_")[0]
    shutil.copy(source / f"{data}.npz", "batches.npz")
    return name


def ran(*words: str) -> str:
    done = run(*words)
    assert done.exit_code == 0, (words, done.stdout, done.stderr)
    return done.stdout + done.stderr


def test_a_conversion_passes_verify_diff_and_gate(name: str) -> None:
    output = ran("model.onnx", "-o", "low.onnx")
    assert ("nothing to lower: model.onnx is copied unchanged" in output) == (name not in LOWERED)
    assert ("next: " in output) == (name in LOWERED)
    assert "ok: " in ran("verify", "model.onnx", "model.onnx", *NEAR)
    text = ran("verify", "model.onnx", "low.onnx", *NEAR)
    assert "ok: " in text and len(text.splitlines()) < 14
    done = run("diff", "model.onnx", "low.onnx")
    assert done.exit_code == (name in LOWERED), done.stderr
    ran("report", "low.onnx")
    if shutil.which("git"):
        for words in (("init", "-q"), ("add", "model.onnx"), ("commit", "-q", "-m", "model")):
            subprocess.run(["git", *AUTHOR, *words], check=True, capture_output=True)
        ran("gate", "model.onnx")
        shutil.copy("low.onnx", "model.onnx")
        assert run("gate", "model.onnx").exit_code == (name in LOWERED)


@pytest.mark.slow
def test_data_repair_and_check_compare_all_outputs(name: str) -> None:
    kept = ran("model.onnx", "-o", "guarded.onnx", "--data", "batches.npz")
    assert ("next: " in kept) == (name in LOWERED)
    assert ": verified, largest error " in ran("model.onnx", "-o", "low.onnx", *NEAR)
    assert ran("model.onnx", "-o", "tight.onnx", "--data", "batches.npz", "--tolerance", "1e-5", "--json")
    assert "ok: " in ran("verify", "model.onnx", "tight.onnx", "--data", "batches.npz", "--tolerance", "1e-5")
    output = ran("model.onnx", "-o", "checked.onnx")
    assert (": no gross error, " in output) == (name in LOWERED)
    assert ("next: " in output) == (name in LOWERED)
