"""Time and memory of a conversion by the size of the weights, compared with `cp` of the same bytes.

    python benchmarks/run.py weights_scale [--max-gb 2] [--folder DIR]
    python benchmarks/run.py weights_scale --sizes 2 20 --rounds 1 --results giants

Synthetic GPT-like models of 0.5, 2, 8 and 20 GB with external data are streamed to disk, then converted by
`amp-rewrite` in a separate process. Two more models, of 0.5 GB and 1.9 GB, have inline weights. At its peak, a model of
N GB takes 2 N GB of disk, for the model and its copy (the converted model is half the size).

Both commands are timed twice, on equal terms: until everything is on disk (`cp` with an fsync, and `amp-rewrite`, which
waits for the disk), and until the system has all bytes (`cp`, and `amp-rewrite` with a no-op fsync). Every command
reads the model from disk, since the page cache is dropped before each (not with `--warm`).
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

from benchmarks.shared import measure

if TYPE_CHECKING:
    from onnx import NodeProto

SIZES = (0.5, 2.0, 8.0, 20.0)
INLINE = (0.5, 1.9)
_ALLOWED = 200e6
_ONCE = 10.0  # gigabytes above which there is only one round
_UNSYNCED = "import os; os.fsync = lambda _: None; from amp_rewrite.cli import main; main()"


@dataclass(frozen=True, slots=True)
class Point:
    """One model. `copied` and `unsynced`: wall seconds of `cp` and of amp-rewrite without an fsync.

    `copied_synced` and `wall`: wall seconds until everything is on disk; `cpu` and `peak` belong to the latter.
    """

    gigabytes: float
    inline: bool
    largest: int
    to: str
    unsynced: float
    wall: float
    cpu: float
    peak: int
    copied: float
    copied_synced: float

    @property
    def bound(self) -> float:
        """The allowed peak memory."""
        return 2e9 * self.gigabytes if self.inline else _ALLOWED + 3 * self.largest


def build(gigabytes: float, path: str, inline: bool) -> int:
    """Write a GPT-like model of about the given size; return the bytes of its largest tensor."""
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
    """Yield an embedding, then blocks of LayerNormalization, single-head attention and a feed-forward layer."""
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
    """Return the seconds of `cp` for the folder; with `sync`, until it is on disk."""
    target = folder.with_name("copy")
    start = time.perf_counter()
    measure.cost(["cp", "-r", folder, target])
    if sync:
        _sync(target)
    wall = time.perf_counter() - start
    shutil.rmtree(target)
    return wall


def converted(folder: Path, to: str, *, sync: bool) -> measure.Cost:
    """Return the cost of converting the model in the folder; with `sync`, until it is on disk."""
    target = folder.with_name("out")
    target.mkdir()
    command = measure.own_command() if sync else [sys.executable, "-c", _UNSYNCED]
    run = measure.cost([*command, folder / "gpt.onnx", "--to", to, "-o", target / "gpt.onnx", "--no-check", "-q"])
    if run.code:
        sys.exit(f"amp-rewrite failed: {run.said}")
    shutil.rmtree(target)
    return run


def _sync(folder: Path) -> None:
    """Wait until the files are on disk."""
    for file in folder.iterdir():
        with file.open("rb+") as handle:
            os.fsync(handle.fileno())


def _forget(folder: Path) -> None:
    """Drop the files from the page cache; they must be on disk."""
    for file in folder.iterdir():
        with file.open("rb") as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measured(gigabytes: float, *, inline: bool, to: str, root: Path, rounds: int, warm: bool) -> Point:
    """Build a model, copy and convert it alternately, and return the lowest cost of each."""
    folder = root / "model"
    folder.mkdir()
    largest = measure.apart(build, gigabytes, str(folder / "gpt.onnx"), inline)
    _sync(folder)
    copies: dict[bool, list[float]] = {False: [], True: []}
    runs: dict[bool, list[measure.Cost]] = {False: [], True: []}
    for _ in range(rounds):
        for sync in (False, True):
            if not warm:
                _forget(folder)
            copies[sync].append(copied(folder, sync=sync))
            if not warm:
                _forget(folder)
            runs[sync].append(converted(folder, to, sync=sync))
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1e9
    shutil.rmtree(folder)
    run, peak = measure.best(runs[True]), max(r.peak for r in runs[True])
    unsynced = measure.best(runs[False]).wall
    return Point(size, inline, largest, to, unsynced, run.wall, run.cpu, peak, min(copies[False]), min(copies[True]))


def cells(p: Point) -> tuple[str, ...]:
    """Return a row of the table."""
    return (
        f"{p.gigabytes:.2f} GB {'inline' if p.inline else 'external'}",
        p.to,
        f"{p.wall:.1f}",
        f"{p.copied_synced:.1f}",
        f"{p.wall / p.copied_synced:.2f}",
        f"{p.unsynced:.1f}",
        f"{p.copied:.1f}",
        f"{p.unsynced / p.copied:.2f}",
        f"{p.cpu:.1f}",
        f"{p.peak / 1e6:.0f}",
        f"{p.bound / 1e6:.0f}",
    )


HEAD = (
    *("weights", "to", "seconds, on disk", "cp, on disk", "ratio", "seconds, unsynced", "cp, unsynced", "ratio"),
    *("CPU seconds", "peak MB", "allowed MB"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-gb", type=float, default=2.0)
    parser.add_argument("--sizes", type=float, nargs="+", help="only these sizes in gigabytes, with external weights")
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure (default: the temporary folder)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds for each; above 10 GB always one (default: 2)")
    parser.add_argument("--warm", action="store_true", help="keep the model in the page cache")
    parser.add_argument("--results", default="weights_scale", help="name of the results file")
    parser.add_argument("--dry-run", action="store_true", help="print only, without writing the results file")
    args = parser.parse_args()
    measure.warm_up()
    sizes = args.sizes or [size for size in SIZES if size <= args.max_gb]
    cases = [(size, False, "float16") for size in sizes]
    if not args.sizes:
        cases.append((sizes[0], False, "bfloat16"))
        cases += [(size, True, "float16") for size in INLINE if size <= args.max_gb]
    needed = 2.1 * max(sizes) * 1e9
    points: list[Point] = []
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-", dir=args.folder) as name:
        free = shutil.disk_usage(name).free
        print(f"needs {needed / 1e9:.1f} GB of disk space in {Path(name).parent}; {free / 1e9:.1f} GB are free")
        if free < needed:
            sys.exit("not enough disk space; lower --max-gb or choose another --folder")
        for size, inline, to in cases:
            rounds = args.rounds if size <= _ONCE else 1
            options = {"rounds": rounds, "warm": args.warm}
            points.append(measured(size, inline=inline, to=to, root=Path(name), **options))
            print("  ".join(cells(points[-1])), flush=True)
            if not args.dry_run:  # an interrupted run keeps its results so far
                measure.write(args.results, measure.machine(), points, measure.markdown(HEAD, map(cells, points)))


if __name__ == "__main__":
    main()
