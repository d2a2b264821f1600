"""Errors of every shipped model on OpenVINO's CPU device, in float32 and converted, at each precision hint.

    python benchmarks/run.py openvino_hints PYTHON [--only NAME ...]

PYTHON is an interpreter with `openvino`, such as a separate virtual environment. The models are the exports in
tests/models and the digit classifiers, each with its batch. An error is the largest difference from float32 on
onnxruntime's CPU provider, relative to the largest absolute value of the output; `emulated` is this package's
prediction. The results also state the precision reported by the device, since a device without float16 uses another
type.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import amp_rewrite
from amp_rewrite.files.model import Model
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.runner import Runner
from benchmarks.shared import measure

HINTS = ("f32", "f16", "bf16")
FILES = ("float32", "float16", "bfloat16")
RUNS = (
    *(("float32", hint) for hint in HINTS),
    ("float16", "f32"),
    ("float16", "f16"),
    ("bfloat16", "f32"),
    ("bfloat16", "bf16"),
)
Arrays = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One run: the model, its file's type, the hint, the precision reported by the device, error and prediction."""

    model: str
    file: str
    hint: str
    precision: str
    error: float | None
    emulated: float | None
    failure: str = ""


def models() -> Iterator[tuple[str, Path, Arrays]]:
    """Yield the shipped models with a batch each."""
    for path in sorted((measure.ROOT / "tests" / "models").glob("*.onnx")):
        arrays = np.load(path.with_suffix(".npz"))
        yield path.stem, path, {k.removeprefix("input/"): arrays[k] for k in arrays.files if k.startswith("input/")}
    folder = measure.ROOT / "examples" / "models"
    images = np.load(folder / "digits_test.npz")["x"][:64]
    for path in sorted(folder.glob("*.onnx")):
        (name,) = (port.name for port in Runner.open(Model.load(path)).inputs)
        yield path.stem, path, {name: images}


def scaled(own: Mapping[str, Any], truth: Mapping[str, Any]) -> float:
    """Return the largest difference, relative to the output's largest absolute value; infinity if it is not finite."""
    worst = 0.0
    for name, expected in truth.items():
        here, there = np.asarray(own[name], np.float64), np.asarray(expected, np.float64)
        gap = np.abs(here - there).max(initial=0.0)
        worst = max(
            worst, float(gap / max(np.abs(there).max(initial=0.0), 1e-30)) if np.isfinite(gap) else float("inf")
        )
    return worst


class Device:
    """OpenVINO in the other interpreter, restarted after a crash."""

    def __init__(self, python: str) -> None:
        self.python = python
        self.process, self.about = self._started()

    def _started(self) -> tuple[subprocess.Popen[str], dict[str, str]]:
        command = [self.python, str(Path(__file__).with_name("openvino_child.py"))]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        return process, json.loads(process.stdout.readline())

    def run(self, **words: str) -> dict[str, str]:
        """Return the answer to one request."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(words), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            self.process, _ = self._started()
            return {"error": f"the process exited with {code}"}
        answer: dict[str, str] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def rows(name: str, path: Path, batch: Arrays, device: Device, folder: Path) -> Iterator[Row]:
    """Yield one model's runs."""
    runner = Runner.open(Model.load(path))
    floats = [port.name for port in runner.outputs if port.dtype is not None and port.dtype.floating]
    truth = runner.run(batch, floats)
    np.savez(folder / "batch.npz", **batch)
    onnx.save(onnx.load(path), folder / "float32.onnx")
    predicted: dict[str, float] = {}
    for to in FILES[1:]:
        result = amp_rewrite.convert(path, target="openvino", to=to)  # type: ignore[arg-type]
        result.save(folder / f"{to}.onnx", overwrite=True)
        predicted[to] = scaled(Runner.open(emulate(result.result)).run(batch, floats), truth)
    for file, hint in RUNS:
        out = folder / "out.npz"
        reply = device.run(model=str(folder / f"{file}.onnx"), hint=hint, batch=str(folder / "batch.npz"), out=str(out))
        if "error" in reply:
            yield Row(name, file, hint, "", None, predicted.get(file), reply["error"])
            continue
        yield Row(name, file, hint, reply["precision"], scaled(np.load(out), truth), predicted.get(file))


def table(made: list[Row], about: Mapping[str, str]) -> list[str]:
    """Return the lines of the results, with a row per model and a column per run."""
    by_model: dict[str, dict[tuple[str, str], Row]] = {}
    for row in made:
        by_model.setdefault(row.model, {})[row.file, row.hint] = row
    precisions = {
        hint: " or ".join(sorted({row.precision for row in made if row.hint == hint and row.precision}))
        for hint in HINTS
    }
    answers = ", ".join(f"{hint} became {precision}" for hint, precision in precisions.items())
    head = ["model", *(f"{file} at {hint}" for file, hint in RUNS), *(f"{file} emulated" for file in FILES[1:])]
    cells = [
        [model, *(_shown(runs[run].error) for run in RUNS), *(_shown(runs[file, "f32"].emulated) for file in FILES[1:])]
        for model, runs in by_model.items()
    ]
    failed = [f"- {row.model}, {row.file} at {row.hint}: {row.failure}" for row in made if row.failure]
    return [
        f"OpenVINO {about['version']} on {about['device']}, with {about['capabilities']}. Hints: {answers}.",
        f"{len(made) - len(failed)} of {len(made)} runs of {len(by_model)} models compiled, ran and were compared.",
        "",
        "Columns: the file's type, and the hint. A cell is the largest difference from float32 on onnxruntime's"
        " CPU provider, relative to the output's largest absolute value; `emulated` is the prediction for the file.",
        "",
        *measure.markdown(head, cells),
        *(["", *failed] if failed else []),
    ]


def _shown(error: float | None) -> str:
    return "fails" if error is None else f"{error:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="an interpreter with openvino")
    parser.add_argument("--only", nargs="*", default=[], help="names of the models to run")
    arguments = parser.parse_args()
    device = Device(arguments.python)
    made: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, path, batch in models():
            if arguments.only and name not in arguments.only:
                continue
            for row in rows(name, path, batch, device, Path(scratch)):
                made.append(row)
                print(json.dumps(asdict(row)), flush=True)
    device.close()
    if not arguments.only:
        about = {**measure.machine(), "openvino": device.about}
        measure.write("openvino", about, made, table(made, device.about))


if __name__ == "__main__":
    main()
