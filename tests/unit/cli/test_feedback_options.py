"""`--feedback` and `--steps` on the command line, as keys, and in the advice of a verdict."""

import json
import shlex
from pathlib import Path

import numpy as np
import onnx
import pytest

from unit.cli.test_cli import folder, run
from unit.evidence.test_feedback import DRIP, LEAKY, SUM

__all__ = ["folder"]

KEYS = ("--set", "feedback=hn=h", "--set", "steps=300")


@pytest.fixture(autouse=True)
def models(folder: Path) -> None:
    onnx.save(LEAKY.proto, "leaky.onnx")
    onnx.save(SUM.proto, "sum.onnx")
    np.savez("one.npz", **DRIP)
    np.savez("many.npz", **{f"{n}/x": np.full(2, n, np.float32) for n in range(4)})
    done = run("leaky.onnx", "-o", "low.onnx", "--target", "onnx")
    assert done.exit_code == 0, done.stderr


def test_the_advice_of_a_verdict_runs_as_it_is_printed() -> None:
    plain = run("verify", "leaky.onnx", "low.onnx", "--data", "one.npz", "--tolerance", "1e-2", "--report", "v.json")
    assert plain.exit_code == 0, plain.stderr
    *_, note, command = plain.stdout.splitlines()
    assert note.startswith("note: without --feedback hn=h this does not show the hundredth step: output 'hn' looks")
    words = "verify leaky.onnx low.onnx --data one.npz --tolerance 1e-2 --report v.json"
    assert command == f"next: amp-rewrite {words} --feedback hn=h --steps 100 --overwrite"
    done = run(*shlex.split(command.removeprefix("next: amp-rewrite ")))
    assert done.exit_code == 1 and "100 steps each, hn fed back to h" in done.stdout
    assert "hundredth" not in done.stdout
    assert {row["step"] for row in json.loads(Path("v.json").read_text())["rows"]} == set(range(100))


def test_calibrate_convert_and_settings_take_feedback() -> None:
    done = run("calibrate", "sum.onnx", "--data", "many.npz", "--feedback", "hn=h", "-o", "r.json")
    assert done.exit_code == 0, done.stderr
    ranges = json.loads(Path("r.json").read_text())
    assert (ranges["values"]["hn"]["absmax"], ranges["batches"]) == (6, 4)
    words = ("leaky.onnx", "--target", "onnx", "--tolerance", "1e-2", "--data", "one.npz", "--dry-run")
    plain, fed = run(*words), run(*words, "-v", *KEYS)
    assert "without --set feedback=hn=h this does not show the hundredth step" in plain.stdout
    assert "repair: 1 of" in fed.stdout and "300 steps each, hn fed back to h" in fed.stdout, fed.stdout
    Path("amp.toml").write_text('data = "one.npz"\nfeedback = "hn=h"\nsteps = 300\ntolerance = 0.01\n')
    assert run("verify", "leaky.onnx", "low.onnx").exit_code == 1
    assert run("bench", "leaky.onnx", "--rounds", "1", "--no-memory").exit_code == 0
