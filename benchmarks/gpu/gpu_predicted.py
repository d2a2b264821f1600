"""Predictions for every model and way on a GPU, by the package's cost model, before anything is measured.

    python benchmarks/run.py gpu_predicted SKELETONS [--write]

Prints a table; `--write` writes results/gpu-predicted.md and .json, whose rows `gpu_fit` joins with measured ones by
model and way. A kernel takes its operations at the peak of its type or its bytes at full bandwidth, whichever takes
longer, and a start; nothing stays in a cache. Peaks are those of the data sheet, so real times are longer. How far off
the gains are that follow is on the page of `gpu_fit`; none is printed here.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amp_rewrite import AmpRewriteError
from benchmarks.gpu import gpu_models, skeleton_files
from benchmarks.gpu.gpu_ways import WAYS
from benchmarks.gpu.gpu_work import Kernel, work_of
from benchmarks.shared import measure

START = 0.9e-6
"""Seconds of launch overhead per small kernel in a full stream: 3.8 µs for each of many kernels that run for 2.9 µs, on
a V100 (A. Gray, Getting Started with CUDA Graphs, NVIDIA 2019)."""

NAME = "gpu-predicted"
PACKAGES = ("onnx", "numpy", "onnxruntime-gpu")


@dataclass(frozen=True, slots=True)
class Roof:
    """Peak rates of a GPU in a second: operations in float32, in tensor cores, and of TF32 in them, and bytes."""

    gpu: str
    float32: float
    low: float
    tf32: float
    bandwidth: float
    source: str


H200 = Roof("H200", 67e12, 989e12, 494.5e12, 4.8e12, "NVIDIA H200 Tensor Core GPU data sheet, SXM")


@dataclass(frozen=True, slots=True)
class Constants:
    """What the cost model assumes beside the data sheet: seconds to start a kernel, and shares of each peak."""

    start: float = START
    low: float = 1.0
    tf32: float = 1.0
    float32: float = 1.0
    bandwidth: float = 1.0


SHEET = Constants()


def seconds(work: Iterable[Kernel], way: str, roof: Roof, of: Constants = SHEET) -> float:
    """Return the time of a model's kernels, one after the other."""
    rates = {True: roof.low * of.low, False: roof.float32 * of.float32}
    if way == "tf32":
        rates[False] = roof.tf32 * of.tf32
    bandwidth = roof.bandwidth * of.bandwidth
    return sum(k.times * (of.start + max(k.flops / rates[k.low], k.nbytes / bandwidth)) for k in work)


def predicted(folder: Path, roof: Roof) -> Iterator[dict[str, Any]]:
    """Yield a row for each model and way: its kernels and their time, or why there is none."""
    for name in sorted(skeleton_files.names_in(folder), key=gpu_models.place):
        about = skeleton_files.about(folder, name)
        shared = {"model": name, "tree": about["tree"], "commit": about["commit"], "inputs": about["inputs"]}
        by = {way: noted["with"] for way, noted in about["ways"].items() if "with" in noted}
        for way, settings in WAYS.items():
            key = {**shared, "way": way}
            if way in about["missing"]:
                yield {**key, "fault": f"not made: {about['missing'][way]}"}
                continue
            made = settings.file or way
            if made not in about["ways"]:
                yield {**key, "fault": "not made yet"}
                continue
            try:
                work = work_of(skeleton_files.stripped(folder, name, made), about["inputs"])
            except AmpRewriteError as fault:
                yield {**key, "fault": " ".join(str(fault).split())}
                continue
            yield {**key, **_row(work, way, roof), "with": by.get(made, {})}


def _row(work: Sequence[Kernel], way: str, roof: Roof) -> dict[str, Any]:
    return {
        "seconds": seconds(work, way, roof),
        "kernels": sum(k.times for k in work),
        "flops": sum(k.times * k.flops for k in work),
        "low": sum(k.times * k.flops for k in work if k.low),
        "bytes": sum(k.times * k.nbytes for k in work),
        "work": " ".join(map(str, work)),
    }


def table(rows: Sequence[Mapping[str, Any]], roof: Roof) -> list[str]:
    """Return the lines of the page: what is assumed, a table, and what could not be predicted."""
    found = {(row["model"], row["way"]): row for row in rows if "fault" not in row}
    cells = []
    for (model, way), row in found.items():
        share = f"{100 * row['low'] / row['flops']:.0f} %" if row["flops"] else "–"
        starts = f"{100 * START * row['kernels'] / row['seconds']:.0f} %"
        numbers = (f"{row['flops'] / 1e12:.4g}", share, f"{row['bytes'] / 1e9:.3g}", row["kernels"], starts)
        cells.append((model, WAYS[way].name, f"{1e3 * row['seconds']:.3g}", *numbers))
    head = ("model", "way", "ms", "TFLOP", "low", "GB", "kernels")
    tf32 = f", {roof.tf32 / 1e12:g} in TF32"
    lines = [
        f"**Predicted, not measured** ([measured](gpu.md)): an {roof.gpu} as its data sheet has it ({roof.source}):",
        f"{roof.low / 1e12:g} TFLOP/s in float16 and bfloat16{tf32}, {roof.float32 / 1e12:g} in float32, dense,",
        f"{roof.bandwidth / 1e12:g} TB/s; {1e6 * START:g} µs to start a kernel. Graphs are those of the files: what",
        "the runtime fuses when it opens them is not in these numbers, and quotients of two of them are not gains:",
        "[measured ones](gpu-fitted.md) differ. `starts`: the share of time that starts take.",
        f"amp-rewrite: commit {', '.join(sorted({row['commit'] for row in rows}))}.{_versions(rows)}",
        "",
        *measure.markdown((*head, "starts"), cells),
    ]
    shapes = {row["model"]: row["inputs"] for row in rows}
    lines += ["", "Batches: " + "; ".join(f"{model}: {_shapes(inputs)}" for model, inputs in shapes.items()) + "."]
    faults = [f"- {row['model']}, {WAYS[row['way']].name}: {row['fault']}" for row in rows if "fault" in row]
    return [*lines, "", "Not predicted:", "", *faults] if faults else lines


def _versions(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the packages that made the other models, with their versions."""
    found = sorted({f"{name} {version}" for row in rows for name, version in row.get("with", {}).items()})
    return f" Other models: {', '.join(found)}." if found else ""


def _shapes(inputs: Mapping[str, Sequence[int]]) -> str:
    """Return the shapes of inputs, alike ones once."""
    counted: dict[str, list[str]] = {}
    for name, shape in inputs.items():
        counted.setdefault("×".join(map(str, shape)), []).append(name)
    return ", ".join(
        f"{names[0]} {shape}" + (f" and {len(names) - 1} like it" if len(names) > 1 else "")
        for shape, names in counted.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("skeletons", type=Path)
    parser.add_argument("--write", action="store_true", help="write results/gpu-predicted.md and .json")
    given = parser.parse_args()
    rows = list(predicted(given.skeletons, H200))
    lines = table(rows, H200)
    print("\n".join(lines))
    if given.write:
        measure.write(NAME, {**measure.machine(PACKAGES), "gpu": H200.gpu}, rows, lines)


if __name__ == "__main__":
    main()
