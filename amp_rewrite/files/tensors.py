"""The bytes of tensors: their location, and reading them in chunks.

A *stub* is a TensorProto whose bytes are in a file: data_location is EXTERNAL, and external_data contains the absolute
path, the offset, the length, and the *stamp* of the file. A stub for a tensor of a program in memory has no path, and
its stamp is the tensor's key in `PROGRAM_TENSORS`. If the element type of the bytes is not `data_type`, the stub has a
*pending cast*. It may also have a *pending scale*, a power of two. Both are applied on reading, the scale first. All of
this is in the TensorProto, so a stub can be copied, renamed and moved between models like any other tensor.
"""

from __future__ import annotations

import math
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO
from weakref import WeakValueDictionary

import numpy as np
import onnx
from onnx.numpy_helper import to_array

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError, one_line
from amp_rewrite.files.casting import Array, cast, scaled
from amp_rewrite.files.disk import open_regular

CHUNK = 1 << 18  # elements; a chunk of this size stays in the processor's cache

_VALUE_FIELDS = ("raw", "float", "double", "int32", "int64", "uint64", "string", "external")  # without "_data"
_DTYPE, _STAMP, _EXPONENT = "amp_rewrite.dtype", "amp_rewrite.stamp", "amp_rewrite.exponent"
_CHANGED = "{} has changed since the model was loaded from it; load it again"
_COPY_BYTES = 1 << 20  # bytes copied at a time


class ProgramTensor:
    """A tensor of onnx_ir, which may share its memory with torch or compute its values on demand.

    It lives as long as a `Model` has a stub of it, and its values must not change during that time. `key` cannot
    collide with the stamp of a file.
    """

    def __init__(self, tensor: Any, dtype: DType, elements: int) -> None:
        self.tensor, self.dtype, self.elements = tensor, dtype, elements
        self.key = secrets.token_hex(16)
        PROGRAM_TENSORS[self.key] = self

    def values(self) -> Array:
        """Return the bytes of the values, packed for a sub-byte type, without caching them."""
        import onnx_ir

        where, raw = f"tensor {self.tensor.name!r} of the program", self.tensor
        try:
            while isinstance(raw, onnx_ir.LazyTensor):
                raw = raw.raw()  # numpy() might cache the values
            values = np.frombuffer(raw.tobytes(), np.uint8) if self.dtype.bits < 8 else np.asarray(raw.numpy())
        except Exception as cause:  # from the tensor's library or the user's code
            why = one_line(cause)
            raise ModelError(f"{where} cannot be read: {why}; set its values, or export the program again") from cause
        needed = self.dtype.nbytes(self.elements)
        if values.nbytes != needed:
            raise ModelError(
                f"{where} has {values.nbytes} bytes, but its shape and type need {needed}; export the program again"
            )
        return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


PROGRAM_TENSORS: WeakValueDictionary[str, ProgramTensor] = WeakValueDictionary()
"""Tensors of programs by key, kept as long as a Model refers to them."""


@dataclass(frozen=True, slots=True)
class Source:
    """Location and stored type of a stub's bytes.

    `stamp` identifies the state of the file or, without a path, the program's `tensor`. `exponent`: multiply the stored
    values by 2⁻ᵉ.
    """

    path: str
    offset: int
    length: int
    dtype: DType
    stamp: str
    exponent: int = 0
    tensor: ProgramTensor | None = field(default=None, compare=False, repr=False)

    @property
    def in_memory(self) -> bool:
        return not self.path


def stamp(status: os.stat_result) -> str:
    """Return an identifier for the state of a file, which changes if the file is modified or replaced."""
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"


def is_stub(tensor: onnx.TensorProto) -> bool:
    return tensor.data_location == onnx.TensorProto.EXTERNAL


