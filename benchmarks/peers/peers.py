"""amp-rewrite beside other converters, on the models of the zoo, in one run.

    python benchmarks/run.py zoo CACHE
    python benchmarks/run.py peers CACHE [--peers PYTHON] [--autocast PYTHON] [--models NAME ...]

`--peers` is an interpreter with onnxconverter-common and onnxruntime, `--autocast` one with nvidia-modelopt[onnx],
which pins older packages and so needs an environment of its own. A tool whose interpreter is not named is left
out, one that takes too long or too much memory is stopped (`--limit`, `--memory`). Time and memory are those of the
whole process, import to written file.

The error is the distance between the outputs of the float32 model and those of the converted one, relative to
the former (L2), and the largest relative to the largest: both run by onnxruntime's CPU provider, the converted
one emulated (every low result rounded, `amp_rewrite.emulate`), since that provider would compute in float32.

`bert_base_masked` is fed a batch whose second row is masked throughout, with attention logits as large as those of
trained models: there it shows what became of the mask of the lowest float32.
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
    """What a converted model is like; `fault` is why it does not run, in which case the rest is empty."""

    casts: int = 0
    lowered: int = 0
    compute: int = 0
    l2: float | None = None
    largest: float | None = None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Point:
    """One model by one tool."""

    model: str
    megabytes: float
    tool: str
    wall: float
    cpu: float
    peak: int
    fault: str
    judged: Judged | None


def judge(source: str, converted: str, feeds: str, outputs: str) -> Judged:
    """Load a converted model as its users would, count, and run its emulation against the float32 model.

    `outputs`: the file that keeps what the float32 model gives, for the next tool.
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
        given = {name: stored[name] for name in stored.files}
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
            found = onnxruntime.InferenceSession(str(twin), options, providers=cpu).run(None, given)[0]
        except (*faults, AmpRewriteError) as fault:
            return Judged(casts, low, len(compute), fault=f"emulation: {_line(fault)}")
    if not Path(outputs).exists():
        np.save(outputs, onnxruntime.InferenceSession(source, options, providers=cpu).run(None, given)[0])
    wanted = np.load(outputs).astype(np.float64)
    if not np.isfinite(found).all():
        bad = np.count_nonzero(~np.isfinite(found))
        return Judged(casts, low, len(compute), fault=f"{bad} of {found.size} results are not finite")
    apart = np.abs(found.astype(np.float64) - wanted)
    l2, largest = float(np.linalg.norm(apart) / np.linalg.norm(wanted)), float(apart.max() / np.abs(wanted).max())
    return Judged(casts, low, len(compute), l2, largest)


def _line(fault: Exception) -> str:
    """In one line, files by their last name."""
    return re.sub(r"\S*/(?=[\w.-]+\.onnx)", "", " ".join(str(fault).split()))[:160]


def tools(peers: Path | None, autocast: Path | None) -> dict[str, list[str | Path]]:
    """The command of each tool, up to its input and output."""
    found: dict[str, list[str | Path]] = {"amp-rewrite": [*measure.own_command(), "convert", "--no-check", "-q"]}
    if peers is not None:
        for tool in ("onnxruntime_float16", "onnxruntime_onnxmodel", "onnxconverter_common"):
            found[tool] = [*measure.script("peer_tools", peers), tool]
    if autocast is not None:
        found["modelopt_autocast"] = [*measure.script("peer_tools", autocast), "modelopt_autocast"]
    return found


PACKAGES = {
    "peers": ("onnxruntime", "onnxconverter-common", "onnx"),
    "autocast": ("nvidia-modelopt", "onnxruntime-gpu", "onnx"),
}
_VERSIONS = """
import importlib.metadata, sys
print(*(f"{name} {importlib.metadata.version(name)}" for name in sys.argv[1:]), sep=", ")
"""


def notes(interpreters: Mapping[str, Path | None]) -> list[str]:
    """What stands under the table: versions of the tools, and how to read it."""
    lines = ["", "A tool whose result does not load, or gives no number, keeps its time and memory; it has no error."]
    for name, python in interpreters.items():
        if python is not None:
            command = [str(python), "-c", _VERSIONS, *PACKAGES[name]]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
            lines += ["", f"The {'tool' if name == 'autocast' else 'tools'} run by `--{name}`: {said}."]
    return lines


@dataclass(frozen=True, slots=True)
class Bounds:
    """Runs of each tool, and at how many seconds and bytes of memory it is stopped."""

    rounds: int
    limit: float
    memory: float


def measured(model: Path, tool: str, command: list[str | Path], outputs: Path, bounds: Bounds) -> Point:
    """Convert one model by one tool and judge the result; of the rounds the least seconds of each kind count."""
    beside = model.with_name(model.name + ".data")
    size = (model.stat().st_size + (beside.stat().st_size if beside.exists() else 0)) / 1e6
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
    """Read a model's files, so that no tool is the one that waits for the disk."""
    for file in (model, model.with_name(model.name + ".data")):
        if file.exists():
            with file.open("rb", buffering=0) as held:
                while held.read(1 << 24):
                    pass


HEAD = (
    *("model", "MB", "tool", "seconds", "processor seconds", "peak MB", "Casts added", "MatMul/Conv/Gemm low"),
    *("error L2", "error max", "runs"),
)


def cells(p: Point) -> tuple[str, ...]:
    """One row of the table."""
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
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that a tool may take (default 600)")
    parser.add_argument("--memory", type=float, help="GB that a tool may take (default: four fifths of the machine's)")
    parser.add_argument("--dry-run", action="store_true", help="print, but leave the results file alone")
    given = parser.parse_args()
    memory = 0.8 * measure.memory() if given.memory is None else 1e9 * given.memory
    names = given.models or sorted(path.stem for path in given.cache.glob("*.onnx"))
    points: list[Point] = []
    under = notes({"peers": given.peers, "autocast": given.autocast})
    measure.warm_up()
    for name in names:
        read(given.cache / f"{name}.onnx")
        with tempfile.TemporaryDirectory(prefix="amp-rewrite-") as folder:
            for tool, command in tools(given.peers, given.autocast).items():
                rounds = given.rounds if tool != "modelopt_autocast" else 1  # it takes twenty times as long
                bounds = Bounds(rounds, given.limit, memory)
                outputs = Path(folder) / "outputs.npy"
                points.append(measured(given.cache / f"{name}.onnx", tool, command, outputs, bounds))
                print("  ".join(cells(points[-1])), flush=True)
        if not given.dry_run:  # a long run that is broken off keeps what it has
            table = [*measure.markdown(HEAD, map(cells, points)), *under]
            packages = ("onnx", "numpy", "onnxruntime-gpu")
            measure.write("peers", measure.machine(packages), points, table)


if __name__ == "__main__":
    main()
