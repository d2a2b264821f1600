"""Converting many models with one command, compared with a loop, and in several processes.

    python benchmarks/run.py fleet [CACHE] [--pairs 7] [--large 20] [--small 1000] [--workers 1 2] [--folder /dev/shm]

It answers three questions, with inputs in the page cache:

- How does one command compare with a loop of `convert` and `save` in one Python process, for the shipped models?
- How do two processes compare with one, for full-size models (links to the models of `zoo` in CACHE)? The processes
  alternate, and the result is the median of the pairs.
- How do models per second and peak memory per process depend on the number of processes, for small models (links to the
  shipped ones) and for full-size ones?

Wall times depend on the machine's other load, which the results state, and on the disk, since a conversion ends when
its result is on disk: 20 full-size models write 3.5 GB. If the disk is the bottleneck, more processes do not help;
`--folder` selects another place for results, such as /dev/shm, which is in memory. Without CACHE, the full-size models
are synthetic ones of 0.42 GB (`weights_scale`).

On a shared machine, two processes may get no more CPU than one: Linux shares cores between sessions, not processes
(`sched_autogroup`). Each pair therefore also states the current gain of two processes that only compute, which is a
ceiling. Measure the gain itself on idle cores.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.scale.weights_scale import build
from benchmarks.shared import measure

SHIPPED = sorted(path for folder in ("tests", "examples") for path in (measure.ROOT / folder / "models").glob("*.onnx"))
FOLDERS = """
import sys
import amp_rewrite
assert not any(o.rc for o in amp_rewrite.convert_many(sys.argv[2:], out=sys.argv[1]))
"""
STORE = """
import sys, fsspec, amp_rewrite
from pathlib import Path
store = fsspec.filesystem("memory")
for model in map(Path, sys.argv[2:]):
    for path in model.parent.glob(f"{model.name}*"):
        store.pipe_file(f"/in/{path.name}", path.read_bytes())
assert not any(o.rc for o in amp_rewrite.convert_many("memory://in", out="memory://out"))
"""
SPIN = "import sys, time\nwhile time.process_time() < float(sys.argv[1]): pass"
SYNTHETIC = 0.42  # gigabytes
LOOP = """
import sys
from pathlib import Path
import amp_rewrite
for path in map(Path, sys.argv[2:]):
    amp_rewrite.convert(path).save(Path(sys.argv[1]) / f"{abs(hash(path))}.onnx")
"""


@dataclass(frozen=True, slots=True)
class Point:
    """A run: the models, the number of processes, seconds, CPU seconds, peak bytes of one process, and the load."""

    what: str
    models: int
    workers: int
    wall: float
    cpu: float
    peak: int
    load: float


def run(what: str, command: list[str | Path], models: int, workers: int, out: Path) -> Point:
    """Run a command that writes to an empty folder."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    load = os.getloadavg()[0]
    cost = measure.cost(command)
    if cost.code:
        sys.exit(f"{what}: exit code {cost.code}: {cost.said}")
    return Point(what, models, workers, cost.wall, cost.cpu, cost.peak, round(load, 1))


def ceiling() -> float:
    """Return the current gain of two processes that only compute over one that does the work of both."""
    times = []
    for seconds in ((2.0,), (1.0, 1.0)):
        start = time.perf_counter()
        spinning = [subprocess.Popen([sys.executable, "-c", SPIN, str(each)]) for each in seconds]
        for process in spinning:
            process.wait()
        times.append(time.perf_counter() - start)
    return times[0] / times[1]


def batch(what: str, files: list[Path], workers: int, out: Path) -> Point:
    """Convert files with one command and the given number of processes."""
    command = [*measure.own_command(), *files, "-o", out, "--no-check", "-q", "-j", str(workers)]
    return run(what, command, len(files), workers, out)


def warm(files: list[Path]) -> None:
    """Read files and their data into the page cache."""
    for file in (path for model in files for path in model.parent.glob(f"{model.name}*")):
        with file.open("rb") as stream:
            while stream.read(1 << 24):
                pass


def links(count: int, models: list[Path], folder: Path) -> list[Path]:
    """Create `count` links to the models without external data."""
    plain = [path for path in models if not list(path.parent.glob(f"{path.name}.*"))]
    folder.mkdir()
    made = [folder / f"{i:05}.onnx" for i in range(count if plain else 0)]
    for i, path in enumerate(made):
        path.symlink_to(plain[i % len(plain)].resolve())
    return made


