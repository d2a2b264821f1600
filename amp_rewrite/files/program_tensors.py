"""Tensors of a program in memory, which give their bytes on demand: the sources of stubs that are not in a file."""

from __future__ import annotations

import secrets
import zlib
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError, one_line
from amp_rewrite.files.casting import Array

_SAMPLED = 1 << 10  # elements of a tensor that show a change


class ProgramTensor:
    """A tensor of onnx_ir, which may share its memory with torch or compute its values when asked.

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
        """Return the values, or the packed bytes of a sub-byte type, of any strides. They are not kept."""
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
        sample = zlib.crc32(values.flat[:: max(1, values.size // _SAMPLED)].tobytes())
        if self._sample not in (None, sample):
            raise ModelError(f"{where} has changed since the program was converted; convert it again")
        self._sample = sample
        return values


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
    """Return the tensor that a lazy one stands for."""
    import onnx_ir

    while isinstance(tensor, onnx_ir.LazyTensor):
        tensor = tensor.raw()  # numpy() would keep the values of a caching one
    return tensor


def copy_bytes(values: Array, at: int, target: memoryview) -> None:
    """Copy the bytes of an array in C order, from byte `at`, into `target`, without a copy of the whole array."""
    if values.flags.c_contiguous:
        target[:] = values.reshape(-1).view(np.uint8)[at : at + len(target)].data
        return
    size = values.itemsize
    first, last = at // size, -(-(at + len(target)) // size)
    part = np.empty(last - first, values.dtype)
    _gather(values, first, part)
    target[:] = part.view(np.uint8)[at - first * size :][: len(target)].data


def _gather(values: Array, first: int, out: Array) -> None:
    """Copy elements in C order, from number `first`, until `out` is full: whole rows at once."""
    if values.ndim == 1:
        out[:] = values[first : first + out.size]
        return
    row, at = values.size // len(values), 0
    while at < out.size:
        index, skip = divmod(first + at, row)
        rows = 0 if skip else (out.size - at) // row
        count = rows * row or min(row - skip, out.size - at)
        if rows:
            out[at : at + count].reshape(rows, *values.shape[1:])[...] = values[index : index + rows]
        else:
            _gather(values[index], skip, out[at : at + count])
        at += count
