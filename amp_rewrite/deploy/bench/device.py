"""Where a benchmark runs, in words, and the memory that is in use there, in bytes."""

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
    """The GPU and its driver, or the processor and the cores that this process may use."""
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
    """The memory of a GPU, asked of the driver. It counts all processes: what changes is ours on a GPU of our own."""

    def __init__(self, device: int = 0, load: Loader = ctypes.CDLL) -> None:
        self._library = load("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        self._context = ctypes.c_void_p()
        gpu = ctypes.c_int()
        self._ask("cuInit", 0)
        self._ask("cuDeviceGet", ctypes.byref(gpu), device)
        self._ask("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), gpu)

    def used(self) -> int:
        """Bytes in use now, which is the peak of a runtime that keeps what it took. OSError if the driver refuses."""
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
    """Bytes of main memory of this machine; 0 where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def resident() -> int:
    """Bytes of this process in main memory now; 0 where the system does not tell."""
    return _of_status("VmRSS:")


def resident_peak() -> int:
    """The most bytes that this process had in main memory; 0 where the system does not tell.

    Not `ru_maxrss`, which a process inherits from the one that started it.
    """
    return _of_status("VmHWM:")


def _of_status(word: str) -> int:
    lines = _STATUS.read_text("ascii").splitlines() if _STATUS.exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(word)), 0)
