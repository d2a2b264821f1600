"""Start-up time of the command line.

    python benchmarks/run.py startup [--rounds 20]

The least wall time of some rounds, each a process of its own, beside a bare `python -c pass`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.shared import measure

MODEL = measure.ROOT / "examples" / "models" / "digits_vit.onnx"


@dataclass(frozen=True, slots=True)
class Point:
    """One command: what it may take, the least wall and processor seconds that it took."""

    command: str
    allowed: float | None
    wall: float
    cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dry-run", action="store_true", help="print, but leave the results file alone")
    given = parser.parse_args()
    own = measure.own_command()
    points = []
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-") as name:
        before, after = Path(name) / "a.json", Path(name) / "b.json"
        for report, words in ((before, ["report", MODEL, "--json"]), (after, [MODEL, "--dry-run", "--json"])):
            made = measure.cost([*own, *words], stdout=report)
            if made.code:
                sys.exit(f"cannot make {report.name}: {made.said}")
        commands: list[tuple[str, float | None, list[str | Path], int]] = [
            ("python -c pass", None, [sys.executable, "-c", "pass"], 0),
            ("amp-rewrite --help", 0.2, [*own, "--help"], 0),
            ("amp-rewrite diff a.json b.json", 0.25, [*own, "diff", before, after], 1),
            ("amp-rewrite lists MatMul", None, [*own, "lists", "MatMul"], 0),
            (f"amp-rewrite {MODEL.name} --dry-run", None, [*own, MODEL, "--dry-run"], 0),
        ]
        for spelled, allowed, command, code in commands:
            runs = [measure.cost(command) for _ in range(given.rounds)]
            if any(run.code != code for run in runs):
                sys.exit(f"{spelled}: exit code {runs[0].code}: {runs[0].said}")
            point = Point(spelled, allowed, measure.best(runs).wall, min(run.cpu for run in runs))
            points.append(point)
            print(f"{spelled:40} {point.wall:.3f} s  cpu {point.cpu:.3f} s", flush=True)
    table = measure.markdown(
        ["command", "seconds", "processor seconds", "allowed seconds"],
        [(f"`{p.command}`", f"{p.wall:.3f}", f"{p.cpu:.3f}", p.allowed or "") for p in points],
    )
    if not given.dry_run:
        measure.write("startup", measure.machine(), points, table)


if __name__ == "__main__":
    main()
