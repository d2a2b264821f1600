"""Tensors from arrays and arrays from tensors: types that numpy lacks are those of ml_dtypes, with any version of onnx.

onnx does so itself from 1.19 on. Before, it reads such values into wider types, and takes none of ml_dtypes.
"""

from __future__ import annotations

import sys

import numpy as np
import onnx.helper
from onnx import TensorProto
from onnx.numpy_helper import from_array as _from_array
from onnx.numpy_helper import to_array as _to_array

from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array


def dtype_of(array: Array) -> DType:
    """Return the element type of an array."""
    if array.dtype.isbuiltin == 1:
        return DType(onnx.helper.np_dtype_to_tensor_dtype(array.dtype))
    return DType.parse(array.dtype)


def from_array(array: Array, name: str | None = None) -> TensorProto:
    """Return a tensor with the values of an array."""
    if array.dtype.isbuiltin == 1 or dtype_of(array).bits < 8:
        return _from_array(array, name)
    tensor = TensorProto(dims=array.shape, data_type=dtype_of(array).code)
    if name:
        tensor.name = name
    little = array.byteswap() if sys.byteorder == "big" else array
    tensor.raw_data = little.tobytes()
    return tensor


def to_array(tensor: TensorProto) -> Array:
    """Return the values of a tensor in memory.

    ValueError, TypeError or KeyError if they do not fit its type and dims.
    """
    kind = DType.of(tensor.data_type)
    if kind in (None, DType.STRING) or kind.numpy.isbuiltin == 1:
        values: Array = _to_array(tensor)
        return values
    if kind.bits < 8:
        return _to_array(tensor).astype(kind.numpy)  # before 1.19 from bytes, which hold every value
    if tensor.HasField("segment"):
        raise ValueError("Currently not supporting loading segments.")
    unsigned = f"<u{kind.bits // 8}"
    bits = np.frombuffer(tensor.raw_data, unsigned) if tensor.HasField("raw_data") else np.array(tensor.int32_data)
    held: Array = bits.astype(unsigned[1:]).view(kind.numpy).reshape(tuple(tensor.dims))
    return held
