"""Time and memory against the size of the weights, beside `cp` of the same bytes in the same run.

    python benchmarks/weights_scale.py [--max-gb 2] [--folder DIR]

Synthetic GPT-like models of 0.5, 2, 8 and 20 GB with external data are written streaming, then converted by
`amp-rewrite` in a process of its own; one of 0.5 GB and one of 1.5 GB keep their weights inside. At its peak a
model of N GB takes 2 N GB of disk: the model and the copy of it (the converted model is half a copy).
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import measure

if TYPE_CHECKING:
    from onnx import NodeProto

SIZES = (0.5, 2.0, 8.0, 20.0)
INLINE = (0.5, 1.5)
_ALLOWED = 200e6


@dataclass(frozen=True, slots=True)
class Point:
    """One model. `copied` and `synced` are `cp` without and with waiting for the disk; amp-rewrite waits."""

    gigabytes: float
    inline: bool
    largest: int
    to: str
    wall: float
    cpu: float
    peak: int
    copied: float
    synced: float

    @property
    def bound(self) -> float:
        """The peak memory that is allowed."""
        return 2e9 * self.gigabytes if self.inline else _ALLOWED + 3 * self.largest


def build(gigabytes: float, path: str, inline: bool) -> int:
    """Write a GPT-like model of about that size; the bytes of its largest tensor."""
    import numpy as np
    import onnx
    from onnx import TensorProto, helper

    width = 1024 if gigabytes < 1 else 2048 if gigabytes < 4 else 4096
    vocabulary = 16 * width
    layers = max(1, round((gigabytes * 1e9 / 4 - vocabulary * width) / (12 * width * width)))
    random = np.random.default_rng(0)
    noise = random.standard_normal(1 << 22, np.float32) * np.float32(0.02)
    shapes = {"embedding": (vocabulary, width)}
    for i in range(layers):
        shapes |= {f"qkv{i}": (width, 3 * width), f"out{i}": (width, width), f"up{i}": (width, 4 * width)}
        shapes |= {f"down{i}": (4 * width, width), f"scale{i}": (width,)}
    nodes = list(_nodes(layers))
    place = Path(path)
    tensors = []
    with (place.with_suffix(".bin")).open("wb") as data:
        for name, shape in shapes.items():
            tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape)
            count = int(np.prod(shape))
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", data_name(path)), ("offset", data.tell()), ("length", 4 * count)):
                tensor.external_data.add(key=key, value=str(value))
            while count:
                part = noise[random.integers(0, 1 << 16) :][:count]
                data.write(part.data)
                count -= part.size
            tensors.append(tensor)
    graph = helper.make_graph(
        nodes,
        "gpt",
        [helper.make_tensor_value_info("tokens", TensorProto.INT64, ("batch", "length"))],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ("batch", "length", width))],
        tensors,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    if inline:
        onnx.load_external_data_for_model(model, str(place.parent))
        place.with_suffix(".bin").unlink()
    place.write_bytes(model.SerializeToString())
    return max(4 * int(np.prod(shape)) for shape in shapes.values())


def data_name(path: str) -> str:
    return Path(path).with_suffix(".bin").name


def _nodes(layers: int) -> Iterator[NodeProto]:
    """Embedding, then blocks of LayerNormalization, attention without its heads, and a gated layer."""
    from onnx import helper

    def node(kind: str, inputs: list[str], *outputs: str, **attributes: object) -> NodeProto:
        return helper.make_node(kind, inputs, list(outputs), name=f"{kind}_{outputs[0]}", **attributes)

    yield node("Gather", ["embedding", "tokens"], "h0")
    for i in range(layers):
        yield node("LayerNormalization", [f"h{i}", f"scale{i}"], f"n{i}")
        yield node("MatMul", [f"n{i}", f"qkv{i}"], f"a{i}")
        yield node("Split", [f"a{i}"], f"q{i}", f"k{i}", f"v{i}", axis=-1, num_outputs=3)
        yield node("Transpose", [f"k{i}"], f"t{i}", perm=[0, 2, 1])
        yield node("MatMul", [f"q{i}", f"t{i}"], f"s{i}")
        yield node("Softmax", [f"s{i}"], f"p{i}")
        yield node("MatMul", [f"p{i}", f"v{i}"], f"m{i}")
        yield node("MatMul", [f"m{i}", f"out{i}"], f"o{i}")
        yield node("Add", [f"h{i}", f"o{i}"], f"r{i}")
        yield node("MatMul", [f"r{i}", f"up{i}"], f"u{i}")
        yield node("Gelu", [f"u{i}"], f"g{i}")
        yield node("MatMul", [f"g{i}", f"down{i}"], f"d{i}")
        yield node("Add", [f"r{i}", f"d{i}"], f"h{i + 1}")
    yield node("Identity", [f"h{layers}"], "logits")


def copied(folder: Path, *, sync: bool) -> float:
    """Seconds that `cp` takes for the folder, with `sync` until it is on disk."""
    target = folder.with_name("copy")
    start = time.perf_counter()
    measure.cost(["cp", "-r", folder, target])
    if sync:
        for file in target.iterdir():
            with file.open("rb+") as handle:
                os.fsync(handle.fileno())
    wall = time.perf_counter() - start
    shutil.rmtree(target)
    return wall


def measured(gigabytes: float, *, inline: bool, to: str, root: Path, rounds: int) -> Point:
    """Build a model, copy it, convert it, in turn; the least of each."""
    folder = root / "model"
    folder.mkdir()
    largest = measure.apart(build, gigabytes, str(folder / "gpt.onnx"), inline)
    out = root / "out"
    copies, syncs, runs = [], [], []
    for _ in range(rounds):
        copies.append(copied(folder, sync=False))
        syncs.append(copied(folder, sync=True))
        out.mkdir()
        words = [folder / "gpt.onnx", "--to", to, "-o", out / "gpt.onnx", "-q"]
        runs.append(measure.cost([*measure.own_command(), *words]))
        if runs[-1].code:
            sys.exit(f"amp-rewrite failed: {runs[-1].said}")
        shutil.rmtree(out)
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1e9
    shutil.rmtree(folder)
    run = measure.best(runs)
    peak = max(r.peak for r in runs)
    return Point(size, inline, largest, to, run.wall, run.cpu, peak, min(copies), min(syncs))


def cells(p: Point) -> tuple[str, ...]:
    """One row of the table."""
    return (
        f"{p.gigabytes:.2f} GB {'inside' if p.inline else 'beside'}",
        p.to,
        f"{p.wall:.1f}",
        f"{p.cpu:.1f}",
        f"{p.copied:.1f}",
        f"{p.synced:.1f}",
        f"{p.wall / p.copied:.2f}",
        f"{p.wall / p.synced:.2f}",
        f"{p.peak / 1e6:.0f}",
        f"{p.bound / 1e6:.0f}",
    )


HEAD = (
    *("weights", "to", "seconds", "processor seconds", "cp", "cp and fsync", "against cp", "against cp and fsync"),
    *("peak MB", "allowed MB"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-gb", type=float, default=2.0)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: the temporary folder)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dry-run", action="store_true", help="print, but leave the results file alone")
    given = parser.parse_args()
    sizes = [size for size in SIZES if size <= given.max_gb]
    needed = 2.1 * max(sizes) * 1e9
    points: list[Point] = []
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-", dir=given.folder) as name:
        free = shutil.disk_usage(name).free
        print(f"needs {needed / 1e9:.1f} GB of disk in {Path(name).parent}; {free / 1e9:.1f} GB are free")
        if free < needed:
            sys.exit("not enough disk; lower --max-gb or name another --folder")
        cases = [(size, False, "float16") for size in sizes] + [(sizes[0], False, "bfloat16")]
        cases += [(size, True, "float16") for size in INLINE if size <= given.max_gb]
        for size, inline, to in cases:
            points.append(measured(size, inline=inline, to=to, root=Path(name), rounds=given.rounds))
            print("  ".join(cells(points[-1])), flush=True)
            if not given.dry_run:  # a long run that is broken off keeps what it has
                measure.write("weights_scale", measure.machine(), points, measure.markdown(HEAD, map(cells, points)))


if __name__ == "__main__":
    main()
