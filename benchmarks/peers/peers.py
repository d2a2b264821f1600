"""Compare amp-rewrite with other converters on the models of the zoo, in one run.

    python benchmarks/run.py zoo CACHE
    python benchmarks/run.py peers CACHE [--peers PYTHON] [--autocast PYTHON] [--models NAME ...]

`--peers` is an interpreter with onnxconverter-common and onnxruntime. `--autocast` is an interpreter with
nvidia-modelopt[onnx], which pins older packages and so needs a separate environment. Tools without an interpreter are
skipped, and tools that take too long or too much memory are stopped (`--limit`, `--memory`). Time and memory are for
the whole process, from import to written file.

There are two errors: the distance between the outputs of the float32 and the converted model, relative to the former
(L2), and the largest difference, relative to the largest value. onnxruntime's CPU provider runs both models. The
converted one is emulated (every low result is rounded, `amp_rewrite.emulate`), since the provider would compute it in
float32.

`bert_base_masked` has a batch with a fully masked second row, and attention logits as large as in trained models. It
reveals how a converter handles a mask of the lowest float32.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.shared import measure

COMPUTE = ("MatMul", "Conv", "Gemm")


@dataclass(frozen=True, slots=True)
class Judged:
    """The properties of a converted model; if it does not run, only `fault`, with the reason."""

    casts: int = 0
    lowered: int = 0
    compute: int = 0
    l2: float | None = None
    largest: float | None = None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Point:
    """One model converted with one tool."""

    model: str
    megabytes: float
    tool: str
    wall: float
    cpu: float
    peak: int
    fault: str
    judged: Judged | None


def judge(source: str, converted: str, feeds: str, outputs: str) -> Judged:
    """Load a converted model as users would, count its ops, and compare its emulation with the float32 model.

    `outputs`: a file that keeps the float32 model's outputs for the next tool.
    """
    import numpy as np
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    from amp_rewrite import AmpRewriteError, DType, Model, View, emulate

    faults = (state.Fail, state.InvalidGraph, state.InvalidArgument, state.NotImplemented, state.RuntimeException)
    cpu = ["CPUExecutionProvider"]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(converted, options, providers=cpu)
    except faults as fault:
        return Judged(fault=_line(fault))
    with np.load(feeds) as stored:
        inputs = {name: stored[name] for name in stored.files}
    try:
        view, before = View.of(Model.load(converted)), View.of(Model.load(source))
    except AmpRewriteError as fault:
        return Judged(fault=_line(fault))
    compute = [op for op in view.ops if op.kind in COMPUTE]
    low = sum(op.inputs[0] is not None and view.dtype(op.inputs[0]) is DType.FLOAT16 for op in compute)
    casts = sum(op.kind == "Cast" for op in view.ops) - sum(op.kind == "Cast" for op in before.ops)
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-") as folder:
        twin = Path(folder) / "twin.onnx"
        try:
            emulate(converted).save(twin)
            found = onnxruntime.InferenceSession(str(twin), options, providers=cpu).run(None, inputs)[0]
        except (*faults, AmpRewriteError) as fault:
            return Judged(casts, low, len(compute), fault=f"emulation: {_line(fault)}")
    if not Path(outputs).exists():
        np.save(outputs, onnxruntime.InferenceSession(source, options, providers=cpu).run(None, inputs)[0])
    expected = np.load(outputs).astype(np.float64)
    if not np.isfinite(found).all():
        bad = np.count_nonzero(~np.isfinite(found))
        return Judged(casts, low, len(compute), fault=f"{bad} of {found.size} results are not finite")
    error = np.abs(found.astype(np.float64) - expected)
    l2, largest = float(np.linalg.norm(error) / np.linalg.norm(expected)), float(error.max() / np.abs(expected).max())
    return Judged(casts, low, len(compute), l2, largest)


def _line(fault: Exception) -> str:
    """Return an error as one line, with file names instead of paths."""
    return re.sub(r"\S*/(?=[\w.-]+\.onnx)", "", " ".join(str(fault).split()))[:160]


def tools(peers: Path | None, autocast: Path | None) -> dict[str, list[str | Path]]:
    """Return the command of each tool, without its input and output."""
    commands: dict[str, list[str | Path]] = {"amp-rewrite": [*measure.own_command(), "convert", "--no-check", "-q"]}
    if peers is not None:
        for tool in ("onnxruntime_float16", "onnxruntime_onnxmodel", "onnxconverter_common"):
            commands[tool] = [*measure.script("peer_tools", peers), tool]
    if autocast is not None:
        commands["modelopt_autocast"] = [*measure.script("peer_tools", autocast), "modelopt_autocast"]
    return commands


PACKAGES = {
    "peers": ("onnxruntime", "onnxconverter-common", "onnx"),
    "autocast": ("nvidia-modelopt", "onnxruntime-gpu", "onnx"),
}
_VERSIONS = """
import importlib.metadata, sys
print(*(f"{name} {importlib.metadata.version(name)}" for name in sys.argv[1:]), sep=", ")
"""


def notes(interpreters: Mapping[str, Path | None]) -> list[str]:
    """Return the lines below the table, with the versions of the tools."""
    lines = ["", "A tool whose result does not load or run has a time and memory, but no error."]
    for name, python in interpreters.items():
        if python is not None:
            command = [str(python), "-c", _VERSIONS, *PACKAGES[name]]
            versions = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
            lines += ["", f"The {'tool' if name == 'autocast' else 'tools'} run by `--{name}`: {versions}."]
    return lines


@dataclass(frozen=True, slots=True)
class Bounds:
    """The number of runs of each tool, and its limits in seconds and bytes of memory."""

    rounds: int
    limit: float
    memory: float


def measured(model: Path, tool: str, command: list[str | Path], outputs: Path, bounds: Bounds) -> Point:
    """Convert one model with one tool, and judge the result. Times are the lowest of all rounds."""
    external = model.with_name(model.name + ".data")
    size = (model.stat().st_size + (external.stat().st_size if external.exists() else 0)) / 1e6
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-", dir=model.parent) as name:
        out = Path(name) / "out.onnx"
        words = ["-o", out] if tool == "amp-rewrite" else [out]
        runs = []
        for _ in range(bounds.rounds):
            shutil.rmtree(name)
            Path(name).mkdir()
            runs.append(measure.cost([*command, model, *words], limit=bounds.limit, memory=bounds.memory))
        run, peak = measure.best(runs), max(r.peak for r in runs)
        run = replace(run, cpu=min(r.cpu for r in runs))
        if run.code:
            fault = run.said.splitlines()[-1][:160] if run.said else f"exit code {run.code}"
            return Point(model.stem, size, tool, run.wall, run.cpu, peak, fault, None)
        judged = measure.apart(judge, str(model), str(out), str(model.with_suffix(".npz")), str(outputs))
    return Point(model.stem, size, tool, run.wall, run.cpu, peak, judged.fault, judged)


def read(model: Path) -> None:
    """Read a model's files into the page cache, so that no tool waits for the disk."""
    for file in (model, model.with_name(model.name + ".data")):
        if file.exists():
            with file.open("rb", buffering=0) as stream:
                while stream.read(1 << 24):
                    pass


