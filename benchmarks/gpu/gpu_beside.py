"""Compare this package with PyTorch: all ways of a model alternate in one process, with equal output types.

    python benchmarks/run.py gpu_beside NAME … [--provider cpu]     # only compiles, so that no timed process does

Like a converted file, PyTorch reads float32 inputs, computes in half precision and returns float32. Its attention uses
the half-precision kernels of `scaled_dot_product_attention`; the float32 kernel is disabled.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.gpu import skeleton_files
from benchmarks.gpu.gpu_latency import CAPTURED
from benchmarks.gpu.gpu_session import CUDA, batch_of, open_way
from benchmarks.gpu.gpu_turns import error, ratio, timed
from benchmarks.gpu.gpu_ways import files
from benchmarks.shared import measure

if TYPE_CHECKING:
    from benchmarks.gpu.gpu_builds import Module

OURS = {
    "float32": ("float32", False),
    "float32, TF32": ("tf32", False),
    "plain command": ("amp", False),
    "plain command, CUDA graph": ("amp", True),
}
LAYOUTS = ("", "channels last")
IMAGE = 4
"""The number of axes of an image batch, and of a convolution's weights."""
MODES = {"eager": None, "torch.compile": "default", "torch.compile, CUDA graphs": "reduce-overhead"}
BASES = ("float32, TF32", "plain command")
"""The ways to compare the others with."""
LIMIT = 240
"""Time limit for compiling a model, in seconds."""
Row = dict[str, Any]
Array = np.ndarray[Any, Any]
Way = tuple[Callable[[], object], Callable[[], list[Array]]]
"""A synchronized run, and its outputs."""


def beside(job: Mapping[str, Any]) -> Row:
    """Time a model with this package and with PyTorch, alternating; errors are relative to onnxruntime's float32."""
    row: Row = {"faults": {}, "time": {}, "error": {}, "ready": {}}
    calls: dict[str, Callable[[], object]] = {}
    expected: list[Array] | None = None
    for key, opened in (*_ours(job), *_of_torch(job)):
        start = time.perf_counter()
        try:
            call, outputs = opened()
            for _ in range(CAPTURED):
                call()
            found = outputs()
        except Exception as fault:  # noqa: BLE001  # errors of compilers and onnxruntime have no common base class
            row["faults"][key] = " ".join(f"{type(fault).__name__}: {fault}".split())[:300]
            continue
        expected = found if expected is None else expected
        row["error"][key], row["ready"][key] = error(expected, found), time.perf_counter() - start
        if key != "float32":
            calls[key] = call
    if not calls:
        raise LookupError(f"no way of {job['model']} runs: {next(iter(row['faults'].values()), 'there is no file')}")
    row["time"] = timed(calls, job["rounds"], job["warm"], lambda: None)
    bases = [base for base in BASES if base in row["time"]]
    row["ratio"] = {key: {base: ratio(row["time"][base], row["time"][key]) for base in bases} for key in row["time"]}
    return row


def _ours(job: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[], Way]]]:
    folder, provider = Path(job["models"]), job["provider"]
    there, batch = files(folder, job["model"]), batch_of(folder, job["model"])
    for key, (way, graph) in OURS.items():
        if way in there and (provider == CUDA or (way != "tf32" and not graph)):
            yield key, lambda way=way, graph=graph: _opened(open_way(way, there[way], batch, provider, graph=graph))


def _opened(opened: Any) -> Way:
    return opened.run, opened.outputs


# -- PyTorch ---------------------------------------------------------------------------------------


def _of_torch(job: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[], Way]]]:
    if job["model"].startswith("dense"):
        return  # this model is written as ONNX
    ready: list[Placed] = []
    for layout, key in ((layout, key) for layout in LAYOUTS for key in MODES):

        def opened(layout: str = layout, key: str = key) -> Way:
            ready[:] = ready or [placed(made_of(job), job["provider"])]
            return _module(ready[0].laid(layout), MODES[key])

        if not layout or (ready and ready[0].images):
            yield ", ".join(filter(None, ("PyTorch", key, layout))), opened


def made_of(job: Mapping[str, Any]) -> Module:
    """Return the module of a grown model, with the weights and the batch of its files."""
    import torch

    from benchmarks.gpu import gpu_builds

    folder, name = Path(job["models"]), job["model"]
    made = gpu_builds.Module.of(name, skeleton_files.about(folder, name)["sources"], exported=False)
    batch = batch_of(folder, name)
    made.tensors = {key: torch.from_numpy(batch[key]) for key in made.tensors}
    return made


@dataclass(frozen=True, slots=True)
class Placed:
    """A half-precision module with float32 inputs and outputs, and its batch, on the device."""

    module: Any
    tensors: Sequence[Any]
    wait: Callable[[], object]

    @property
    def images(self) -> bool:
        """True for two-dimensional convolutions, which depend on the layout."""
        return any(parameter.dim() == IMAGE for parameter in self.module.parameters())

    def laid(self, layout: str) -> Placed:
        """Return the module and its batch in the given layout."""
        import torch

        if not layout:
            return self
        last = torch.channels_last
        tensors = [t.contiguous(memory_format=last) if t.dim() == IMAGE else t for t in self.tensors]
        return replace(self, module=copy.deepcopy(self.module).to(memory_format=last), tensors=tensors)


def placed(made: Module, provider: str) -> Placed:
    """Move a module to the provider's device."""
    import torch

    from benchmarks.gpu import gpu_builds

    device, wait = ("cuda", torch.cuda.synchronize) if provider == CUDA else ("cpu", contextlib.nullcontext)
    if device == "cuda":
        torch.backends.cuda.enable_math_sdp(False)
    module = gpu_builds.InHalf(made.module.half().to(device)).eval()
    return Placed(module, [tensor.to(device) for tensor in made.tensors.values()], wait)


def _module(ready: Placed, mode: str | None) -> Way:
    import torch

    call = ready.module if mode is None else torch.compile(ready.module, mode=mode)
    result: list[Any] = []

    def run() -> None:
        with torch.inference_mode():
            result[:] = [call(*ready.tensors)]
        ready.wait()

    def outputs() -> list[Array]:
        found = result[0] if isinstance(result[0], tuple) else (result[0],)
        return [tensor.detach().cpu().numpy() for tensor in found]

    return run, outputs


def compiled(model: str, provider: str) -> str:
    """Compile a model in each mode, in a separate process; return the error, or ""."""
    words = [*map(str, measure.script("gpu_beside")), "--one", model, "--provider", provider]
    run = measure.cost(words, limit=LIMIT)
    return "" if run.code == 0 else f"{model}: compiling failed: {(run.said.strip().splitlines() or ['?'])[-1][:300]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--provider", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        provider = CUDA if args.provider == "cuda" else "CPUExecutionProvider"
        from benchmarks.gpu import gpu_builds

        ready = placed(gpu_builds.Module.of(args.names[0], exported=False), provider)
        for layout in LAYOUTS if ready.images else LAYOUTS[:1]:
            for mode in filter(None, MODES.values()):
                _module(ready.laid(layout), mode)[0]()
        return
    with ThreadPoolExecutor(args.workers) as pool:
        for fault in filter(None, pool.map(lambda name: compiled(name, args.provider), args.names)):
            print(fault, flush=True)


if __name__ == "__main__":
    main()
