"""What it saves that the state of a training step stays where it is computed, instead of going over the host.

    python benchmarks/training_state.py [--widths 256 1024 4096] [--steps 21]

Three ways to make the same steps of an MLP 784-WIDTH-WIDTH-10 with RMSprop, batch 128: `Trainer`, whose state is bound
in two sets that change places; onnxruntime fed with all state as arrays, and giving all of it back; and the same
without the pool that onnxruntime fills in the second run. Each in a process of its own, on one thread and on two; they
must end with the same bits, or nothing is reported. Processor time and wall time of a step are medians; the peak is
that of the whole process. Needs no GPU, and says nothing about one: there each array that goes over the host is copied
twice per step.
"""

from __future__ import annotations

import argparse
import hashlib
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure
import numpy as np

Batch = dict[str, np.ndarray]
PROVIDERS = ("CPUExecutionProvider",)


@dataclass(frozen=True, slots=True)
class Row:
    """Of one width, way and number of threads: seconds of a step, bytes at the peak and of the state, its digest."""

    width: int
    threads: int
    way: str
    cpu: float
    wall: float
    peak: int
    state: int
    digest: str

    def cells(self) -> list[str]:
        spent = [f"{1e3 * seconds:.1f} ms" for seconds in (self.cpu, self.wall)]
        return [str(self.width), str(self.threads), self.way, *spent, *(f"{b / 1e6:.0f} MB" for b in self._bytes)]

    @property
    def _bytes(self) -> tuple[int, int]:
        return self.peak, self.state


def write_step(width: int, path: str) -> None:
    import onnx.parser
    from onnx.numpy_helper import from_array

    from amp_rewrite.train import save_step, training_step

    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]> net (float[N,784] x) => (float[N,10] y) {
          a = MatMul (x, w1) b = Relu (a) c = MatMul (b, w2) d = Relu (c) y = MatMul (d, w3)
        }"""
    )
    rng = np.random.default_rng(0)
    for name, shape in {"w1": (784, width), "w2": (width, width), "w3": (width, 10)}.items():
        model.graph.initializer.append(from_array(rng.standard_normal(shape, np.float32) * np.float32(0.02), name))
    step = training_step(model, loss="cross_entropy(y, t)", optimizer="rmsprop", policy="float32")
    save_step(step, path, overwrite=True)


Stepping = tuple[Callable[[Batch], None], Callable[[], Mapping[str, Any]]]
"""What makes a step, and what gives the state."""


def bound(step: Any, threads: int) -> Stepping:
    from amp_rewrite.train import Trainer

    trainer = Trainer(step, providers=PROVIDERS, threads=threads)
    return lambda batch: (trainer.fit([batch]), None)[1], lambda: trainer.state


def fed(step: Any, threads: int, *, pooled: bool) -> Stepping:
    from amp_rewrite.runtime.runner import Runner

    runner = Runner.open(step.model, providers=PROVIDERS, threads=threads, pooled=pooled)
    state = step.initial_state()
    rate = np.array(step.optimizer.learning_rate, np.float32)

    def go(batch: Batch) -> None:
        state.update(step.next_state(runner.run(dict(batch) | state | {step.learning_rate: rate})))

    return go, lambda: state


WAYS: dict[str, Callable[[Any, int], Stepping]] = {
    "bound (Trainer)": bound,
    "fed as arrays": lambda step, threads: fed(step, threads, pooled=True),
    "fed as arrays, no pool": lambda step, threads: fed(step, threads, pooled=False),
}


def made(width: int, threads: int, way: str, path: str, steps: int) -> Row:
    """Steps made in one way; the first three warm up."""
    from amp_rewrite.train import load_step

    rng = np.random.default_rng(1)
    batches: list[Batch] = [{"x": rng.random((128, 784), np.float32), "t": rng.integers(0, 10, 128)} for _ in range(4)]
    go, state = WAYS[way](load_step(path), threads)
    walls, spent = [], []
    for number in range(steps + 3):
        start, began = time.perf_counter(), time.process_time()
        go(batches[number % 4])
        walls.append(time.perf_counter() - start)
        spent.append(time.process_time() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    digest, total = hashlib.sha256(), 0
    for _, array in sorted(state().items()):
        digest.update(array.tobytes())
        total += array.nbytes
    middle = statistics.median
    return Row(width, threads, way, middle(spent[3:]), middle(walls[3:]), peak, total, digest.hexdigest())


HEAD = ("width", "threads", "state", "processor time of a step", "wall time", "peak memory", "one set of the state")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", nargs="+", type=int, default=[256, 1024, 4096])
    parser.add_argument("--steps", type=int, default=21)
    given = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for width in given.widths:
            path = str(Path(folder) / f"{width}.onnx")
            measure.apart(write_step, width, path)
            for threads in (1, 2):
                same = [measure.apart(made, width, threads, way, path, given.steps) for way in WAYS]
                for row in same:
                    print(" | ".join(row.cells()), flush=True)
                if len({row.digest for row in same}) > 1:
                    raise SystemExit(f"width {width}, {threads} threads: the ways end with different states")
                rows += same
    about = measure.machine(("onnx", "onnxruntime-gpu", "numpy"))
    table = [_ABOUT, "", *measure.markdown(HEAD, [row.cells() for row in rows])]
    measure.write("training_state", about, rows, table)


_ABOUT = (
    "CPU provider of onnxruntime, float32, the same bits at the end in all three ways. onnxruntime's outputs become"
    " numpy's without a copy on a CPU, so binding saves no time there; what it is for is a GPU, where nothing was"
    " measured yet. Compare processor times: wall times are shared with whatever else ran."
)


if __name__ == "__main__":
    main()
