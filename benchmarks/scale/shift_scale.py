"""Memory and time of shifting weights while writing them, by their size.

    python benchmarks/run.py shift_scale [--sizes 0.5 2 5] [--folder DIR]

The models are those of `weights_scale`, converted without a shift, and with `--set shift=4` and ranges that overflow in
the residual stream, which scales all weights that write to it by 2^-4. A model of N GB takes 1.5 N GB of disk. `scaled`
is the size in float32 of the weights that differ from the unshifted model.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.scale.weights_scale import build
from benchmarks.shared import measure


@dataclass(frozen=True, slots=True)
class Point:
    """One conversion of a model."""

    gigabytes: float
    shift: str
    scaled: float
    wall: float
    cpu: float
    peak: int


def write_ranges(path: str, ranges: str) -> None:
    """Write ranges as if the residual stream of a model, `h0`, `r0`, `h1` …, went beyond float16."""
    import onnx

    from amp_rewrite import Model, Ranges
    from amp_rewrite.evidence.ranges import Range
    from amp_rewrite.files.fingerprint import fingerprint

    graph = onnx.load(path, load_external_data=False).graph
    names = [*(tensor.name for tensor in graph.initializer), *(name for node in graph.node for name in node.output)]
    large = Range(count=1, absmax=1e5, absmin=1e5, overflow=1)
    values = {name: large if re.fullmatch(r"[hr]\d+", name) else Range(1, absmax=1.0, absmin=1.0) for name in names}
    own = fingerprint(Model.load(path))
    Ranges("float16", values, 1, "synthetic", False, Path(path).name, own.graph, own.weights).save(ranges)


def scaled_bytes(path: str) -> float:
    """Return the gigabytes of scaled weights in a converted model, as float32."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    tensors = (t for t in model.graph.initializer if "_shifted_" in t.name)
    return sum(4.0 * _elements(tensor.dims) for tensor in tensors) / 1e9


def _elements(dims: Sequence[int]) -> int:
    count = 1
    for dim in dims:
        count *= dim
    return count


def measured(gigabytes: float, root: Path) -> list[Point]:
    """Build a model, and convert it with and without a shift."""
    folder, target = root / "model", root / "out"
    folder.mkdir()
    measure.apart(build, gigabytes, str(folder / "gpt.onnx"), False)
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1e9
    ranges = root / "ranges.json"
    ranges.unlink(missing_ok=True)
    measure.apart(write_ranges, str(folder / "gpt.onnx"), str(ranges))
    points = []
    for shift in ("none", "4"):
        target.mkdir()
        command = [
            *measure.own_command(),
            folder / "gpt.onnx",
            "--no-check",
            *(() if shift == "none" else ("--ranges", ranges)),
            "--set",
            f"shift={shift}",
            "-o",
            target / "gpt.onnx",
            "-q",
        ]
        run = measure.cost(command)
        if run.code:
            sys.exit(f"amp-rewrite failed: {run.said}")
        share = measure.apart(scaled_bytes, str(target / "gpt.onnx"))
        points.append(Point(size, shift, share, run.wall, run.cpu, run.peak))
        shutil.rmtree(target)
    shutil.rmtree(folder)
    return points


HEAD = ("weights", "shift", "scaled", "seconds", "CPU seconds", "peak MB")


def cells(p: Point) -> tuple[str, ...]:
    """Return a row of the table."""
    sizes = f"{p.gigabytes:.2f} GB", p.shift, f"{p.scaled:.2f} GB"
    return (*sizes, f"{p.wall:.1f}", f"{p.cpu:.1f}", f"{p.peak / 1e6:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.5, 2.0, 5.0], help="gigabytes")
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure (default: the temporary folder)")
    args = parser.parse_args()
    points: list[Point] = []
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-", dir=args.folder) as name:
        for size in args.sizes:
            points += measured(size, Path(name))
            print(*("  ".join(cells(point)) for point in points[-2:]), sep="\n", flush=True)
    measure.write("shift_scale", measure.machine(), points, measure.markdown(HEAD, map(cells, points)))


if __name__ == "__main__":
    main()
