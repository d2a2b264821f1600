"""Time and memory of calibration, compared with plain inference.

    python benchmarks/run.py calibration CACHE [--models bert_base] [--batches 100] [--rounds 3] [--threads 0]

CACHE is the folder written by `zoo`. Each round runs the model on the batches, then calibrates it on the same batches,
each in a separate process, including start-up and loading. Inference runs as fast as onnxruntime allows: optimized,
with outputs as arrays.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.shared import measure

SEED = 3


@dataclass(frozen=True, slots=True)
class Point:
    """The cost of one process. `what`: inference or calibration. `size`: bytes of the model."""

    model: str
    round: int
    what: str
    batches: int
    size: int
    wall: float
    cpu: float
    peak: int


def infer(model: str, data: str, threads: int) -> None:
    """Run a model on data, and discard the outputs."""
    from amp_rewrite import Feed, Model
    from amp_rewrite.runtime.runner import Runner, SessionOptions

    loaded = Model.load(model)
    runner = Runner.open(loaded, SessionOptions(threads=threads))
    for batch in Feed.of(data, loaded):
        runner.run(batch)


def calibrate(model: str, data: str, threads: int) -> None:
    """Calibrate a model on data, and discard the ranges."""
    import amp_rewrite

    amp_rewrite.calibrate(model, data, threads=threads or None)


STEPS = {"inference": infer, "calibration": calibrate}


def draw(batch: str, batches: int, path: str) -> None:
    """Write random batches like a stored one, with normal floats; integer inputs of only 0 and 1 stay the same."""
    import numpy as np

    random = np.random.default_rng(SEED)
    arrays = {}
    with np.load(batch) as stored:
        for i in range(batches):
            for name, array in stored.items():
                if array.dtype.kind == "f":
                    arrays[f"{i}/{name}"] = random.standard_normal(array.shape).astype(array.dtype)
                elif array.max() > 1:
                    arrays[f"{i}/{name}"] = random.integers(0, array.max() + 1, array.shape, array.dtype)
                else:
                    arrays[f"{i}/{name}"] = array
    np.savez(path, **arrays)


def measured(model: Path, number: int, what: str, batches: int, data: Path, threads: int) -> Point:
    cost = measure.cost([*measure.script("calibration"), "--one", what, model, data, str(threads)])
    if cost.code:
        sys.exit(f"{what} of {model.name} failed: {cost.said}")
    external = model.with_name(model.name + ".data")
    size = model.stat().st_size + (external.stat().st_size if external.exists() else 0)
    return Point(model.stem, number, what, batches, size, cost.wall, cost.cpu, cost.peak)


def table(points: list[Point]) -> list[str]:
    """Return the lines of the results table: each pair of runs, followed by their ratios."""
    head = ["model", "round", "batches", "what", "seconds", "CPU seconds", "peak MB", "peak / model"]
    rows: list[list[object]] = []
    for plain, calibrated in zip(points[::2], points[1::2], strict=False):
        for p in (plain, calibrated):
            numbers = [f"{p.wall:.1f}", f"{p.cpu:.1f}", f"{p.peak / 1e6:.0f}", f"{p.peak / p.size:.2f}"]
            rows.append([p.model, p.round, p.batches, p.what, *numbers])
        ratios = [f"{calibrated.wall / plain.wall:.2f}×", f"{calibrated.cpu / plain.cpu:.2f}×", "", ""]
        rows.append([plain.model, plain.round, plain.batches, "ratio", *ratios])
    return measure.markdown(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--models", nargs="+", default=["bert_base"])
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="threads per op; 0: one per core")
    parser.add_argument("--dry-run", action="store_true", help="print only, without writing the results file")
    args = parser.parse_args()
    points: list[Point] = []
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-") as folder:
        for name in args.models:
            model, data = args.cache / f"{name}.onnx", Path(folder) / f"{name}.npz"
            measure.apart(draw, str(model.with_suffix(".npz")), args.batches, str(data))
            for number in range(1, args.rounds + 1):
                for what in STEPS:
                    points.append(measured(model, number, what, args.batches, data, args.threads))
                    p = points[-1]
                    cost = f"{p.wall:7.1f} s  cpu {p.cpu:7.1f} s  {p.peak / 1e6:6.0f} MB"
                    print(f"{p.model:12} {p.round} {p.what:12} {cost}", flush=True)
                if not args.dry_run:  # an interrupted run keeps its results so far
                    about = measure.machine(("onnx", "onnxruntime-gpu", "numpy"))
                    measure.write("calibration", about, points, table(points))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        STEPS[sys.argv[2]](sys.argv[3], sys.argv[4], int(sys.argv[5]))
    else:
        main()
