"""The GPUs of this machine, their driver, and the main memory.

The driver is called through `ctypes`, with a replaceable loader, so tests do not need a GPU."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from amp_rewrite.dtypes import DType

Loader = Callable[[str], Any]
"""A function that loads a shared library by name or path, like `ctypes.CDLL`; OSError if it is missing."""

# The lowest CUDA compute capability with tensor cores for each type: Volta, and Ampere for bfloat16.
# CUDA C++ Programming Guide, "Compute Capabilities", tensor core input types.
MIN_CAPABILITY: Mapping[DType, tuple[int, int]] = {DType.FLOAT16: (7, 0), DType.BFLOAT16: (8, 0)}

DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
# CUdevice_attribute values of the CUDA driver API.
_MAJOR, _MINOR = 75, 76
_NAME_BYTES = 96  # longer than any name
# Messages for the CUresult codes of the CUDA driver API that have a remedy.
_MESSAGES = {
    100: "the NVIDIA driver does not find a GPU; check CUDA_VISIBLE_DEVICES and the devices of the container",
    802: "the GPUs are not yet initialized; start nvidia-fabricmanager",
    803: "the NVIDIA driver's library and its kernel module have different versions; restart the machine",
    804: "the NVIDIA driver is too old for the installed CUDA compatibility package; update the driver",
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU: its name, CUDA compute capability, and memory in bytes (None if unknown)."""

    name: str
    capability: tuple[int, int]
    memory: int | None = None

    def __str__(self) -> str:
        return f"{self.name}, compute capability {self.capability[0]}.{self.capability[1]}"


@dataclass(frozen=True, slots=True)
class Hardware:
    """The GPUs visible to CUDA programs, in CUDA's order.

    `cuda`: the newest CUDA version that the driver supports; None if unknown. `unavailable_reason`: why there is no
    GPU; None if there is one.
    """

    gpus: tuple[Gpu, ...] = ()
    cuda: tuple[int, int] | None = None
    unavailable_reason: str | None = None


def hardware(load: Loader = ctypes.CDLL) -> Hardware:
    """Initialize the driver, and return the hardware visible to CUDA programs, subject to CUDA_VISIBLE_DEVICES."""
    try:
        library = load(DRIVER)
    except OSError:
        return Hardware(unavailable_reason=f"no NVIDIA driver is installed here: {DRIVER} cannot be loaded")
    version = _query(library.cuDriverGetVersion)
    cuda = divmod(version // 10, 100) if version else None  # 13020 is 13.2
    if code := library.cuInit(0):
        failure = f"the NVIDIA driver failed to initialize (cuInit returned {code}); run nvidia-smi to check it"
        return Hardware((), cuda, _MESSAGES.get(code, failure))
    gpus = tuple(_gpu(library, index) for index in range(_query(library.cuDeviceGetCount)))
    return Hardware(gpus, cuda, None if gpus else _MESSAGES[100])


def _gpu(library: Any, index: int) -> Gpu:
    device = ctypes.c_int(_query(library.cuDeviceGet, index))
    name = ctypes.create_string_buffer(_NAME_BYTES)
    library.cuDeviceGetName(name, _NAME_BYTES, device)
    memory = ctypes.c_size_t()
    succeeded = library.cuDeviceTotalMem_v2(ctypes.byref(memory), device) == 0
    major, minor = (_query(library.cuDeviceGetAttribute, kind, device) for kind in (_MAJOR, _MINOR))
    return Gpu(name.value.decode(errors="replace"), (major, minor), memory.value if succeeded else None)


def _query(function: Any, *arguments: Any) -> int:
    number = ctypes.c_int()
    return number.value if function(ctypes.byref(number), *arguments) == 0 else 0


def why_not_fast(machine: Hardware, to: DType, device: int = 0) -> str | None:
    """Return the reason for a low type not to be fast on a GPU; None if it is."""
    if not machine.gpus:
        return f"{machine.unavailable_reason}; on a CPU, {to.spelling} is slower, not faster"
    if device >= len(machine.gpus):
        return f"there is no GPU {device}; the last GPU of this machine is number {len(machine.gpus) - 1}"
    gpu, (major, minor) = machine.gpus[device], MIN_CAPABILITY[to]
    if gpu.capability >= (major, minor):
        return None
    return f"{to.spelling} is only fast on GPUs with compute capability {major}.{minor} or higher; this one is {gpu}"


def main_memory() -> int:
    """Return the size of this machine's memory in bytes; 0 if unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not on Windows
        return 0
