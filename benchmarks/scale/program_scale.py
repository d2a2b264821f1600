"""Memory of converting programs of onnx_ir and torch whose weights are in memory, made on demand, or in a file.

    python benchmarks/run.py program_scale [--gb 2.4] [--folder DIR]

The GPT-like model of `weights_scale` is read into a program, then converted and saved, each in a process of its own.
The growth is that of the peak from just before the conversion until the file is written; 0.2 of the weights is allowed.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.scale.weights_scale import build
from benchmarks.shared import measure

KINDS = {
    "numpy": "arrays in memory",
    "torch": "torch tensors in memory",
    "lazy": "made when asked, by functions that read the file",
    "external": "in the file",
}
_ALLOWED = 0.2


@dataclass(frozen=True, slots=True)
class Point:
    """One program: bytes of its weights, resident before, and of the growth of the peak; seconds of both steps."""

    kind: str
    weights: int
    before: int
    growth: int
    convert: float
    save: float


def _peak() -> int:
    """Return the high-water mark of this process in bytes; unlike ru_maxrss it is not inherited from the parent."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _tensor(tensor: Any, kind: str) -> Any:
    """Return the external tensor in another form."""
    import numpy as np
    import onnx_ir as ir

    def values() -> Any:
        flat = np.fromfile(tensor.path, np.float32, tensor.size, offset=tensor.offset)
        return flat.reshape(tensor.shape.numpy())

    if kind == "lazy":
        return ir.LazyTensor(lambda: ir.Tensor(values()), dtype=tensor.dtype, shape=tensor.shape, name=tensor.name)
    if kind == "torch":
        import torch

        return ir.tensor_adapters.TorchTensor(torch.from_numpy(values()), name=tensor.name)
    return ir.Tensor(values(), name=tensor.name)


def measured(kind: str, path: str, target: str) -> Point:
    """Load the model as a program of this kind, then convert and save it."""
    import onnx_ir as ir

    import amp_rewrite

    program = ir.load(path)
    values = list(program.graph.initializers.values())
    if kind != "external":
        for value in values:
            value.const_value = _tensor(value.const_value, kind)
    before = _peak()
    start = time.perf_counter()
    converted = amp_rewrite.convert(program)
    between = time.perf_counter()
    converted.save(target)
    end = time.perf_counter()
    weights = sum(value.const_value.nbytes for value in values)
    return Point(kind, weights, before, _peak() - before, between - start, end - between)


def cells(p: Point) -> tuple[str, ...]:
    """One row of the table."""
    sizes = (f"{size / 1e6:.0f}" for size in (p.before, p.growth, _ALLOWED * p.weights))
    return (f"{p.weights / 1e9:.2f} GB, {KINDS[p.kind]}", *sizes, f"{p.convert:.1f}", f"{p.save:.1f}")


HEAD = ("weights", "peak MB before", "growth MB", "allowed MB", "seconds of convert", "of save")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.4)
    parser.add_argument("--folder", type=Path, help="on the disk to write to (default: the temporary folder)")
    parser.add_argument("--dry-run", action="store_true", help="print, but leave the results file alone")
    given = parser.parse_args()
    points: list[Point] = []
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-", dir=given.folder) as name:
        path = Path(name) / "gpt.onnx"
        measure.apart(build, given.gb, str(path), False)
        expected: list[str] | None = None
        for kind in KINDS:
            target = Path(name) / kind
            target.mkdir()
            points.append(measure.apart(measured, kind, str(path), str(target / "gpt.onnx")))
            print("  ".join(cells(points[-1])), flush=True)
            written = sorted(file.name for file in target.iterdir())  # that of the data file is a hash of its content
            assert expected in (None, written), f"{kind}: other weights than {next(iter(KINDS))}"
            expected = written
            shutil.rmtree(target)
    if not given.dry_run:
        packages = ("onnx", "onnx_ir", "torch", "numpy", "protobuf")
        measure.write("program_scale", measure.machine(packages), points, measure.markdown(HEAD, map(cells, points)))


if __name__ == "__main__":
    main()
