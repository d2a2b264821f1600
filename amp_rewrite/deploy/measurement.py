"""Name of a device, and the memory of a model in a process of its own.

Memory counts from a clean start, and a model that exceeds the memory ends its own process, not the benchmark."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from amp_rewrite.errors import MachineError
from amp_rewrite.evidence.data.feed import Batch, Feed
from amp_rewrite.evidence.opening import session_on
from amp_rewrite.files.model import Model
from amp_rewrite.runtime.gpu import DRIVER, Loader, hardware
from amp_rewrite.runtime.installation import has_provider, offered_device
from amp_rewrite.runtime.probes import apart
from amp_rewrite.runtime.runner import CUDA, Runner

_STATUS = Path("/proc/self/status")
_CPUS = Path("/proc/cpuinfo")


def device_name(provider: str) -> str:
    """Return the GPU and its driver, or the processor and the cores of this process."""
    if offered := offered_device(provider):
        return f"{offered} ({provider})"
    machine = hardware() if provider == CUDA else None
    if machine is not None and machine.gpus:
        driver = "" if machine.cuda is None else f", driver of CUDA {machine.cuda[0]}.{machine.cuda[1]}"
        return f"{machine.gpus[0]}{driver}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    processor = _line_of(_CPUS, "model name").strip(" \t:") or platform.processor() or platform.machine()
    return f"{processor}, {cores} cores"


def _line_of(file: Path, start: str) -> str:
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    return next((line.removeprefix(start) for line in lines if line.startswith(start)), "")


def gpu_memory(load: Loader = ctypes.CDLL) -> int:
    """Return the bytes in use on the first GPU, by all processes together. Raise MachineError if the driver refuses."""
    driver = load(DRIVER)
    gpu, context = ctypes.c_int(), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    calls: tuple[tuple[Any, ...], ...] = (
        ("cuInit", 0),
        ("cuDeviceGet", ctypes.byref(gpu), 0),
        ("cuDevicePrimaryCtxRetain", ctypes.byref(context), gpu),
        ("cuCtxSetCurrent", context),
        ("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total)),
    )
    for name, *arguments in calls:
        if code := getattr(driver, name)(*arguments):
            raise MachineError(f"the NVIDIA driver refused {name} with error {code}; measure without memory")
    return total.value - free.value


def resident(*, peak: bool = False) -> int:
    """Return the resident bytes of this process now, or their peak; 0 if unknown.

    `ru_maxrss` would not do as a peak, since a process inherits it from its parent.
    """
    line = _line_of(_STATUS, "VmHWM:" if peak else "VmRSS:")
    return int(line.split()[0]) << 10 if line else 0


_SECONDS = 3600.0  # for a process that opens a model and runs it twice


def peak_memory(model: Path, batch: Batch, provider: str, threads: int = 0, options: Mapping[str, str] = {}) -> int:
    """Return the bytes of a model beyond those in use before it is opened, measured in a process of its own.

    MachineError if they are not known: the process ends before, or this system does not tell.
    """
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-", ignore_cleanup_errors=True) as folder:
        arrays: dict[str, Any] = {f"0/{name}": array for name, array in batch.items()}  # "file" is a name, too
        np.savez(f"{folder}/batch.npz", **arrays)
        job = json.dumps([os.fspath(model.resolve()), f"{folder}/batch.npz", provider, threads, dict(options)])
        function = own_peak.__name__
        program = f"import json; from {__name__} import {function}; print({function}(*json.loads(sys.argv[1])))"
        told = int(apart(program, job, subject="its process", seconds=_SECONDS))
    if not told:
        raise MachineError("this system does not tell how much is in use")
    return told


def own_peak(file: str, data: str, provider: str, threads: int, options: Mapping[str, str]) -> int:
    """Open a model, run it twice, and return the bytes in use beyond those before; 0 if unknown."""
    model = Model.load(file)
    batch = next(iter(Feed.of(data, model, allow_nonfinite=True)))
    has_provider(provider)  # loads the runtime's library, which does not belong to the model
    before = gpu_memory() if provider == CUDA else resident()
    # The arena grows by the requested size, not by powers of two.
    own = {**options, "arena_extend_strategy": "kSameAsRequested"} if provider == CUDA else options
    binding = Runner.open(model, session_on(provider, threads, own)).bind(batch)
    for _ in range(2):  # the second run shows whether memory is used again
        binding.run()
    # The binding is held until here, because a session frees its arena on the GPU with itself.
    after = gpu_memory() if provider == CUDA else resident(peak=True)
    return max(after - before, 0)