def source(tensor: onnx.TensorProto) -> Source:
    """Return the source of a stub. ModelError for external data not resolved by `Model.load`."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    try:
        return Source(
            path=entries["location"],
            offset=int(entries["offset"]),
            length=int(entries["length"]),
            dtype=DType[entries[_DTYPE]],
            stamp=entries[_STAMP],
            exponent=int(entries.get(_EXPONENT, "0")),
            tensor=None if entries["location"] else PROGRAM_TENSORS.get(entries[_STAMP]),
        )
    except KeyError as cause:
        raise ModelError(
            f"tensor {tensor.name!r} has external data that was not resolved; load the model with Model.load"
        ) from cause


def make_stub(tensor: onnx.TensorProto, source: Source) -> None:
    """Turn the tensor into a stub for this source, and drop its values."""
    drop_values(tensor)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    entries = {"location": source.path, "offset": str(source.offset), "length": str(source.length)}
    entries |= {_DTYPE: source.dtype.name, _STAMP: source.stamp}
    if source.exponent:
        entries[_EXPONENT] = str(source.exponent)
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)


def is_pending(tensor: onnx.TensorProto) -> bool:
    """True for a stub with a pending cast or scale, whose bytes are not its values."""
    if not is_stub(tensor):
        return False
    place = source(tensor)
    return place.dtype.code != tensor.data_type or place.exponent != 0


def without_values(tensor: onnx.TensorProto) -> onnx.TensorProto:
    """Return a copy of the tensor without its values or their location."""
    copy = onnx.TensorProto()
    if is_stub(tensor):
        copy.CopyFrom(tensor)
        drop_values(copy)
        return copy
    copy.dims.extend(tensor.dims)
    for name in ("data_type", "name", "doc_string"):
        value = getattr(tensor, name)
        if tensor.HasField(name) and not isinstance(value, bytes):  # text that is not UTF-8 cannot be set
            setattr(copy, name, value)
    copy.metadata_props.extend(tensor.metadata_props)
    return copy


def drop_values(tensor: onnx.TensorProto) -> None:
    for name in _VALUE_FIELDS:
        tensor.ClearField(f"{name}_data")
    tensor.ClearField("data_location")


def dtype(tensor: onnx.TensorProto) -> DType:
    kind = DType.of(tensor.data_type)
    if kind is None:
        raise ModelError(f"tensor {tensor.name!r} has the unknown element type {tensor.data_type}; upgrade amp-rewrite")
    return kind


MAX_ELEMENTS = 1 << 60
"""Maximum number of elements of a tensor or a shape, so that sizes fit into 64 bits and into floats."""


def elements(tensor: onnx.TensorProto) -> int:
    """Return the number of elements from the tensor's dims. ModelError for negative or impossibly large dims."""
    dims = tensor.dims[:]  # a list, read once
    if dims and min(dims) < 0:
        raise ModelError(f"tensor {tensor.name!r} has negative dims {dims}; export the model again")
    count: int = math.prod(dims)
    if count > MAX_ELEMENTS:
        raise ModelError(f"tensor {tensor.name!r} has more elements than fit into a file; export the model again")
    return count


def nbytes(tensor: onnx.TensorProto) -> int:
    """Return the size of the tensor's values in bytes, after the pending cast.

    For strings and unknown element types, it is the size of the TensorProto.
    """
    kind = DType.of(tensor.data_type)
    if kind is None or kind is DType.STRING:
        return int(tensor.ByteSize())
    return kind.nbytes(elements(tensor))


