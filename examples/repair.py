"""Repair a model that breaks in float16 with data, command by command.

    python examples/repair.py [NAME]

NAME is a model in `tests/support/hard_models.py`. The default, `llama_outlier`, is a small decoder that writes 70,000
into one channel of its residual stream, as trained decoders do. The script prints each command, then runs it.
docs/evidence/hard_models.md lists all models; docs/how-to/repair.md describes the repair.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import amp_rewrite

ROOT = Path(__file__).parents[1]
TOLERANCE = ("--tolerance", "1e-2")
DATA = ("--data", "batch.npz")
DATA_RULES = ("overflow", "underflow", "nonfinite", "unseen", "repair")
"""Rules that keep an op in float32 because of the data."""

STEPS = (
    (
        "Convert the model. Neither the lists nor the graph reveal the problem:",
        ("model.onnx", "-o", "plain.onnx", "--quiet"),
    ),
    (
        "Is the result close enough? Low precision is emulated without a GPU. Exit code 1 means no.",
        ("verify", "model.onnx", "plain.onnx", *DATA, *TOLERANCE),
    ),
    (
        "Which values occur inside? Calibrate, and compare the largest values with float16's 65504.",
        ("calibrate", "model.onnx", *DATA, "-o", "ranges.json"),
    ),
    (
        "Where does it go wrong? Locate the first op where the error jumps, and the ops that add the most error.",
        ("locate", "model.onnx", "plain.onnx", *DATA, "--top", "3"),
    ),
    (
        "Repair: calibrate, keep values that do not fit in float32, and search until the outputs are close enough.",
        ("model.onnx", "-o", "repaired.onnx", *DATA, *TOLERANCE, "--report", "repaired.json"),
    ),
    (
        "Is that close enough?",
        ("verify", "model.onnx", "repaired.onnx", *DATA, *TOLERANCE),
    ),
)


def run(folder: Path, heading: str, arguments: tuple[str, ...]) -> int:
    """Print and run one command in `folder`, and return its exit code."""
    print(f"\n{heading}\n\n$ amp-rewrite {' '.join(arguments)}", flush=True)
    command = [sys.executable, "-m", "amp_rewrite", *arguments]
    return subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, check=False).returncode


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "llama_outlier"
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        subprocess.run([sys.executable, ROOT / "tests" / "support" / "hard_models.py", folder], check=True)
        if not (folder / f"{name}.onnx").exists():
            names = ", ".join(sorted(path.stem for path in folder.glob("*.onnx")))
            raise SystemExit(f"there is no model {name!r}; choose one of {names}")
        (folder / f"{name}.onnx").rename(folder / "model.onnx")
        (folder / f"{name}.npz").rename(folder / "batch.npz")
        codes = [run(folder, heading, arguments) for heading, arguments in STEPS]
        report = amp_rewrite.Report.from_json((folder / "repaired.json").read_text("utf-8"), "repaired.json")
        raised = [row.path for row in report.rows if row.rule in DATA_RULES]
        for path in raised[:1]:
            codes.append(run(folder, f"Why is {path} float32? Explain.", ("explain", "repaired.json", path)))
    del codes[1]  # the conversion without data may pass or fail
    if any(codes):
        raise SystemExit(f"{name} was not repaired")


if __name__ == "__main__":
    main()
