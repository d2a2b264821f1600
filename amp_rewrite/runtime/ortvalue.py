"""onnxruntime's own values, to and from arrays and other libraries' tensors. `ort` is always onnxruntime itself."""

from __future__ import annotations

import ctypes
import math
from functools import cache
from typing import Any

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import MachineError, ModelError, one_line
from amp_rewrite.files.casting import Array as Array

STRANGE = tuple(dtype for dtype in DType if dtype is DType.BFLOAT16 or dtype.name.startswith("FLOAT8E"))
"""Types of onnxruntime that numpy lacks."""
_STRANGE_BY_CODE = {dtype.code: dtype for dtype in STRANGE}
_DEVICES = {1: "cpu", 2: "cuda", 3: "cuda"}  # DLDeviceType of DLPack; 3 is host memory that CUDA has pinned


@cache
def _strange_by_dtype() -> dict[np.dtype[Any], DType]:
    return {dtype.numpy: dtype for dtype in STRANGE}


def strange_of(array: Array) -> DType | None:
    """Return the type of an array if numpy lacks it; else None."""
    return None if array.dtype.isbuiltin == 1 else _strange_by_dtype().get(array.dtype)


def from_array(ort: Any, array: Any, device: str = "cpu", index: int = 0) -> Any:
    """Return an OrtValue on a device. On the CPU it shares memory with a contiguous array. bfloat16 and float8 are
    those of ml_dtypes."""
    own = np.asarray(array, order="C")  # ascontiguousarray would give a single number a dimension
    strange = strange_of(own)
    if strange is None:
        return ort.OrtValue.ortvalue_from_numpy(own, device, index)
    bits = own.view(f"uint{strange.bits}")
    here = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, strange.code)
    return here if device == "cpu" else copied(ort, here, device, index)


def from_tensor(ort: Any, tensor: Any, device: str, index: int) -> Any:
    """Return an OrtValue of a DLPack tensor (torch, cupy, jax …): the same memory if on the device, else a copy.

    ModelError for a tensor that DLPack cannot export: one that requires gradients or is not contiguous.
    """
    try:
        kind, at = tensor.__dlpack_device__()
        value = ort.OrtValue.from_dlpack(tensor)
    except (BufferError, RuntimeError, TypeError, ValueError) as cause:
        reason = one_line(cause)[:200]
        raise ModelError(f"a tensor cannot be bound: {reason}; pass tensor.detach().contiguous()") from cause
    same = _DEVICES.get(int(kind)) == device and (device == "cpu" or at == index)
    return value if same else copied(ort, value, device, index)


def copied(ort: Any, value: Any, device: str, index: int = 0) -> Any:
    """Copy an OrtValue to a device."""
    fresh = ort.OrtValue.ortvalue_from_shape_and_type(list(value.shape()), value.element_type(), device, index)
    overwrite(fresh, value)
    return fresh


def overwrite(value: Any, new: Any) -> None:
    """Copy an OrtValue into another one of its shape and type, on any device.

    Older releases of onnxruntime (1.23.0) copy only arrays into one, so memory of the CPU is copied here. MachineError
    for values that numpy lacks, on a GPU, with such a release.
    """
    try:
        value.update_inplace(new)
    except TypeError as cause:
        if value.device_name().lower() == new.device_name().lower() == "cpu":
            ctypes.memmove(value.data_ptr(), new.data_ptr(), _nbytes(new))
        elif new.element_type() in _STRANGE_BY_CODE:
            spelling = _STRANGE_BY_CODE[new.element_type()].spelling
            raise MachineError(f"{spelling} values on a GPU need a newer onnxruntime; update it") from cause
        else:
            value.update_inplace(new.numpy())


def _nbytes(value: Any) -> int:
    """Return the size of a tensor; strings have none."""
    dtype = DType.of(value.element_type())
    return dtype.nbytes(math.prod(value.shape())) if dtype is not None else 0


def to_array(ort: Any, value: Any) -> Array:
    """Return the values of a tensor OrtValue on any device; bfloat16 is that of ml_dtypes."""
    strange = _STRANGE_BY_CODE.get(value.element_type())
    if strange is None:
        array: Array = value.numpy()
        return array
    here = value if value.device_name().lower() == "cpu" else copied(ort, value, "cpu")
    bits = ctypes.string_at(here.data_ptr(), _nbytes(here))
    return np.frombuffer(bytearray(bits), strange.numpy).reshape(tuple(here.shape()))
