"""A fake NVIDIA driver."""

import ctypes
from typing import Any

from amp_rewrite.runtime.gpu import Gpu

H200 = Gpu("NVIDIA H200", (9, 0), 150 << 30)
P100 = Gpu("Tesla P100", (6, 0), 16 << 30)


class Driver:
    """The functions of libcuda that this package calls."""

    def __init__(self, *gpus: Gpu, version: int = 13020, status: int = 0) -> None:
        self.gpus, self.version, self.status = gpus, version, status

    def cuDriverGetVersion(self, out: Any) -> int:
        out._obj.value = self.version
        return 0

    def cuInit(self, flags: int) -> int:
        assert flags == 0
        return self.status

    def cuDeviceGetCount(self, out: Any) -> int:
        out._obj.value = len(self.gpus)
        return 0

    def cuDeviceGet(self, out: Any, index: int) -> int:
        out._obj.value = 10 + index  # a handle is not an index
        return 0

    def cuDeviceGetName(self, buffer: Any, size: int, device: ctypes.c_int) -> int:
        buffer.value = self.gpus[device.value - 10].name.encode()[: size - 1]
        return 0

    def cuDeviceTotalMem_v2(self, out: Any, device: ctypes.c_int) -> int:
        memory = self.gpus[device.value - 10].memory
        out._obj.value = memory or 0
        return 0 if memory else 1

    def cuDeviceGetAttribute(self, out: Any, attribute: int, device: ctypes.c_int) -> int:
        out._obj.value = self.gpus[device.value - 10].capability[{75: 0, 76: 1}[attribute]]
        return 0


class Loader:
    """A library loader that only finds the driver."""

    def __init__(self, driver: Driver | None = None) -> None:
        self.libraries: dict[str, Any] = {"libcuda.so.1": driver}

    def __call__(self, name: str) -> Any:
        found = self.libraries.get(name)
        if found is None:
            raise OSError(f"{name}: cannot open shared object file")
        return found
