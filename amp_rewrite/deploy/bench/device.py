"""Device of a benchmark: its name, and its memory in use."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path
from typing import Any

from amp_rewrite.runtime.gpu import DRIVER, Loader, hardware
from amp_rewrite.runtime.runner import CUDA, offered_device

_STATUS = Path("/proc/self/status")
_CPUS = Path("/proc/cpuinfo")


def device_name(provider: str) -> str:
    """Return the GPU and its driver, or the processor and the cores that this process may use."""
    if offered := offered_device(provider):
        return f"{offered} ({provider})"
    machine = hardware() if provider == CUDA else None
    if machine is not None and machine.gpus:
        return f"{machine.gpus[0]}, driver {machine.driver or 'unknown'}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    processor = _line_of(_CPUS, "model name").strip(" \t:") or platform.processor() or platform.machine()
    return f"{processor}, {cores} cores"


def _line_of(file: Path, start: str) -> str:
    """Return the rest of the first line of a file that starts so; "" without a file or line."""
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    return next((line.removeprefix(start) for line in lines if line.startswith(start)), "")


class GpuMemory:
    """Memory of the first GPU, of all processes together: differences need a GPU without other load."""

    def __init__(self, load: Loader = ctypes.CDLL) -> None:
        self._library = load(DRIVER)
        self._context = ctypes.c_void_p()
        gpu = ctypes.c_int()
        self._ask("cuInit", 0)
        self._ask("cuDeviceGet", ctypes.byref(gpu), 0)
        self._ask("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), gpu)

    def used(self) -> int:
        """Return the bytes in use now, the peak of a runtime that never frees. Raise OSError if the driver refuses."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._ask("cuCtxPushCurrent_v2", self._context)
        self._ask("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        self._ask("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        return total.value - free.value

    def _ask(self, name: str, *arguments: Any) -> None:
        try:
            code = getattr(self._library, name)(*arguments)
        except AttributeError as missing:
            raise OSError(f"the NVIDIA driver here has no {name}; update it") from missing
        if code:
            raise OSError(f"the NVIDIA driver refused {name} with error {code}")


def resident(*, peak: bool = False) -> int:
    """Return the resident bytes of this process now, or their peak; 0 if unknown.

    `ru_maxrss` would not do as a peak, since a process inherits it from its parent.
    """
    line = _line_of(_STATUS, "VmHWM:" if peak else "VmRSS:")
    return int(line.split()[0]) << 10 if line else 0
