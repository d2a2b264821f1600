"""The story of a model that float16 breaks and data mends, command by command.

    python examples/repair.py [NAME]

NAME is one of the models of `tests/support/hard_models.py`; by default `llama_outlier`, a small decoder that writes
70 000 into one channel of its residual stream, as trained ones of that kind do. Every command is printed before it
runs, followed by its output. docs/evidence/hard_models.md lists all models; docs/how-to/repair.md describes the repair.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import amp_rewrite

ROOT = Path(__file__).parents[1]
NEAR = ("--tolerance", "1e-2")
DATA = ("--data", "batch.npz")
PINNED = ("overflow", "underflow", "nonfinite", "unseen", "repair")
"""Rules by which data keeps an op in float32."""

STORY = (
    (
        "Convert it. The lists and the graph know nothing of 70 000:",
        ("model.onnx", "-o", "plain.onnx", "--quiet"),
    ),
    (
        "Is it near enough? Low precision is emulated where there is no GPU. Exit code 1: no.",
        ("verify", "model.onnx", "plain.onnx", *DATA, *NEAR),
    ),
    (
        "What do the data do in there? Calibrate, and look at the largest values beside float16's 65504.",
        ("calibrate", "model.onnx", *DATA, "-o", "ranges.json"),
    ),
    (
        "Where does it go wrong? Locate: the first op where the error jumps, and those that add most.",
        ("locate", "model.onnx", "plain.onnx", *DATA, "--top", "3"),
    ),
    (
        "Repair: calibrate, keep in float32 what does not fit, then search until the outputs are near enough.",
        ("model.onnx", "-o", "repaired.onnx", *DATA, *NEAR, "--report", "repaired.json"),
    ),
    (
        "And is that near enough?",
        ("verify", "model.onnx", "repaired.onnx", *DATA, *NEAR),
    ),
)


def tell(folder: Path, said: str, words: tuple[str, ...]) -> int:
    """Print and run one command in `folder`; its exit code."""
    print(f"\n{said}\n\n$ amp-rewrite {' '.join(words)}", flush=True)
    command = [sys.executable, "-m", "amp_rewrite", *words]
    return subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, check=False).returncode


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "llama_outlier"
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        subprocess.run([sys.executable, ROOT / "tests" / "support" / "hard_models.py", folder], check=True)
        if not (folder / f"{name}.onnx").exists():
            known = ", ".join(sorted(path.stem for path in folder.glob("*.onnx")))
            raise SystemExit(f"there is no model {name!r}; take one of {known}")
        (folder / f"{name}.onnx").rename(folder / "model.onnx")
        (folder / f"{name}.npz").rename(folder / "batch.npz")
        codes = [tell(folder, said, words) for said, words in STORY]
        report = amp_rewrite.Report.from_json((folder / "repaired.json").read_text("utf-8"), "repaired.json")
        pinned = [row.path for row in report.rows if row.rule in PINNED]
        for path in pinned[:1]:
            codes.append(tell(folder, f"Why is {path} float32? Explain.", ("explain", "repaired.json", path)))
    del codes[1]  # what was converted without data may be near enough or not
    if any(codes):
        raise SystemExit(f"{name} was not repaired")


if __name__ == "__main__":
    main()