class Sources:
    """A reader of stubs that keeps the last file open and the values of the last program tensor in memory.

    Files are opened without following links, and only if they have not changed since the model was loaded. The bytes
    read are valid if the file has still not changed when it is closed. `confirm` checks this, as does leaving the
    context without an error.
    """

    def __init__(self) -> None:
        self._open: tuple[str, str, BinaryIO] | None = None
        self._values: tuple[ProgramTensor, Array] | None = None

    def __enter__(self) -> Sources:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, at: object) -> None:
        try:
            if kind is None:
                self.confirm()
        finally:
            if self._open is not None:
                self._open[2].close()

    def confirm(self) -> None:
        """Raise ModelError if the open file has changed since the model was loaded: its bytes may be inconsistent."""
        if self._open is not None:
            path, state, file = self._open
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or stamp(status) != state:
                self._open = None
                file.close()
                raise ModelError(_CHANGED.format(path))

    def read(self, source: Source, at: int, count: int) -> Array:
        """Return a copy of `count` bytes of a source, starting at byte `at`."""
        if source.in_memory:
            if source.tensor is None:
                raise ModelError("the program with the weights was deleted; keep the Model loaded from it")
            if self._values is None or self._values[0] is not source.tensor:
                self._values = None  # frees the memory before the next tensor is read
                self._values = source.tensor, source.tensor.values()
            return self._values[1][at : at + count].copy()
        out: Array = np.empty(count, np.uint8)
        try:
            if self._open is None or self._open[:2] != (source.path, source.stamp):
                if self._open is not None:
                    with self._open[2]:
                        self.confirm()
                    self._open = None
                self._open = source.path, source.stamp, open_regular(source.path, follow=False, buffering=0)
                self.confirm()
            file, done = self._open[2], 0
            file.seek(source.offset + at)
            while done < count:
                more = file.readinto(out[done:].data)  # type: ignore[attr-defined]
                if not more:
                    raise ModelError(_CHANGED.format(source.path))
                done += more
        except OSError as cause:
            raise ModelError(f"cannot read {source.path}: {cause.strerror}") from cause
        return out


def chunks(tensor: onnx.TensorProto, count: int, sources: Sources) -> Iterator[Array]:
    """Yield the tensor's values in order, as flat arrays of at most `count` elements, after the pending cast.

    The caller may overwrite the arrays of a stub.
    """
    place = source(tensor) if is_stub(tensor) else None
    if place is None or place.dtype.bits < 8:
        flat = array(tensor, sources).reshape(-1)
        yield from (flat[at : at + count] for at in range(0, flat.size, count))
        return
    size, kind, pending = elements(tensor), dtype(tensor), is_pending(tensor)
    for at in range(0, size, count):
        content = sources.read(place, place.dtype.nbytes(at), place.dtype.nbytes(min(count, size - at)))
        values = content.view(place.dtype.numpy)
        if place.exponent:
            values = scaled(values, place.exponent)
        yield cast(values, kind) if pending else values


def array(tensor: onnx.TensorProto, sources: Sources) -> Array:
    """Return the tensor's values after the pending cast."""
    if not is_stub(tensor):
        return in_memory(tensor)
    place = source(tensor)
    if place.dtype.bits < 8:
        packed = without_values(tensor)
        packed.raw_data = sources.read(place, 0, place.length).tobytes()
        return in_memory(packed)
    out: Array = np.empty(elements(tensor), dtype(tensor).numpy)
    for number, chunk in enumerate(chunks(tensor, CHUNK, sources)):
        out[number * CHUNK :][: chunk.size] = chunk
    return out.reshape(tuple(tensor.dims))


def in_memory(tensor: onnx.TensorProto) -> Array:
    """Return the values of a tensor other than a stub. ModelError if they do not match its dims and type."""
    try:
        values: Array = to_array(tensor)
    except (ValueError, TypeError, KeyError) as cause:
        raise ModelError(f"tensor {tensor.name!r} cannot be read: {cause}; export the model again") from cause
    return values


def payload(tensor: onnx.TensorProto, sources: Sources) -> Iterator[bytes | memoryview]:
    """Yield the bytes of the tensor's values in pieces, after the pending cast. Not for strings."""
    if not is_stub(tensor):
        yield tensor.raw_data if tensor.HasField("raw_data") else in_memory(tensor).tobytes()
        return
    if is_pending(tensor):
        yield from (chunk.view(np.uint8).data for chunk in chunks(tensor, CHUNK, sources))
        return
    place = source(tensor)
    for at in range(0, place.length, _COPY_BYTES):
        yield sources.read(place, at, min(_COPY_BYTES, place.length - at)).data


def materialized(tensor: onnx.TensorProto, sources: Sources) -> onnx.TensorProto:
    """Return the tensor of a stub, with its values in memory."""
    out = without_values(tensor)
    out.raw_data = b"".join(map(bytes, payload(tensor, sources)))
    return out
