"""Tensors of a program in memory, with bytes on demand: the sources of stubs outside of files."""

from __future__ import annotations

import secrets
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError, one_line
from amp_rewrite.files.casting import Array


class ProgramTensor:
    """A tensor of onnx_ir. It may share its memory with torch or compute its values when asked.

    It lives as long as a `Model` with a stub of it, and is found by `key`, which cannot collide with the stamp of a
    file. Its values must not change meanwhile.
    """

    def __init__(self, tensor: Any, dtype: DType, elements: int) -> None:
        self.tensor, self.dtype, self.elements = tensor, dtype, elements
        self.key = secrets.token_hex(16)
        _ALIVE[self.key] = self

    def values(self) -> Array:
        """Return the bytes of the values in order, packed for a sub-byte type. They are not kept."""
        where = f"tensor {self.tensor.name!r} of the program"
        try:
            raw = _raw(self.tensor)
            values = np.frombuffer(raw.tobytes(), np.uint8) if self.dtype.bits < 8 else np.asarray(raw.numpy())
        except Exception as cause:  # of the library that holds the tensor, or of a function of the user
            words = one_line(cause)
            raise ModelError(f"{where} cannot be read: {words}; give it values, or export the program again") from cause
        needed = self.dtype.nbytes(self.elements)
        if values.nbytes != needed:
            raise ModelError(
                f"{where} has {values.nbytes} bytes, but its shape and type need {needed}; export the program again"
            )
        return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


_ALIVE: WeakValueDictionary[str, ProgramTensor] = WeakValueDictionary()


def held(key: str) -> ProgramTensor | None:
    """Return the tensor of a key; None for the stamp of a file, and once no Model refers to the tensor."""
    return _ALIVE.get(key)


def any_held() -> bool:
    """True if any tensor of a program is held."""
    return bool(_ALIVE)


def _raw(tensor: Any) -> Any:
    import onnx_ir

    while isinstance(tensor, onnx_ir.LazyTensor):
        tensor = tensor.raw()  # numpy() would keep the values of a caching one
    return tensor
