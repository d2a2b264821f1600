"""Ports: the inputs and outputs of a model, by name, type and shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnx import TensorShapeProto, ValueInfoProto

from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array
from amp_rewrite.files.model import Model
from amp_rewrite.ir.schema import TENSOR, type_of_proto
from amp_rewrite.ir.versions import FIRST_IR_WITH_FREE_INITIALIZERS


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a model. `shape`: a free dimension is a name or None; None for an unknown rank.

    `dtype`: None for containers without a single type (maps). `required`: an input without a default. `extra`: an axis
    of size 1 that arrays may have here beyond the shape.
    """

    name: str
    dtype: DType | None
    container: str
    shape: tuple[int | str | None, ...] | None
    required: bool = True
    extra: int | None = None

    @property
    def dims(self) -> str:
        """Return the shape as text, "[batch, 128]", with "?" for a free dimension without a name."""
        return f"[{', '.join('?' if dim is None else str(dim) for dim in self.shape or ())}]"

    def admits(self, sizes: Sequence[int]) -> bool:
        """True if an array of these sizes fits the shape."""
        return self.shape is None or (
            len(self.shape) == len(sizes)
            and all(dim == size for dim, size in zip(self.shape, sizes, strict=True) if isinstance(dim, int))
        )

    def without_extra(self, array: Array) -> Array:
        """Return the array without the axis of size 1 that it has beyond the shape."""
        axis = self.extra
        if axis is None or self.shape is None or array.ndim != len(self.shape) + 1 or array.shape[axis] != 1:
            return array
        return array.squeeze(axis)


def input_ports(model: Model) -> tuple[Port, ...]:
    """Return the inputs of a model, in order; inputs with a default are not required."""
    graph = model.proto.graph
    filled = {t.name for t in graph.initializer} | {s.values.name for s in graph.sparse_initializer}
    defaults = model.proto.ir_version >= FIRST_IR_WITH_FREE_INITIALIZERS
    return tuple(_port(v, v.name not in filled) for v in graph.input if v.name not in filled or defaults)


def output_ports(model: Model) -> tuple[Port, ...]:
    """Return the outputs of a model, in order."""
    return tuple(_port(v, True) for v in model.proto.graph.output)


def _port(formal: ValueInfoProto, required: bool) -> Port:
    stated = type_of_proto(formal.type)
    tensor = formal.type
    while (kind := tensor.WhichOneof("value")) in ("sequence_type", "optional_type"):
        tensor = getattr(tensor, kind).elem_type
    shape = None
    if kind == "tensor_type" and tensor.tensor_type.HasField("shape"):
        shape = tuple(d.dim_value if d.dim_value > 0 else _free(d) for d in tensor.tensor_type.shape.dim)
    container = stated.container if stated else TENSOR
    return Port(formal.name, stated.dtype if stated else None, container, shape, required)


def _free(dim: TensorShapeProto.Dimension) -> int | str | None:
    """Return 0 for an empty dimension; the name or None for a free one, which some exporters write as -1."""
    return 0 if dim.HasField("dim_value") and dim.dim_value == 0 else dim.dim_param or None
