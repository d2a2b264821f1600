"""Cost of emulation: BERT-base in float32 and its float16 and bfloat16 twins, on onnxruntime's CPU provider.

    python benchmarks/run.py emulation CACHE [--rows 1 8] [--pairs 15] [--cpu-pairs 5]

This needs torch and transformers for the export (see shared/zoo.py). The float32 model and each twin run alternately,
so that other load affects both. Wall times are on all cores; CPU times are on one thread, since a busy machine affects
them less. A ratio is the median over the pairs. The costs of making and opening are for whole processes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.shared import measure

if TYPE_CHECKING:
    from amp_rewrite.evidence.data.feed import Batch
    from amp_rewrite.runtime.runner import Runner

TYPES = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Pairs:
    """Seconds of alternate runs, nodes of the original, Casts of the twin, and costs of making and opening."""

    to: str
    rows: int
    nodes: int
    casts: int
    plain: list[float]
    emulated: list[float]
    plain_cpu: list[float]
    emulated_cpu: list[float]
    made: measure.Cost
    opened_plain: measure.Cost
    opened_emulated: measure.Cost

    @property
    def ratios(self) -> list[float]:
        """The ratios of wall times on all cores."""
        return [twin / plain for plain, twin in zip(self.plain, self.emulated, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def cpu_ratio(self) -> float:
        """The median ratio of CPU times on one thread."""
        return statistics.median(b / a for a, b in zip(self.plain_cpu, self.emulated_cpu, strict=True))


def exported(rows: int, cache: str) -> str:
    """Export BERT-base for `rows` rows of 128 tokens."""
    from benchmarks.shared import zoo

    return str(zoo.export(f"bert_base_{rows}", Path(cache), partial(zoo.bert, rows)))


def converted(model: str, to: str, path: str) -> None:
    """Write the model in mixed precision."""
    import amp_rewrite

    amp_rewrite.convert(model, to=to).save(path, overwrite=True)


def counted(model: str, twin: str) -> tuple[int, int]:
    """Return the number of nodes in a model and of Casts in its twin."""
    from amp_rewrite import Model

    nodes, others = (Model.load(path).proto.graph.node for path in (model, twin))
    return len(nodes), sum(node.op_type == "Cast" for node in others)


def made(low: Path, twin: Path) -> measure.Cost:
    """Return the cost of `amp-rewrite emulate` as a process, including writing."""
    command = [*measure.own_command(), "emulate", low, "-o", twin, "--io", "float32", "--overwrite"]
    return measure.best(measure.cost(command) for _ in range(3))


def seconds(runner: Runner, batch: Batch, clock: Callable[[], float]) -> float:
    start = clock()
    runner.run(batch)
    return clock() - start


def in_turn(model: Path, twin: Path, count: int, threads: int) -> tuple[list[float], list[float]]:
    """Return the times of the model and its twin in alternate runs, without the first pair, which warms up.

    These are wall times on all cores for 0 threads, or CPU times, which a busy machine affects less, for 1.
    """
    from amp_rewrite import Feed, Model
    from amp_rewrite.runtime.runner import Runner, SessionOptions

    loaded = Model.load(model)
    batch = next(iter(Feed.of(model.with_suffix(".npz"), loaded)))
    plain, emulated = (Runner.open(opened, SessionOptions(threads=threads)) for opened in (loaded, Model.load(twin)))
    clock = time.process_time if threads else time.perf_counter
    pairs = [(seconds(plain, batch, clock), seconds(emulated, batch, clock)) for _ in range(count + 1)][1:]
    return [a for a, _ in pairs], [b for _, b in pairs]


def opened(path: Path) -> measure.Cost:
    """Return the cost of loading and opening a model, including imports."""
    program = "import sys, amp_rewrite; from amp_rewrite.runtime.runner import Runner; "
    program += "Runner.open(amp_rewrite.Model.load(sys.argv[1]))"
    command = [sys.executable, "-c", program, path]
    return measure.best(measure.cost(command) for _ in range(3))


def table(results: list[Pairs]) -> list[str]:
    head = ("low type", "rows × tokens", "nodes", "Casts of the twin", "float32", "emulated")
    head += (
        "ratio, median",
        "quartiles",
        "float32, one thread",
        "emulated",
        "ratio, median",
        "making the twin",
        "opening float32",
        "opening emulated",
    )
    rows = []
    for pairs in results:
        low, _, high = statistics.quantiles(pairs.ratios, n=4)
        wall = [f"{statistics.median(of) * 1e3:.0f} ms" for of in (pairs.plain, pairs.emulated)]
        cpu = [f"{statistics.median(of) * 1e3:.0f} ms" for of in (pairs.plain_cpu, pairs.emulated_cpu)]
        costs = [
            f"{c.wall:.1f} s, {c.peak / 1e6:.0f} MB" for c in (pairs.made, pairs.opened_plain, pairs.opened_emulated)
        ]
        spread = f"{low:.2f}–{high:.2f}"
        about = (pairs.to, f"{pairs.rows} × 128", pairs.nodes, pairs.casts)
        rows.append((*about, *wall, f"{pairs.ratio:.2f}", spread, *cpu, f"{pairs.cpu_ratio:.2f}", *costs))
    return measure.markdown(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--cpu-pairs", type=int, default=5)
    args = parser.parse_args()
    measure.warm_up()
    args.cache.mkdir(parents=True, exist_ok=True)
    results = []
    for rows in args.rows:
        model = Path(measure.apart(exported, rows, str(args.cache)))
        for to in TYPES:
            low, twin = (args.cache / f"{model.stem}.{to}.{kind}onnx" for kind in ("", "emulated."))
            measure.apart(converted, str(model), to, str(low))
            costs = made(low, twin), opened(model), opened(twin)
            counts = measure.apart(counted, str(model), str(twin))
            wall = measure.apart(in_turn, model, twin, args.pairs, 0)
            cpu = measure.apart(in_turn, model, twin, args.cpu_pairs, 1)
            results.append(Pairs(to, rows, *counts, *wall, *cpu, *costs))
            print(f"{to} {rows}: {results[-1].ratio:.2f}, one thread {results[-1].cpu_ratio:.2f}", flush=True)
    about = measure.machine(("onnx", "onnxruntime-gpu", "numpy", "ml_dtypes"))
    lines = table(results)
    measure.write("emulation", about, results, ["BERT-base on onnxruntime's CPU provider.", "", *lines])
    print("\n".join(lines))


if __name__ == "__main__":
    main()
