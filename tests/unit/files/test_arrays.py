"""Tensors of types that numpy lacks, the same with every version of onnx."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from amp_rewrite.dtypes import DType
from amp_rewrite.files.arrays import dtype_of, from_array, to_array

STRANGE = [DType.BFLOAT16, DType.FLOAT8E4M3FN, DType.FLOAT8E5M2]


@pytest.mark.parametrize("dtype", [*STRANGE, DType.FLOAT16, DType.FLOAT, DType.INT64, DType.BOOL])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_an_array_comes_back_from_a_tensor_bit_for_bit(dtype: DType, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype.numpy)
    tensor = from_array(array, "w")
    assert (tensor.name, tensor.data_type, tuple(tensor.dims)) == ("w", dtype.code, shape)
    assert tensor.raw_data == array.tobytes()
    assert dtype_of(array) is dtype
    read = to_array(tensor)
    assert (read.dtype, read.shape, read.tobytes()) == (array.dtype, array.shape, array.tobytes())


@pytest.mark.parametrize("dtype", STRANGE)
def test_bits_in_the_field_of_integers_are_read_as_those_in_bytes(dtype: DType) -> None:
    array = np.array([1, -2, 0.5], dtype.numpy)
    bits = array.view(f"u{dtype.bits // 8}").tolist()
    tensor = TensorProto(dims=[3], data_type=dtype.code, int32_data=bits)
    assert to_array(tensor).tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", STRANGE)
def test_values_that_do_not_fit_the_dims_are_an_error(dtype: DType) -> None:
    with pytest.raises(ValueError, match="reshape"):
        to_array(TensorProto(dims=[4], data_type=dtype.code, raw_data=b"\0" * 2))