HEAD = (
    *("model", "MB", "tool", "seconds", "CPU seconds", "peak MB", "Casts added", "MatMul/Conv/Gemm low"),
    *("error L2", "error max", "runs"),
)


def cells(p: Point) -> tuple[str, ...]:
    """Return a row of the table."""
    j = p.judged
    counted = (f"{j.casts}", f"{j.lowered} of {j.compute}") if j is not None and j.compute else ("–", "–")
    errors = (f"{j.l2:.1e}", f"{j.largest:.1e}") if j is not None and j.l2 is not None else ("–", "–")
    cost = (f"{p.wall:.1f}", f"{p.cpu:.1f}", f"{p.peak / 1e6:.0f}")
    return (p.model, f"{p.megabytes:.0f}", p.tool, *cost, *counted, *errors, p.fault.replace("|", "/") or "yes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--autocast", type=Path)
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--limit", type=float, default=600.0, help="time limit in seconds (default: 600)")
    parser.add_argument("--memory", type=float, help="memory limit in GB (default: four fifths of the machine's)")
    parser.add_argument("--dry-run", action="store_true", help="print only, without writing the results file")
    args = parser.parse_args()
    memory = 0.8 * measure.memory() if args.memory is None else 1e9 * args.memory
    names = args.models or sorted(path.stem for path in args.cache.glob("*.onnx"))
    points: list[Point] = []
    footnotes = notes({"peers": args.peers, "autocast": args.autocast})
    measure.warm_up()
    for name in names:
        read(args.cache / f"{name}.onnx")
        with tempfile.TemporaryDirectory(prefix="amp-rewrite-") as folder:
            for tool, command in tools(args.peers, args.autocast).items():
                rounds = args.rounds if tool != "modelopt_autocast" else 1  # it takes twenty times as long
                bounds = Bounds(rounds, args.limit, memory)
                outputs = Path(folder) / "outputs.npy"
                points.append(measured(args.cache / f"{name}.onnx", tool, command, outputs, bounds))
                print("  ".join(cells(points[-1])), flush=True)
        if not args.dry_run:  # an interrupted run keeps its results so far
            table = [*measure.markdown(HEAD, map(cells, points)), *footnotes]
            packages = ("onnx", "numpy", "onnxruntime-gpu")
            measure.write("peers", measure.machine(packages), points, table)


if __name__ == "__main__":
    main()
