"""Profile the kernels of each way by CUPTI, through torch.profiler; measure the GPU's best performance."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.gpu_session import CUDA, Opened, batch_of, open_way
from benchmarks.gpu.gpu_ways import WAYS, files

RUNS = 10
WARM = 3
TOP = 25
KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("copies host/device", ("Memcpy HtoD", "Memcpy DtoH")),
    ("copies", ("Memcpy", "Memset")),
    ("attention", ("flash", "fmha", "attention", "Attention")),
    (
        "products low",
        ("hsh", "h16816", "hmma", "f16f16", "h1688", "bf16", "s16816", "f16_s", "_h_", "hhh", "tst", "bst"),
    ),
    ("products TF32", ("tf32", "s1688", "_tn_n_tf")),
    ("products float32", ("sgemm", "simt", "ffma", "gemm", "conv", "xmma", "cutlass", "nvjet")),
    ("layout", ("nchwToNhwc", "nhwcToNchw", "Transpose", "transpose")),
    ("Casts", ("Cast", "cast")),
    ("norms", ("LayerNorm", "layer_norm", "GroupNorm", "bn_")),
    ("softmax", ("softmax", "Softmax")),
)
"""Groups of kernels by words in their names; the first match counts. `top` has the names themselves."""
SIDE = 8192
COPIED = 1 << 30
Row = dict[str, Any]


def kernels(job: Mapping[str, Any]) -> Row:
    """Return the kernels of each way: groups, names, GPU time, and the time of the run."""
    folder, provider = Path(job["models"]), job["provider"]
    batch, row = batch_of(folder, job["model"]), {"faults": {}, "kernels": {}}
    for way, file in files(folder, job["model"]).items():
        if (way == "tf32" and provider != CUDA) or way not in job.get("ways", WAYS):
            continue
        try:
            row["kernels"][way] = _profiled(open_way(way, file, batch, provider), provider)
        except ImportError:
            raise
        except Exception as fault:  # noqa: BLE001  # onnxruntime's errors have no common base class
            row["faults"][way] = " ".join(f"{type(fault).__name__}: {fault}".split())[:300]
    return row


def _profiled(opened: Opened, provider: str) -> Row:
    """Profile several runs of a model; return the averages of one run."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if provider == CUDA:
        torch.zeros(1, device="cuda")  # the profiler only sees a device after torch has used it
    for _ in range(WARM):
        opened.run()
    activity = ProfilerActivity.CUDA if provider == CUDA else ProfilerActivity.CPU
    with profile(activities=[activity]) as seen:
        start = time.perf_counter()
        for _ in range(RUNS):
            opened.run()
        wall = (time.perf_counter() - start) / RUNS
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text("utf-8"))["traceEvents"]
    return {"wall_us": 1e6 * wall, **summary(events, RUNS)}


def summary(events: Iterable[Mapping[str, Any]], runs: int) -> Row:
    """Return launches and microseconds of one run, by group and for the longest kernels."""
    by_name: dict[str, list[float]] = {}
    for event in events:
        if event.get("cat") in KINDS:
            entry = by_name.setdefault(event["name"], [0.0, 0.0])
            entry[0] += 1 / runs
            entry[1] += event["dur"] / runs
    groups: dict[str, list[float]] = {}
    for name, (launches, us) in by_name.items():
        entry = groups.setdefault(group_of(name), [0.0, 0.0])
        entry[0] += launches
        entry[1] += us
    top = sorted(by_name.items(), key=lambda pair: -pair[1][1])[:TOP]
    return {
        "busy_us": sum(us for _, us in by_name.values()),
        "launches": sum(launches for launches, _ in by_name.values()),
        "groups": groups,
        "top": [[name[:160], *numbers] for name, numbers in top],
    }


def group_of(name: str) -> str:
    """Return the group of a kernel by its name."""
    return next((group for group, words in GROUPS if any(word in name for word in words)), "other")


def ceilings(job: Mapping[str, Any]) -> Row:
    """Return the GPU's best performance in PyTorch: TFLOP/s of large products per type, TB/s of a copy."""
    if job["provider"] != CUDA:
        raise LookupError("ceilings need a GPU")
    import torch

    found: Row = {}
    types = {"float32": torch.float32, "tf32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    for word, dtype in types.items():
        torch.backends.cuda.matmul.allow_tf32 = word == "tf32"
        a, b = (torch.randn(SIDE, SIDE, device="cuda").to(dtype) for _ in range(2))
        seconds = _events(lambda a=a, b=b: a @ b, 8 if word == "float32" else 23)
        found[word] = 2 * SIDE**3 / seconds / 1e12
    source = torch.empty(COPIED, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    found["copy"] = 2 * source.nbytes / _events(lambda: target.copy_(source), 8) / 1e12
    return found


def _events(call: Any, times: int) -> float:
    """Return the median GPU seconds of a call, without the first three calls."""
    import torch

    seconds = []
    for _ in range(times):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return float(np.median(seconds[3:]))
