"""Cost of emulation: BERT-base in float32 and its float16 and bfloat16 twins, on the CPU provider of onnxruntime.

    python benchmarks/run.py emulation CACHE [--rows 1 8] [--pairs 15] [--cpu-pairs 5]

Needs torch and transformers for the export (see shared/zoo.py). The float32 model and each twin run in turn, so that
other load falls on both: wall times on all cores, and processor times on one thread, which a busy machine
changes less. A ratio is the median of the pairs' ratios. Making and opening are costs of whole processes.
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
    from amp_rewrite.runtime.runner import Runner, SessionOptions

TYPES = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Pairs:
    """Seconds of one run each, in turn; nodes of the original and Casts of the twin; costs of making and opening."""

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
        """Of wall times on all cores."""
        return [twin / plain for plain, twin in zip(self.plain, self.emulated, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def cpu_ratio(self) -> float:
        """Of processor times on one thread."""
        return statistics.median(b / a for a, b in zip(self.plain_cpu, self.emulated_cpu, strict=True))


def exported(rows: int, cache: str) -> str:
    """BERT-base for that many rows of 128 tokens; exported in a process of its own."""
    from benchmarks.shared import zoo

    return str(zoo.export(f"bert_base_{rows}", Path(cache), partial(zoo.bert, rows)))


def converted(model: str, to: str, path: str) -> None:
    """Writes the model in mixed precision."""
    import amp_rewrite

    amp_rewrite.convert(model, to=to).save(path, overwrite=True)


def counted(model: str, twin: str) -> tuple[int, int]:
    """The number of nodes of a model and of Casts in its twin."""
    from amp_rewrite import Model

    nodes, others = (Model.load(path).proto.graph.node for path in (model, twin))
    return len(nodes), sum(node.op_type == "Cast" for node in others)


def made(low: Path, twin: Path) -> measure.Cost:
    """What `amp-rewrite emulate` costs as a process, writing included."""
    command = [*measure.own_command(), "emulate", low, "-o", twin, "--io", "float32", "--overwrite"]
    return measure.best(measure.cost(command) for _ in range(3))


def seconds(runner: Runner, batch: Batch, clock: Callable[[], float]) -> float:
    start = clock()
    runner.run(batch)
    return clock() - start


def in_turn(model: Path, twin: Path, count: int, threads: int) -> tuple[list[float], list[float]]:
    """Times of the model and its twin, run one after the other; the first pair warms up and is left out.

    Wall times on all cores, for 0 threads; processor times, which say more on a busy machine, for one.
    """
    from amp_rewrite import Feed, Model
    from amp_rewrite.runtime.runner import Runner

    loaded = Model.load(model)
    batch = next(iter(Feed.of(model.with_suffix(".npz"), loaded)))
    plain, emulated = (Runner.open(opened, SessionOptions(threads=threads)) for opened in (loaded, Model.load(twin)))
    clock = time.process_time if threads else time.perf_counter
    pairs = [(seconds(plain, batch, clock), seconds(emulated, batch, clock)) for _ in range(count + 1)][1:]
    return [a for a, _ in pairs], [b for _, b in pairs]


def opened(path: Path) -> measure.Cost:
    """What it costs to load and open a model, imports included."""
    program = "import sys, amp_rewrite; from amp_rewrite.runtime.runner import Runner; "
    program += "Runner.open(amp_rewrite.Model.load(sys.argv[1]))"
    command = [sys.executable, "-c", program, path]
    return measure.best(measure.cost(command) for _ in range(3))


def table(found: list[Pairs]) -> list[str]:
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
    for pairs in found:
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
    given = parser.parse_args()
    measure.warm_up()
    given.cache.mkdir(parents=True, exist_ok=True)
    found = []
    for rows in given.rows:
        model = Path(measure.apart(exported, rows, str(given.cache)))
        for to in TYPES:
            low, twin = (given.cache / f"{model.stem}.{to}.{kind}onnx" for kind in ("", "emulated."))
            measure.apart(converted, str(model), to, str(low))
            costs = made(low, twin), opened(model), opened(twin)
            counts = measure.apart(counted, str(model), str(twin))
            wall = measure.apart(in_turn, model, twin, given.pairs, 0)
            cpu = measure.apart(in_turn, model, twin, given.cpu_pairs, 1)
            found.append(Pairs(to, rows, *counts, *wall, *cpu, *costs))
            print(f"{to} {rows}: {found[-1].ratio:.2f}, one thread {found[-1].cpu_ratio:.2f}", flush=True)
    about = measure.machine(("onnx", "onnxruntime-gpu", "numpy", "ml_dtypes"))
    written = table(found)
    measure.write("emulation", about, found, ["BERT-base on onnxruntime's CPU provider.", "", *written])
    print("\n".join(written))


if __name__ == "__main__":
    main()