def synthetic(folder: Path) -> list[Path]:
    """Write a model of BERT-base's size with inline weights."""
    (folder / "synthetic").mkdir()
    measure.apart(build, SYNTHETIC, str(folder / "synthetic" / "gpt.onnx"), True)
    return [folder / "synthetic" / "gpt.onnx"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path, nargs="?")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--large", type=int, default=20)
    parser.add_argument("--small", type=int, default=1000)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    parser.add_argument(
        "--stores", action="store_true", help="also convert the shipped models by URL, compared with folders"
    )
    parser.add_argument("--folder", type=Path, help="folder for results (default: the temporary folder)")
    parser.add_argument("--dry-run", action="store_true", help="print only, without writing the results file")
    args = parser.parse_args()
    measure.warm_up()
    points: list[Point] = []
    ceilings: list[float] = []
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-", dir=args.folder) as name:
        out = Path(name) / "out"
        cached = sorted(args.cache.glob("*.onnx")) if args.cache else synthetic(Path(name)) if args.large else []
        large = links(args.large, cached, Path(name) / "large")
        loop: list[str | Path] = [sys.executable, "-c", LOOP, out, *SHIPPED]
        for _ in range(args.pairs):
            points.append(run("shipped models, loop in one process", loop, len(SHIPPED), 1, out))
            points.append(batch("shipped models, one command", SHIPPED, 1, out))
        for _ in range(args.pairs if large else 0):
            warm(cached)
            ceilings.append(ceiling())
            points += [batch("full-size models", large, workers, out) for workers in args.workers]
        if args.stores:
            for what, code in (("small models, folders", FOLDERS), ("small models, memory:// to memory://", STORE)):
                words: list[str | Path] = [sys.executable, "-c", code, out, *SHIPPED]
                points += [run(what, words, len(SHIPPED), 1, out) for _ in range(args.pairs)]
        small = links(args.small, SHIPPED, Path(name) / "small")
        points += [batch("small models", small, workers, out) for workers in args.workers if small]
    table = measure.markdown(
        ["what", "models", "processes", "runs", "seconds", "CPU seconds", "models per second", "peak MB", "load"],
        [row(points, what, workers) for what, workers in dict.fromkeys((p.what, p.workers) for p in points)],
    )
    lines = [*table, "", *ratios(points)]
    if ceilings:
        spread = f"median of {len(ceilings)}, {min(ceilings):.2f} to {max(ceilings):.2f}"
        gain = f"{statistics.median(ceilings):.2f}"
        lines.append(f"- One process that only computes takes {gain} times the wall time of two ({spread}).")
    print("\n".join(lines))
    if not args.dry_run:
        measure.write("fleet", measure.machine(), points, lines)


def row(points: list[Point], what: str, workers: int) -> tuple[object, ...]:
    """Return the medians of the runs of one kind, with the largest peak of any process."""
    runs = [p for p in points if (p.what, p.workers) == (what, workers)]
    wall, cpu = (statistics.median(times) for times in zip(*((p.wall, p.cpu) for p in runs), strict=True))
    loads = f"{min(p.load for p in runs)} to {max(p.load for p in runs)}"
    speed = f"{runs[0].models / wall:.2f}"
    peak = max(p.peak for p in runs) / 1e6
    return what, runs[0].models, workers, len(runs), f"{wall:.2f}", f"{cpu:.2f}", speed, f"{peak:.0f}", loads


def ratios(points: list[Point]) -> list[str]:
    """Return the median ratios of neighboring runs, which had the same load."""
    lines = []
    for first, second, words in (
        (
            "shipped models, loop in one process",
            "shipped models, one command",
            "One command takes {} times the loop's {}",
        ),
        ("full-size models", "full-size models", "One process takes {} times the {} of two"),
    ):
        before = [p for p in points if p.what == first and p.workers == 1]
        after = [p for p in points if p.what == second and p.workers == (2 if first == second else 1)]
        if before and len(before) == len(after):
            pairs = list(zip(before, after, strict=True))
            pairs = [(b, a) for a, b in pairs] if first == second else pairs
            for kind in ("wall", "cpu"):
                factors = [getattr(b, kind) / getattr(a, kind) for a, b in pairs]
                name = "wall time" if kind == "wall" else "CPU time"
                middle = f"{statistics.median(factors):.2f}"
                spread = f"median of {len(factors)} pairs, {min(factors):.2f} to {max(factors):.2f}"
                lines.append(f"- {words.format(middle, name)} ({spread}).")
    return lines


if __name__ == "__main__":
    main()
