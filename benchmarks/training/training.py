"""Cost of a training step as one graph in onnxruntime, compared with PyTorch's eager loop and torch.amp.

    python benchmarks/run.py training [--models mlp cnn bert gpt2] [--modes MODE …] [--pairs 15] [--device cpu|cuda]

Each row is written as soon as it is measured, and replaces the previous row of its model and mode.

This needs torch, transformers and onnxscript. Both sides start from the same weights and see the same batches; unless
their first losses in float32 agree to 1e-4, nothing is reported. They alternate, so that other load affects both, and a
ratio is the median over the pairs. On a CPU, times are CPU times on one thread, which a busy machine affects less than
wall times; on a GPU, they are wall times. Memory is the peak of a process with ten steps, and its part after the
imports.

The modes are float32; float32 with a dynamic loss scale (in PyTorch, GradScaler), which shows the cost of scaling;
float16 (autocast and GradScaler); and bfloat16 (autocast). On a CPU, float32 kernels with rounding emulate the low
types here, whereas PyTorch's autocast runs low kernels. On a GPU, there is also float32 with TF32.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.shared import measure
from benchmarks.training.subjects import SUBJECTS, Batch, Subject, batches, made

if TYPE_CHECKING:
    import torch

    from amp_rewrite.train import TrainingStep

TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Mode:
    """One precision on both sides. `low`: PyTorch's autocast type. `scaled`: with a dynamic loss scale."""

    policy: str
    scaled: bool
    low: str | None = None
    tf32: bool = False


MODES = {
    "float32": Mode("float32", False),
    "float32, loss scale": Mode("float32", True),
    "TF32": Mode("float32", False, tf32=True),
    "float16": Mode("mixed_float16", True, "float16"),
    "bfloat16": Mode("mixed_bfloat16", False, "bfloat16"),
}
ON = {
    "cpu": ("float32", "float32, loss scale", "float16", "bfloat16"),
    "cuda": ("float32", "TF32", "float16", "bfloat16"),
}


def written(name: str, modes: Sequence[str], folder: str) -> str:
    """Export a subject's PyTorch module for each mode, with a batch; return the subject's title."""
    import torch

    from amp_rewrite.train import from_torch

    subject, module = made(name)
    first = next(batches(subject))[subject.source]
    model = from_torch(module, (torch.from_numpy(first),), outputs="logits")
    for mode in modes:
        model.save(_path(folder, name, mode), overwrite=True)
        np.savez(f"{_path(folder, name, mode)}.npz", **next(batches(subject)))  # type: ignore[arg-type]
    return subject.title


def _path(folder: str | Path, name: str, mode: str) -> str:
    return str(Path(folder) / f"{name}-{mode.replace(', ', '-').replace(' ', '-')}.onnx")


# -- the two sides -------------------------------------------------------------------------------------


class Ours:
    """A step in a `Trainer`, with its state on the device."""

    def __init__(self, step: TrainingStep, device: str, tf32: bool) -> None:
        from amp_rewrite.train import Trainer

        there = ("CUDAExecutionProvider",) if device == "cuda" else ()
        self.trainer = Trainer(
            step,
            providers=(*there, "CPUExecutionProvider"),
            threads=1,
            emulated=False if there else None,
            provider_options={name: {"use_tf32": str(int(tf32))} for name in there},
        )
        if there and not self.trainer.where.startswith(there):
            raise SystemExit("onnxruntime cannot use CUDA here")

    def __call__(self, batch: Batch) -> float:
        return self.trainer.fit([batch]).losses[0]


