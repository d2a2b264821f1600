"""Time and memory of a plain conversion, with its check on one random batch and with --no-check.

    python benchmarks/run.py checked CACHE [--rounds 5]

CACHE is the folder written by `zoo`. The models are its BERT-base, ViT-base and Whisper encoder, and a generated MLP of
100 MB. Each run is a separate process, including start-up. Memory is the kernel's peak for the process, which includes
mapped pages of the weights file.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.shared import measure

EXPORTED = ("bert_base", "vit_base", "whisper_small_encoder")
WAYS = {"--no-check": ("--no-check",), "checked": ()}


@dataclass(frozen=True, slots=True)
class Point:
    """The fastest of several runs of one command. `size`: bytes of the model."""

    model: str
    way: str
    size: int
    wall: float
    cpu: float
    peak: int


def mlp(path: str, layers: int = 6, width: int = 2048) -> None:
    """Write a network of dense layers with 100 MB of seeded random weights."""
    import numpy as np
    import onnx
    from onnx import numpy_helper

    draw = np.random.default_rng(0)
    scale = np.float32(width**-0.5)
    weights = [draw.standard_normal((width, width), np.float32) * scale for _ in range(layers)]
    nodes, at = [], "x"
    for number in range(layers):
        nodes.append(onnx.helper.make_node("MatMul", [at, f"w{number}"], [f"h{number}"], f"dense{number}"))
        nodes.append(onnx.helper.make_node("Relu", [f"h{number}"], [at := f"r{number}"], f"relu{number}"))
    ports = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", width]) for name in ("x", at))
    initializers = [numpy_helper.from_array(weight, f"w{number}") for number, weight in enumerate(weights)]
    graph = onnx.helper.make_graph(nodes, "mlp", *([port] for port in ports), initializer=initializers)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9), path)


def measured(model: Path, way: str, rounds: int, folder: Path) -> Point:
    command = [*measure.own_command(), model, "-o", folder / "out.onnx", "--overwrite", "-q", *WAYS[way]]
    runs = [measure.cost(command) for _ in range(rounds)]
    if failed := next((run for run in runs if run.code), None):
        sys.exit(f"{model.name}, {way}: {failed.said}")
    best = measure.best(runs)
    return Point(model.stem, way, model.stat().st_size, best.wall, best.cpu, min(run.peak for run in runs))


def table(points: list[Point]) -> list[str]:
    head = ("model", "MB", "way", "seconds", "CPU seconds", "peak MB")
    rows = [
        (p.model, f"{p.size / 1e6:.0f}", p.way, f"{p.wall:.1f}", f"{p.cpu:.1f}", f"{p.peak / 1e6:.0f}") for p in points
    ]
    return measure.markdown(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    measure.warm_up()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        measure.apart(mlp, str(folder / "mlp_100_mb.onnx"))
        models = (folder / "mlp_100_mb.onnx", *(args.cache / f"{name}.onnx" for name in EXPORTED))
        points = [measured(model, way, args.rounds, folder) for model in models for way in WAYS]
    about = measure.machine(("onnx", "numpy", "onnxruntime-gpu"))
    measure.write("checked", about, points, table(points))


if __name__ == "__main__":
    main()
