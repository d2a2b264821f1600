"""The training examples run and learn, in the small sizes of `--quick`."""

import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest

from support.commands import output_of
from support.paths import ROOT

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples" / "training"
PYTORCH = json.loads((EXAMPLES / "models" / "losses.json").read_text("utf-8"))
STEPS = 20


def printed(name: str, *options: str | Path) -> str:
    return output_of(sys.executable, EXAMPLES / name, *options)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that imports a module of the examples by name."""
    monkeypatch.syspath_prepend(EXAMPLES)

    def imported(name: str) -> Any:
        for known in ("digits", "tasks", "guide", "chart"):
            monkeypatch.delitem(sys.modules, known, raising=False)
        return __import__(name)

    return imported


# -- the guide -------------------------------------------------------------------------------------------


def learned_equally_well(text: str, losses: int, of_first: float, least: float, network: str = "seed 0") -> None:
    """Check that each policy's losses fall to a share of the first, as in float32, and its least accuracy."""
    found = re.findall(rf"^{network} (\w+): ([\d. ]+); ([\d.]+)%", text, re.MULTILINE)
    curves = {policy: [float(number) for number in curve.split()] for policy, curve, _ in found}

    assert list(curves) == ["float32", "mixed_float16", "mixed_bfloat16"]
    for policy, curve in curves.items():
        assert len(curve) == losses and curve[-1] < of_first * curve[0]
        np.testing.assert_allclose(curve, curves["float32"], atol=0.05, err_msg=policy)
    assert min(float(accuracy) for *_, accuracy in found) > least  # guessing gets 19%


def test_the_loss_scale_is_drawn_with_its_skipped_steps(tmp_path: Path) -> None:
    text = printed("guide.py", "--quick", "--trace", tmp_path / "scale.svg")
    skipped = json.loads(re.findall(r"skipped \d+ of 80 steps: (\[.*\])", text)[0])
    chart = ElementTree.parse(tmp_path / "scale.svg").getroot()
    namespace = "{http://www.w3.org/2000/svg}"
    (line,) = chart.findall(f"{namespace}polyline")

    assert skipped[:3] == [0, 1, 2]  # it starts too high
    assert len(chart.findall(f"{namespace}circle")) == len(skipped) < 20
    assert len(line.attrib["points"].split()) == 80


def test_mnist_is_read_from_its_four_files_compressed_or_not(tmp_path: Path, example: Any) -> None:
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (5, 28, 28), np.uint8), np.arange(5, dtype=np.uint8)
    for part in ("train", "t10k"):
        whole = b"\0\0\x08\x03" + np.array(images.shape, ">u4").tobytes() + images.tobytes()
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(whole))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01\0\0\0\x05" + labels.tobytes())
    found = example("digits").load(tmp_path)

    assert (found.x.shape, found.x.dtype, found.y.tolist()) == ((5, 784), np.float32, [0, 1, 2, 3, 4])
    np.testing.assert_array_equal(found.x_test, images.reshape(5, 784).astype(np.float32) / np.float32(255))


def test_the_guides_network_learns_equally_well_under_each_policy(tmp_path: Path) -> None:
    log = tmp_path / "runs.jsonl"
    curves = ("--curves", tmp_path / "curves.svg")
    first, second = (printed("guide.py", "--quick", "--loop", "--log", log, *drawn) for drawn in ((), curves))
    runs = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    assert second == first
    learned_equally_well(first, 8, 0.5, 60)
    assert [(r["run"]["seed"], r["run"]["policy"], r["run"]["hidden"], len(r["outcome"]["losses"])) for r in runs] == [
        (0, policy, 64, 8) for policy in ("float32", "mixed_float16", "mixed_bfloat16")
    ]
    lines = ElementTree.parse(tmp_path / "curves.svg").getroot().findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [8] * 6  # a seed and a mean for each policy


# -- rows ------------------------------------------------------------------------------------------------


def test_a_recurrent_network_learns_equally_well_under_each_policy() -> None:
    learned_equally_well(printed("rows.py", "--quick", "--cell", "LSTM"), 10, 0.6, 40, network="LSTM")


# -- underflow -------------------------------------------------------------------------------------------


def test_without_a_loss_scale_float16_learns_nothing_and_with_one_it_does() -> None:
    text = printed("underflow.py", "--quick")
    guess = float(re.findall(r"guessing is right for (\d+)%", text)[0])
    accuracy = {name.strip(): float(n) for name, n in re.findall(r"^(float.*?)  .*accuracy ([\d.]+)%", text, re.M)}

    assert accuracy.pop("float16, no loss scale") <= guess
    assert len(accuracy) == 3 and min(accuracy.values()) > 85


# -- replicas --------------------------------------------------------------------------------------------


def test_the_replicas_example_runs_alone_and_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    options = ("--epochs", "2", "--checkpoint", tmp_path / "a.npz")
    first, second = (re.findall(r"loss ([\d.]+)", printed("replicas.py", *options)) for _ in range(2))
    assert float(second[0]) < float(first[1]) < float(first[0])


# -- comparison with PyTorch -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "policy", "bound"),  # losses of 2 to 4, in 2**-11 and 2**-8
    [
        ("cnn", "float32", 1e-4),
        ("cnn", "mixed_bfloat16", 0.02),
        ("gpt", "float32", 1e-4),
        ("gpt", "mixed_float16", 0.004),
    ],
)
def test_losses_from_the_same_start_match_those_of_pytorch(name: str, policy: str, bound: float, example: Any) -> None:
    tasks = example("tasks")
    model = onnx.load(EXAMPLES / "models" / f"{name}.onnx")
    losses, _ = tasks.losses(tasks.TASKS[name], model, policy, STEPS)

    assert len(PYTORCH[name]) == 100
    np.testing.assert_allclose(losses, PYTORCH[name][:STEPS], rtol=0, atol=bound)
    assert PYTORCH[name][-1] < PYTORCH[name][0] - 0.5
