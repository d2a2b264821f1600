"""Tensors of a program in memory, with bytes on demand: the sources of stubs outside of files."""

from __future__ import annotations

import secrets
import zlib
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError, one_line
from amp_rewrite.files.casting import Array

_SAMPLED = 1 << 12  # bytes of a tensor that show a change


class ProgramTensor:
    """A tensor of onnx_ir. It may share its memory with torch or compute its values when asked.

    It lives as long as a `Model` with a stub of it, and is found by `key`, which cannot collide with the stamp of a
    file. Its values must not change meanwhile: `values` compares a sample of them with that of the first time.
    """

    def __init__(self, tensor: Any, dtype: DType, elements: int) -> None:
        self.tensor, self.dtype, self.elements = tensor, dtype, elements
        self.key = secrets.token_hex(16)
        self._sample: int | None = None
        _ALIVE[self.key] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.key, self.__dict__)

    def __deepcopy__(self, _memo: object) -> ProgramTensor:
        return self

    def values(self) -> Array:
        """Return the bytes of the values in order, packed for a sub-byte type. They are not kept."""
        where = f"tensor {self.tensor.name!r} of the program"
        try:
            raw = _raw(self.tensor)
            found = str(raw.dtype), tuple(raw.shape.numpy())
            values = np.frombuffer(raw.tobytes(), np.uint8) if self.dtype.bits < 8 else np.asarray(raw.numpy())
        except Exception as cause:  # of the library that holds the tensor, or of a function of the user
            words = one_line(cause)
            raise ModelError(f"{where} cannot be read: {words}; give it values, or export the program again") from cause
        needed = self.dtype.nbytes(self.elements)
        if values.nbytes != needed:
            raise ModelError(
                f"{where} has {values.nbytes} bytes, but its shape and type need {needed}; export the program again"
            )
        stated = str(self.tensor.dtype), tuple(self.tensor.shape.numpy())
        if found != stated:
            (kind, shape), (other, needs) = found, stated
            raise ModelError(
                f"{where} is {kind} of shape {shape}, but the program states {other} of shape {needs}; export it again"
            )
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        sample = zlib.crc32(flat[:: max(1, flat.size // _SAMPLED)].tobytes())
        if self._sample not in (None, sample):
            raise ModelError(f"{where} has changed since the program was converted; convert it again")
        self._sample = sample
        return flat


_ALIVE: WeakValueDictionary[str, ProgramTensor] = WeakValueDictionary()


def held(key: str) -> ProgramTensor | None:
    """Return the tensor of a key; None for the stamp of a file, and once no Model refers to the tensor."""
    return _ALIVE.get(key)


def _restored(key: str, state: dict[str, Any]) -> ProgramTensor:
    """Return the tensor of a key, made again from its state in another process."""
    if (found := held(key)) is None:
        found = ProgramTensor.__new__(ProgramTensor)
        found.__dict__.update(state)
        _ALIVE[key] = found
    return found


def any_held() -> bool:
    """True if any tensor of a program is held."""
    return bool(_ALIVE)


def _raw(tensor: Any) -> Any:
    import onnx_ir

    while isinstance(tensor, onnx_ir.LazyTensor):
        tensor = tensor.raw()  # numpy() would keep the values of a caching one
    return tensor
