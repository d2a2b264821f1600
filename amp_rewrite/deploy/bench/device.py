"""Device of a benchmark: its name, and its memory in use."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from pathlib import Path
from typing import Any

from amp_rewrite.runtime.gpu import Loader, hardware
from amp_rewrite.runtime.runner import CUDA

_STATUS = Path("/proc/self/status")
_CPUS = Path("/proc/cpuinfo")


def device_name(provider: str) -> str:
    """Return the GPU and its driver, or the processor and the cores that this process may use."""
    found = hardware() if provider == CUDA else None
    if found is not None and found.gpus:
        return f"{found.gpus[0]}, driver {found.driver or 'unknown'}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_processor()}, {cores} cores"


def _processor() -> str:
    lines = _CPUS.read_text("utf-8").splitlines() if _CPUS.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


class GpuMemory:
    """Memory of a GPU from the driver. It includes all processes, so differences need a GPU without other load."""

    def __init__(self, device: int = 0, load: Loader = ctypes.CDLL) -> None:
        self._library = load("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        self._context = ctypes.c_void_p()
        gpu = ctypes.c_int()
        self._ask("cuInit", 0)
        self._ask("cuDeviceGet", ctypes.byref(gpu), device)
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


def main_memory() -> int:
    """Return the bytes of main memory of this machine; 0 if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def resident() -> int:
    """Return the resident bytes of this process; 0 if unknown."""
    return _of_status("VmRSS:")


def resident_peak() -> int:
    """Return the peak of resident bytes of this process; 0 if unknown.

    `ru_maxrss` would not do, since a process inherits it from its parent.
    """
    return _of_status("VmHWM:")


def _of_status(word: str) -> int:
    lines = _STATUS.read_text("ascii").splitlines() if _STATUS.exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(word)), 0)
