"""Times of PyTorch itself for the same models: eager and compiled, in each type. Anchors, not peers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.gpu import gpu_models
from benchmarks.gpu.gpu_session import CUDA
from benchmarks.gpu.gpu_turns import timed

WAYS = ("float32", "tf32", "autocast", "half", "half channels_last", "half compiled")
Row = dict[str, Any]


def anchor(job: Mapping[str, Any]) -> Row:
    """Time a model in PyTorch, in each way by itself; `warm` is the time of the runs before, compilation included."""
    if gpu_models.source(job["model"]).__class__ is gpu_models.Dense:
        raise LookupError("the model is written as ONNX, so that PyTorch does not have it")
    row: Row = {"faults": {}, "time": {}, "warm": {}}
    for way in WAYS:
        try:
            row["warm"][way], row["time"][way] = _timed(job, way)
        except Exception as fault:  # noqa: BLE001  # what compilers raise shares no base class
            row["faults"][way] = " ".join(f"{type(fault).__name__}: {fault}".split())[:300]
    return row


def _timed(job: Mapping[str, Any], way: str) -> tuple[float, Any]:
    """Return the seconds before anything counts, and the timing of a model in one way."""
    import torch

    from benchmarks.gpu import gpu_builds

    device = "cuda" if job["provider"] == CUDA else "cpu"
    made = gpu_builds.Module.of(job["model"])
    low = way.startswith("half")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = way == "tf32"
    module = (made.module.half() if low else made.module).to(device).eval()
    tensors = [t.to(device) for t in made.tensors.values()]
    tensors = [t.half() if low and t.is_floating_point() else t for t in tensors]
    if way.endswith("channels_last"):
        if not any(t.dim() == 4 for t in module.parameters()):
            raise LookupError("the model has no convolutions")
        module = module.to(memory_format=torch.channels_last)
        tensors = [t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in tensors]
    call = torch.compile(module) if way.endswith("compiled") else module
    wait = torch.cuda.synchronize if device == "cuda" else contextlib.nullcontext

    def once() -> None:
        call(*tensors)
        wait()

    kind = torch.float16 if device == "cuda" else torch.bfloat16
    with torch.inference_mode(), torch.autocast(device, kind, enabled=way == "autocast"):
        start = time.perf_counter()
        once()
        warm = time.perf_counter() - start
        return warm, timed({way: once}, max(job["rounds"] // 2, 1), job["warm"], lambda: None)[way]
