"""Time and memory of reading and comparing large reports.

    python benchmarks/run.py report_scale [--rows 100000 400000]

A report of as many rows, as a conversion of a transformer writes them, is read, and compared with one of a model in
which some ops were inserted, each in a process of its own. The peak is that of the process above an empty one, in
multiples of the file's size: reading stays below 5.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.shared import measure

KINDS = ("MatMul", "Add", "LayerNormalization", "Mul", "Softmax", "MatMul", "Relu", "Transpose")


@dataclass(frozen=True, slots=True)
class Point:
    """One step on reports of so many rows: the file's size, seconds, and bytes at the peak above an empty process."""

    step: str
    rows: int
    size: int
    seconds: float
    peak: int

    @property
    def times(self) -> float:
        """The peak in multiples of the file's size; of both files where two are compared."""
        return self.peak / self.size / (1 + (self.step == "compare"))


def write(rows: int, path: Path, inserted: int) -> None:
    """Write a report; `inserted`: the number of rows after which one more op stands."""
    from amp_rewrite.reports.report import Report
    from amp_rewrite.reports.rows import Header, PortRow, Row, Totals

    made: list[Row] = []
    for i in range(rows):
        kind = KINDS[i % len(KINDS)]
        layer = f"/model/layers.{i // 8}/self_attn/{kind}_{i % 8}"
        types = ("float16", "float16")
        at = len(made)
        reads = (at - 1, max(at - 5, 0)) if at else ()
        row = Row(layer, kind, "float16", variables={"T": "float16"}, inputs=types, outputs=types[:1], reads=reads)
        why = {"color": "allow", "rule": "allow_root", "source": "float16.yaml:26", "reason": "a matrix product"}
        made.append(row._replace(key=f"{KINDS.index(kind) * 97 + i % 97:012x}", constants="0a1b2c3d", **why))
        if inserted and i % inserted == inserted - 1:
            made.append(Row(f"/model/new_{i}", "Tanh", "float32", inputs=types[:1], outputs=types[:1], reads=(at,)))
    ports = (PortRow("x", "float32", reads=(0, 0)),), (PortRow("y", "float32", len(made) - 1),)
    report = Report(Header("model.onnx", 10, {"ai.onnx": 21}, to="float16"), Totals(len(made)), tuple(made))
    path.write_text(replace(report, inputs=ports[0], outputs=ports[1]).to_json(), "utf-8")


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def read(a: str, _: str) -> tuple[float, int]:
    """Return the seconds of reading a report and the bytes at the peak."""
    from amp_rewrite.reports.report import Report  # noqa: F401 imported before the clock starts
    from amp_rewrite.reports.sources import report_in

    before, start = peak(), time.perf_counter()
    report_in(Path(a))
    return time.perf_counter() - start, peak() - before


def compare(a: str, b: str) -> tuple[float, int]:
    """Return the seconds of reading and comparing two reports and the bytes at the peak."""
    from amp_rewrite.reports.diff import diff
    from amp_rewrite.reports.sources import report_in

    before, start = peak(), time.perf_counter()
    diff(report_in(Path(a)), report_in(Path(b)))
    return time.perf_counter() - start, peak() - before


STEPS: dict[str, Callable[[str, str], tuple[float, int]]] = {"read": read, "compare": compare}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 400_000])
    parser.add_argument("--dry-run", action="store_true", help="print, but leave the results file alone")
    given = parser.parse_args()
    points = []
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-") as name:
        a, b = Path(name) / "a.json", Path(name) / "b.json"
        for rows in given.rows:
            measure.apart(write, rows, a, 0)
            measure.apart(write, rows, b, 997)
            for step, run in STEPS.items():
                seconds, bytes_ = measure.apart(run, str(a), str(b))
                p = Point(step, rows, a.stat().st_size, seconds, bytes_)
                points.append(p)
                print(
                    f"{step:8} {rows:8}  {p.size / 1e6:6.1f} MB  {seconds:6.2f} s  {p.times:4.1f} x the size",
                    flush=True,
                )
    head = ["step", "rows", "MB", "seconds", "peak, times the size"]
    lines = [(p.step, p.rows, f"{p.size / 1e6:.1f}", f"{p.seconds:.2f}", f"{p.times:.1f}") for p in points]
    if not given.dry_run:
        measure.write("report_scale", measure.machine(), points, measure.markdown(head, lines))


if __name__ == "__main__":
    main()