class Theirs:
    """PyTorch's usual loop, with autocast and GradScaler if the mode uses them."""

    def __init__(self, subject: Subject, module: torch.nn.Module, mode: Mode, device: str) -> None:
        import torch

        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = mode.tf32
        self.module = module.to(device).train()
        self.optimizer = subject.theirs(self.module)
        self.scaler = torch.amp.GradScaler(device) if mode.scaled else None
        self.low = getattr(torch, mode.low) if mode.low else None
        self.device, self.source, self.axis = device, subject.source, subject.axis

    def __call__(self, batch: Batch) -> float:
        import torch
        from torch.nn import functional as F

        inputs, label = (torch.from_numpy(batch[name]).to(self.device) for name in (self.source, "label"))
        self.optimizer.zero_grad()
        with torch.autocast(self.device, dtype=self.low) if self.low else nullcontext():
            loss = F.cross_entropy(self.module(inputs).movedim(self.axis, 1), label)
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return float(loss.detach())


def side(which: str, name: str, mode: str, path: str, device: str) -> Callable[[Batch], float]:
    """Return one of the two sides, ready to run steps."""
    if which == "ours":
        from amp_rewrite.train import training_step

        own, _ = made(name)
        step = training_step(
            path,
            loss=f"cross_entropy(logits, label, axis={own.axis})",
            optimizer=own.ours,
            policy=MODES[mode].policy,
            loss_scale="dynamic" if MODES[mode].scaled else None,
            training_mode=True,
        )
        return Ours(step, device, MODES[mode].tf32)
    import torch

    torch.set_num_threads(1)
    subject, module = made(name)
    return Theirs(subject, module, MODES[mode], device)


@dataclass(frozen=True, slots=True)
class Turns:
    """Wall and CPU seconds of alternate steps, and the largest difference of the first losses."""

    ours: list[float]
    theirs: list[float]
    ours_cpu: list[float]
    theirs_cpu: list[float]
    apart: float


def alternate(name: str, mode: str, path: str, device: str, pairs: int) -> Turns:
    """Alternate steps of ours and theirs, after three pairs to warm up."""
    ours, theirs = (side(which, name, mode, path, device) for which in ("ours", "theirs"))
    feed = batches(made(name)[0])
    first = [abs(ours(batch) - theirs(batch)) for batch, _ in zip(feed, range(3), strict=False)]
    found = Turns([], [], [], [], max(first))
    for batch, _ in zip(feed, range(pairs), strict=False):
        for step, wall, cpu in ((ours, found.ours, found.ours_cpu), (theirs, found.theirs, found.theirs_cpu)):
            start, began = time.perf_counter(), time.process_time()
            step(batch)
            wall.append(time.perf_counter() - start)
            cpu.append(time.process_time() - began)
    return found


def remember(which: str, name: str, mode: str, path: str, device: str) -> None:
    """Run ten steps; print the peak bytes, the bytes before them, and the bytes on the GPU."""
    for module in (
        ("onnxruntime", "amp_rewrite.train.step.step") if which == "ours" else ("torch", "torch.nn.functional")
    ):
        import_module(module)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = side(which, name, mode, path, device)
    for batch, _ in zip(_saved(path), range(10), strict=False):
        step(batch)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps([peak * 1024, before * 1024, _on_gpu() if device == "cuda" else 0]))


def _saved(path: str) -> Iterator[Batch]:
    """Yield the stored batch repeatedly; this does not need PyTorch."""
    with np.load(f"{path}.npz") as found:
        batch = dict(found)
    while True:
        yield batch


def _on_gpu() -> int:
    """Return the driver's count of bytes for this process."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    rows = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    return sum(int(row.split(",")[1]) << 20 for row in rows if int(row.split(",")[0]) == os.getpid())


def memory(which: str, name: str, mode: str, path: str, device: str) -> tuple[int, int, int]:
    """Return the output of `remember`, run in a separate process."""
    words = [*measure.script("training"), "--remember", which, name, mode, path, device]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    peak, before, gpu = json.loads(done.stdout.splitlines()[-1])
    return peak, before, gpu


# -- results -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One subject in one mode: alternate steps, bytes (peak, after imports, on the GPU), date and load."""

    model: str
    mode: str
    device: str
    turns: Turns
    ours_bytes: Sequence[int]
    theirs_bytes: Sequence[int]
    date: object = ""
    load: object = None

    @classmethod
    def read(cls, saved: dict[str, Any]) -> Row:
        return cls(**{**saved, "turns": Turns(**saved["turns"])})

    def cells(self) -> list[str]:
        turns = self.turns
        times = (turns.ours_cpu, turns.theirs_cpu) if self.device == "cpu" else (turns.ours, turns.theirs)
        kept = map(self._kept, (self.ours_bytes, self.theirs_bytes))
        return [self.model, self.mode, *_compared(*times), *kept, f"{self.date}, {self.load}"]

    def _kept(self, kept: Sequence[int]) -> str:
        peak, imported, gpu = kept
        return (
            f"{peak / 1e6:.0f} MB (+{(peak - imported) / 1e6:.0f})" if self.device == "cpu" else f"{gpu / 1e6:.0f} MB"
        )


