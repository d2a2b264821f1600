"""Tensors on a device: OrtValues, bound inputs and outputs, and double-buffered state."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import MachineError, ModelError, one_line
from amp_rewrite.files.casting import Array as Array
from amp_rewrite.runtime.installation import model_errors, onnxruntime
from amp_rewrite.runtime.ports import Port

ML_DTYPES = tuple(dtype for dtype in DType if dtype is DType.BFLOAT16 or dtype.name.startswith("FLOAT8E"))
"""The element types of onnxruntime that numpy supports only with ml_dtypes."""


def ml_dtype_of(array: Array) -> DType | None:
    """Return the type of an array if it comes from ml_dtypes, else None."""
    return None if array.dtype.isbuiltin == 1 else next((d for d in ML_DTYPES if d.numpy == array.dtype), None)


def from_array(array: Any, device: str = "cpu", index: int = 0) -> Any:
    """Return an array, possibly in a type from ml_dtypes, as an OrtValue on a device.

    On the CPU, the OrtValue shares the memory of a contiguous array.
    """
    contiguous = np.asarray(array, order="C")  # ascontiguousarray would give a scalar a dimension
    dtype = ml_dtype_of(contiguous)
    if dtype is None:
        return onnxruntime().OrtValue.ortvalue_from_numpy(contiguous, device, index)
    bits = contiguous.view(f"uint{dtype.bits}")
    value = onnxruntime().OrtValue.ortvalue_from_numpy_with_onnx_type(bits, dtype.code)
    return value if device == "cpu" else copy_to(value, device, index)


def as_value(tensor: object) -> Any:
    """Return an OrtValue, an array or a DLPack tensor (torch, cupy, jax …) as an OrtValue with the same memory.

    ModelError for a tensor that DLPack cannot export, for example because it requires gradients.
    """
    value = onnxruntime().OrtValue
    if isinstance(tensor, value):
        return tensor
    if isinstance(tensor, np.ndarray) or not hasattr(tensor, "__dlpack__"):
        return from_array(tensor)  # numpy's DLPack exports neither bfloat16 nor read-only arrays
    try:
        return value.from_dlpack(tensor)
    except (BufferError, RuntimeError, TypeError, ValueError) as cause:
        reason = one_line(cause)[:200]
        raise ModelError(f"a tensor cannot be bound: {reason}; pass tensor.detach().contiguous()") from cause


def value_on(tensor: object, device: str, index: int) -> Any:
    """Return a tensor as an OrtValue on a device; the memory is shared unless it is an array or on another device."""
    if isinstance(tensor, np.ndarray):
        tensor = tensor.copy()  # on the CPU, `as_value` would share its memory, and `Binding.feed` writes to it
    value = as_value(tensor)
    number = tensor.__dlpack_device__()[1] if hasattr(tensor, "__dlpack_device__") else index
    return value if (value.device_name().lower(), number) == (device, index) else copy_to(value, device, index)


def copy_to(value: Any, device: str, index: int = 0) -> Any:
    copy = onnxruntime().OrtValue.ortvalue_from_shape_and_type(list(value.shape()), value.element_type(), device, index)
    overwrite(copy, value)
    return copy


def overwrite(value: Any, new: Any) -> None:
    """Copy `new` into an OrtValue of the same shape and type, on any device.

    Older releases of onnxruntime, such as 1.23.0, accept only arrays. With those releases, the memory is copied
    directly on the CPU, and values on a GPU in a type unknown to numpy raise MachineError.
    """
    try:
        value.update_inplace(new)
    except TypeError as cause:
        if value.device_name().lower() == new.device_name().lower() == "cpu":
            ctypes.memmove(value.data_ptr(), new.data_ptr(), _nbytes(new))
        elif (dtype := DType.of(new.element_type())) in ML_DTYPES:
            raise MachineError(f"{dtype.spelling} values on a GPU require a newer onnxruntime; update it") from cause
        else:
            value.update_inplace(new.numpy())


def _nbytes(value: Any) -> int:
    dtype = DType.of(value.element_type())
    return dtype.nbytes(math.prod(value.shape())) if dtype is not None else 0


def to_array(value: Any) -> Array:
    """Return a tensor OrtValue on any device as an array, in a type from ml_dtypes if numpy does not have it."""
    dtype = DType.of(value.element_type())
    if dtype not in ML_DTYPES:
        array: Array = value.numpy()
        return array
    on_cpu = value if value.device_name().lower() == "cpu" else copy_to(value, "cpu")
    bits = ctypes.string_at(on_cpu.data_ptr(), _nbytes(on_cpu))
    return np.frombuffer(bytearray(bits), dtype.numpy).reshape(tuple(on_cpu.shape()))


@dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """An open model's inputs and outputs on its device, created by `Runner.bind` or `Session.bind`.

    `inputs`: OrtValues by name. `given_outputs`: the OrtValues that results are written to.
    """

    outputs: tuple[str, ...]
    inputs: Mapping[str, Any]
    given_outputs: Mapping[str, Any]
    _session: Any = field(repr=False)
    _bound: Any = field(repr=False)
    _options: Any = field(repr=False)

    def feed(self, feeds: Mapping[str, object]) -> None:
        """Copy new values into the bound inputs, in place; ModelError for another name, shape or type."""
        for name, tensor in feeds.items():
            if name not in self.inputs:
                names = ", ".join(map(repr, self.inputs))
                raise ModelError(f"input {name!r} is not bound; the bound inputs are {names}")
            old, new = self.inputs[name], as_value(tensor)
            if (list(old.shape()), old.element_type()) != (list(new.shape()), new.element_type()):
                raise ModelError(
                    f"input {name!r} is bound as {_describe(old)}, not {_describe(new)}; to change it, bind again"
                )
            overwrite(old, new)

    def run(self) -> dict[str, Any]:
        """Run once; return the results by name as OrtValues on the device, with support for DLPack.

        An output bound to a tensor is written to that tensor. ModelError if onnxruntime raises an error.
        """
        with model_errors("run"):
            self._bound.synchronize_inputs()
            self._session.run_with_iobinding(self._bound, self._options)
            self._bound.synchronize_outputs()
            return dict(zip(self.outputs, self._bound.get_outputs(), strict=True))

    def arrays(self) -> dict[str, Array]:
        """Run once; return copies of the results as numpy arrays, with bfloat16 from ml_dtypes."""
        return {name: np.array(to_array(value)) for name, value in self.run().items()}


def output_value(port: Port, tensor: object, device: str) -> Any:
    """Return a tensor for an output as an OrtValue; ModelError if its device or type is wrong."""
    value = as_value(tensor)
    where = value.device_name().lower()
    if where != device:
        raise ModelError(f"output {port.name!r} is on {device}, but its tensor is on {where}; create it on {device}")
    check_type(port, value, "output")
    return value


def allocate_output(port: Port, device: str, index: int) -> Any:
    """Allocate memory for an output; ModelError if its shape is unknown."""
    dims = [d for d in port.shape or () if isinstance(d, int)]
    if port.shape is None or len(dims) != len(port.shape) or port.dtype is None:
        raise ModelError(
            f"the shape of output {port.name!r} is unknown before the run, but a CUDA graph writes to fixed addresses;"
            f" pass outputs={{{port.name!r}: tensor}}"
        )
    return onnxruntime().OrtValue.ortvalue_from_shape_and_type(dims, port.dtype.code, device, index)


def check_type(port: Port, value: Any, kind: str) -> None:
    """Raise ModelError unless a value has the type of an input or output."""
    if port.dtype is not None and value.element_type() != port.dtype.code:
        raise ModelError(f"{kind} {port.name!r} must be {port.dtype.spelling}, not {_describe(value)}; cast the tensor")


def _describe(value: Any) -> str:
    dtype = DType.of(value.element_type())
    return f"{dtype.spelling if dtype else value.data_type()}{list(value.shape())}"


Side = Literal[0, 1]
"""The index of one of the two sets in a `DoubleBuffer`."""


@dataclass(frozen=True, slots=True, eq=False)
class DoubleBuffer:
    """Two sets of named tensors on a device, created by `Runner.double_buffer`: a run reads one and writes the other.

    The owner keeps track of the current side. A run never writes to the set that it reads, so a run that fails or is
    interrupted leaves the state unchanged.
    """

    place: tuple[str, int]
    sides: tuple[Mapping[str, Any], Mapping[str, Any]] = field(repr=False)

    def put(self, side: Side, values: Mapping[str, Array]) -> None:
        """Copy values to one side; shapes and types must match."""
        for name, value in values.items():
            _fill(self.sides[side][name], value)

    def view(self, side: Side, name: str) -> Array:
        """Return a tensor as an array; on the CPU, a view, valid until a run writes to this side."""
        return to_array(self.sides[side][name])

    def arrays(self, side: Side) -> dict[str, Array]:
        return {name: np.array(self.view(side, name)) for name in self.sides[side]}


@dataclass(frozen=True, slots=True, eq=False)
class BufferedRunner:
    """An open model with its state in a `DoubleBuffer`, created by `Runner.buffered`.

    `inputs`: the inputs to feed in addition to the state. `returned`: the outputs that a run returns.
    """

    buffer: DoubleBuffer
    inputs: frozenset[str]
    returned: tuple[str, ...]
    provider: str
    _session: Any = field(repr=False)
    _bound: tuple[Any, Any] = field(repr=False)
    _fed: dict[str, tuple[Any, Any]] = field(repr=False)
    _shielded: Mapping[str, Any] = field(repr=False)

    def run(self, side: Side, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Read one side and write the other; results are valid until the next run. ModelError if the run fails."""
        bound = self._bound[side]
        with model_errors("run"):
            for name, value in self._shielded.items():
                overwrite(value, self.buffer.sides[side][name])
            for name, array in feeds.items():
                form, memory = self._fed.get(name, (None, None))
                if form != (array.shape, array.dtype):
                    if name not in self.inputs:
                        names = ", ".join(sorted(self.inputs))
                        raise ModelError(f"{name!r} is not an input; the inputs are {names}")
                    memory = memory_for(array, self.buffer.place)
                    for binding in self._bound:
                        binding.bind_ortvalue_input(name, memory)
                    # Assigned last, so that an interrupt leaves a consistent state.
                    self._fed[name] = (array.shape, array.dtype), memory
                _fill(memory, array)
            for name in self.returned:  # bound again, or onnxruntime would reuse the memory of the last results
                bound.bind_output(name)
            bound.synchronize_inputs()
            self._session.run_with_iobinding(bound)
            bound.synchronize_outputs()
            results = bound.get_outputs_as_ortvaluevector()
            values = [onnxruntime().OrtValue(results[at]) for at in range(len(self.returned))]
            return {name: to_array(value) for name, value in zip(self.returned, values, strict=True)}


def memory_for(array: Array, place: tuple[str, int]) -> Any:
    like = from_array(array)
    return onnxruntime().OrtValue.ortvalue_from_shape_and_type(list(like.shape()), like.element_type(), *place)


def _fill(value: Any, array: Array) -> None:
    if ml_dtype_of(array) is None:
        value.update_inplace(array)
    else:
        overwrite(value, from_array(array))
