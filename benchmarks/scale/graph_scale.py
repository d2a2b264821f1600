"""Time and memory of a conversion by the number of ops.

    python benchmarks/run.py graph_scale [--ops 10000 100000 1000000] [--shapes chain skips] [--before CHECKOUT]

The graphs are those of `placement`; beyond 100,000 ops, only the first shape. Each is converted and saved in a separate
process, without a check, alternately by this checkout and by the commit in CHECKOUT. Time is the lower CPU time of two
rounds; memory is the higher peak.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.placement import graphs
from benchmarks.shared import measure

ROUNDS = 2
CONVERT = "import sys, amp_rewrite; amp_rewrite.convert(sys.argv[1]).save(sys.argv[2], overwrite=True)"


@dataclass(frozen=True, slots=True)
class Row:
    """One graph, converted by one version of the package."""

    graph: str
    ops: int
    state: str
    seconds: float
    peak: int


def measured(shape: str, ops: int, folder: Path, states: dict[str, Path]) -> list[Row]:
    """Convert one graph with each version; exit with its error if one fails."""
    path = folder / f"{shape}.onnx"
    count = measure.apart(graphs.build, shape, ops, str(path))
    runs: dict[str, list[measure.Cost]] = {state: [] for state in states}
    for _ in range(ROUNDS):
        for state, checkout in states.items():
            environment = {**os.environ, "PYTHONPATH": str(checkout)}
            run = measure.cost([sys.executable, "-P", "-c", CONVERT, path, folder / "out.onnx"], environment)
            if run.code:
                sys.exit(f"{shape}, {count} ops, {state}: {run.said}")
            runs[state].append(run)
    return [
        Row(shape, count, state, min(r.cpu for r in done), max(r.peak for r in done)) for state, done in runs.items()
    ]


HEAD = ("graph", "ops", "state", "CPU seconds", "peak MB")


def cells(row: Row) -> tuple[str, ...]:
    """Return a row of the table."""
    return row.graph, f"{row.ops}", row.state, f"{row.seconds:.1f}", f"{row.peak / 1e6:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--shapes", nargs="+", choices=graphs.SHAPES, default=list(graphs.SHAPES))
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="another checkout of this package")
    args = parser.parse_args()
    states = {"now": Path(__file__).resolve().parents[2]}
    if args.before is not None:
        commit = ["git", "-C", args.before, "rev-parse", "--short", "HEAD"]
        states[subprocess.check_output(commit, text=True).strip()] = args.before.resolve()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-") as name:
        for ops in args.ops:
            for shape in args.shapes[: 1 if ops > 100_000 else None]:
                rows += measured(shape, ops, Path(name), states)
                print(*("  ".join(cells(row)) for row in rows[-len(states) :]), sep="\n", flush=True)
                about = measure.machine(("onnx", "numpy", "networkx"))
                measure.write("graph_scale", about, rows, measure.markdown(HEAD, map(cells, rows)))


if __name__ == "__main__":
    main()
