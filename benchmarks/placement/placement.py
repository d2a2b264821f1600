"""Time and Casts of coloring graphs of 50,000 ops, by placement.

    python benchmarks/run.py placement [--ops 50000]

For each graph of `graphs.py`, this counts the low type variables and the inserted Casts, with the boundary left by
TensorFlow's rules (`propagate`) and placed by the minimum cut (`mincut`). The CPU time of coloring is the best of three
runs, without the cyclic garbage collector, as in a conversion.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from amp_rewrite import Model
from amp_rewrite.decide.coloring.paint import paint
from amp_rewrite.decide.plan import plan_casts
from amp_rewrite.pipeline.conversion import Draft
from amp_rewrite.settings.request import Request
from benchmarks.placement import graphs
from benchmarks.shared import measure

WAYS = ("propagate", "mincut")
RUNS = 3


@dataclass(frozen=True, slots=True)
class Row:
    """One graph with one placement."""

    graph: str
    ops: int
    way: str
    low: int
    casts: int
    seconds: float


def measured(shape: str, ops: int, folder: Path) -> list[Row]:
    """Return a row for each placement."""
    path = folder / f"{shape}.onnx"
    count = graphs.build(shape, ops, str(path))
    return [_colored(shape, count, way, path) for way in WAYS]


def _colored(shape: str, count: int, way: str, path: Path) -> Row:
    seconds = []
    for _ in range(RUNS):
        draft = Draft.of(Model.load(path), Request.of(fuse="none", opset="keep"))
        problem = replace(draft, request=replace(draft.request, placement=way)).problem()
        gc.disable()
        started = time.process_time()
        coloring = paint(problem)
        seconds.append(time.process_time() - started)
        gc.enable()
    casts = len(plan_casts(draft.view, coloring, draft.io).casts)
    return Row(shape, count, way, len(coloring.low), casts, round(min(seconds), 2))


HEAD = ("graph", "ops", "placement", "low variables", "Casts", "CPU seconds")


def cells(row: Row) -> list[str]:
    """Return a row of the table."""
    return [row.graph, f"{row.ops}", row.way, f"{row.low}", f"{row.casts}", f"{row.seconds:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=int, default=50_000)
    args = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-") as folder:
        for shape in graphs.SHAPES:
            rows += measured(shape, args.ops, Path(folder))
            print(*("  ".join(cells(row)) for row in rows[-len(WAYS) :]), sep="\n", flush=True)
    about = measure.machine(("onnx", "numpy", "networkx"))
    measure.write("placement", about, rows, measure.markdown(HEAD, map(cells, rows)))


if __name__ == "__main__":
    main()
