"""Model configurations of the Triton Inference Server, `config.pbtxt`, from the types and shapes of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError, PolicyError
from amp_rewrite.files.model import Model, ModelSource
from amp_rewrite.ir.schema import TENSOR
from amp_rewrite.runtime.ports import Port, input_ports, output_ports

BATCH = 4
"""The largest batch by default: that of Triton's server where it completes a configuration itself."""

_TYPES = {
    DType.BOOL: "TYPE_BOOL",
    DType.UINT8: "TYPE_UINT8",
    DType.UINT16: "TYPE_UINT16",
    DType.UINT32: "TYPE_UINT32",
    DType.UINT64: "TYPE_UINT64",
    DType.INT8: "TYPE_INT8",
    DType.INT16: "TYPE_INT16",
    DType.INT32: "TYPE_INT32",
    DType.INT64: "TYPE_INT64",
    DType.FLOAT16: "TYPE_FP16",
    DType.FLOAT: "TYPE_FP32",
    DType.DOUBLE: "TYPE_FP64",
    DType.STRING: "TYPE_STRING",
    DType.BFLOAT16: "TYPE_BF16",
}
_Dims = tuple[int | str, ...]


def triton_config(model: ModelSource, *, name: str | None = None, max_batch_size: int | None = None) -> str:
    """Return the configuration of a model for Triton's onnxruntime backend, as the text of `config.pbtxt`.

    A model is batched if the first dimension of each input has the same name and no other dimension has it, and the
    first dimension of each output is symbolic, too. `dims` are then without it; other symbolic dimensions are -1.

    Args:
        model: the converted model, as `amp_rewrite.convert` takes it.
        name: the name of the model, which is that of its folder in the repository of the server; by default that of
            the file, else that of the graph.
        max_batch_size: the largest batch, or 0 for none; by default 4 for a model that can be batched, else 0.

    Raises:
        ModelError: an input or output has a type that Triton lacks, or no shape.
        PolicyError: a batch is asked for, and the model has no dimension for it.

    Example:
        >>> from amp_rewrite.integrations.triton import triton_config
        >>> print(triton_config("model.onnx", name="digits").splitlines()[0])
        name: "digits"
    """
    loaded = Model.load(model)
    ports = {"input": [port for port in input_ports(loaded) if port.required], "output": output_ports(loaded)}
    dims = {kind: [_dims(kind, port) for port in group] for kind, group in ports.items()}
    batched = _batched(dims["input"], dims["output"])
    if max_batch_size and not batched:
        raise PolicyError(
            f"max_batch_size {max_batch_size} needs a batch: one symbolic dimension that comes first in all inputs and"
            " outputs, and nowhere else; export the model with one, or use 0"
        )
    size = max_batch_size if max_batch_size is not None else BATCH if batched else 0
    if size < 0:
        raise PolicyError(f"invalid max_batch_size {size}; use 0 or more")
    file = Path(model) if isinstance(model, (str, PathLike)) else None
    lines = [f"name: {_quoted(name or (file.stem if file else loaded.proto.graph.name))}", 'backend: "onnxruntime"']
    lines.append(f"max_batch_size: {size}")
    if file is not None and file.name != "model.onnx":  # the name that Triton expects by itself
        lines.append(f"default_model_filename: {_quoted(file.name)}")
    for kind, group in ports.items():
        entries = []
        for port, shape in zip(group, dims[kind], strict=True):
            fields = (f"    {line}" for line in _fields(kind, port, shape[1:] if size else shape))
            entries.append("\n".join(["  {", *fields, "  }"]))
        lines += [f"{kind} [", ",\n".join(entries), "]"]
    return "\n".join(lines) + "\n"


def _dims(kind: str, port: Port) -> _Dims:
    """Return the dimensions of an input or output: numbers, or names, which are unique where the model has none."""
    if port.container != TENSOR:
        raise ModelError(
            f"{kind} {port.name!r} is a {port.container}, and Triton takes tensors alone; change the model"
        )
    if port.shape is None:
        raise ModelError(f"{kind} {port.name!r} has no shape, and Triton needs its rank; state it in the model")
    return tuple(f"{port.name}\0{at}" if dim is None else dim for at, dim in enumerate(port.shape))


def _batched(inputs: Sequence[_Dims], outputs: Sequence[_Dims]) -> bool:
    every = (*inputs, *outputs)
    if not inputs or not all(dims and isinstance(dims[0], str) for dims in every):
        return False
    first = {dims[0] for dims in inputs}
    return len(first) == 1 and not any(first & set(dims[1:]) for dims in every)


def _fields(kind: str, port: Port, dims: _Dims) -> Iterator[str]:
    if port.dtype not in _TYPES:
        known = port.dtype.spelling if port.dtype else "unknown"
        raise ModelError(f"{kind} {port.name!r} has type {known}, which Triton lacks; cast it in the model")
    yield f"name: {_quoted(port.name)}"
    yield f"data_type: {_TYPES[port.dtype]}"
    yield f"dims: [ {', '.join('-1' if isinstance(dim, str) else str(dim) for dim in dims) or '1'} ]"
    if not dims:  # dims must not be empty
        yield "reshape: { shape: [ ] }"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