def _compared(ours: list[float], theirs: list[float]) -> list[str]:
    """Return the median times, and the median and quartiles of the pairs' ratios."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)
    return [*(f"{1e3 * statistics.median(t):.1f} ms" for t in (ours, theirs)), f"{middle:.2f} ({low:.2f}–{high:.2f})"]


HEAD = ("model", "mode", "time of a step: one graph", "PyTorch eager, torch.amp", "ratio (quartiles)")
HEAD += ("peak memory: one graph (after imports)", "PyTorch eager, torch.amp", "day, load")


def measured(name: str, modes: Sequence[str], device: str, pairs: int, folder: str) -> Iterator[Row]:
    title = measure.apart(written, name, modes, folder)  # in a child, since children inherit this process's peak
    for mode in modes:
        path = _path(folder, name, mode)
        turns = measure.apart(alternate, name, mode, path, device, pairs)
        if mode.startswith("float32") and turns.apart > TOLERANCE:
            raise SystemExit(f"{name}, {mode}: the first losses differ by {turns.apart:.1e}; the trainings differ")
        ours, theirs = (memory(which, name, mode, path, device) for which in ("ours", "theirs"))
        about = measure.machine(())
        yield Row(title, mode, device, turns, ours, theirs, about["date"], about["load"])


def merged(results: str, row: Row) -> list[Row]:
    """Add a row to the stored ones, in place of the row of its model and mode."""
    path = measure.RESULTS / f"{results}.json"
    saved = json.loads(path.read_text("utf-8"))["rows"] if path.exists() else []
    rows = {(one.model, one.mode): one for one in map(Row.read, (s for s in saved if "turns" in s))}
    rows[row.model, row.mode] = row
    titles = [one.model for one in rows.values()]
    return sorted(rows.values(), key=lambda one: (titles.index(one.model), [*MODES].index(one.mode)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SUBJECTS, default=["mlp", "cnn", "bert", "gpt2"])
    parser.add_argument("--modes", nargs="+", choices=MODES, help="modes to run (default: all for the device)")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--device", choices=ON, default="cpu")
    parser.add_argument("--results", metavar="NAME", help="name of the file in benchmarks/results (default: training)")
    parser.add_argument("--remember", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.remember:
        remember(*args.remember)
        return
    results = args.results or ("training" if args.device == "cpu" else "training_cuda")
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            for row in measured(name, args.modes or ON[args.device], args.device, args.pairs, folder):
                print(" | ".join(row.cells()), flush=True)
                rows = merged(results, row)
                table = [_ON_CPU if args.device == "cpu" else _gpu_name(), ""]
                table += measure.markdown(HEAD, [one.cells() for one in rows])
                measure.write(results, measure.machine(PACKAGES), rows, table)


PACKAGES = ("onnx", "onnxruntime-gpu", "numpy", "torch")
_ON_CPU = (
    "onnxruntime's CPU provider. Times are CPU times on one thread; the table states the machine's load. In float16 and"
    " bfloat16, our steps are emulated: float32 kernels, with each result rounded."
    ' torch.autocast("cpu") uses low kernels for products and convolutions, and casts weights in every step.'
)


def _gpu_name() -> str:
    import torch

    return f"{torch.cuda.get_device_name()}, onnxruntime's CUDA provider."


if __name__ == "__main__":
    main()
