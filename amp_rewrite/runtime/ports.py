"""Inputs and outputs of models, models with fewer outputs, and the bytes or path of a model for onnxruntime."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from onnx import GraphProto, ModelProto, TensorProto, TensorShapeProto, ValueInfoProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError, advice
from amp_rewrite.files import wire
from amp_rewrite.files.casting import Array
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import all_nodes, clone, needed, refill
from amp_rewrite.files.tensors import Sources, is_pending, is_stub, materialized, nbytes, source
from amp_rewrite.ir.schema import TENSOR, type_of_proto
from amp_rewrite.ir.versions import FIRST_IR_WITH_FREE_INITIALIZERS


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a model.

    `dtype`: None for containers without a single type (maps). `shape`: the sizes, with a name or None for a free
    dimension; None if the rank is unknown. `required`: False for an input with a default. `extra`: the position of an
    additional axis of size 1 that arrays may have.
    """

    name: str
    dtype: DType | None
    container: str
    shape: tuple[int | str | None, ...] | None
    required: bool = True
    extra: int | None = None

    @property
    def dims(self) -> str:
        """The shape as text, such as "[batch, 128]", with "?" for a free dimension without a name."""
        return f"[{', '.join('?' if dim is None else str(dim) for dim in self.shape or ())}]"

    def admits(self, sizes: Sequence[int]) -> bool:
        """True if an array of these sizes matches the shape."""
        return self.shape is None or (
            len(self.shape) == len(sizes)
            and all(dim == size for dim, size in zip(self.shape, sizes, strict=True) if isinstance(dim, int))
        )

    def without_extra(self, array: Array) -> Array:
        """Return the array without the additional axis of size 1, if it has one."""
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
    return tuple(_port(v, True) for v in model.proto.graph.output)


def _port(formal: ValueInfoProto, required: bool) -> Port:
    vtype = type_of_proto(formal.type)
    tensor = formal.type
    while (kind := tensor.WhichOneof("value")) in ("sequence_type", "optional_type"):
        tensor = getattr(tensor, kind).elem_type
    shape = None
    if kind == "tensor_type" and tensor.tensor_type.HasField("shape"):
        shape = tuple(d.dim_value if d.dim_value > 0 else _free(d) for d in tensor.tensor_type.shape.dim)
    container = vtype.container if vtype else TENSOR
    return Port(formal.name, vtype.dtype if vtype else None, container, shape, required)


def _free(dim: TensorShapeProto.Dimension) -> int | str | None:
    """Return 0 for an empty dimension; the name or None for a free one, even if written as -1."""
    return 0 if dim.HasField("dim_value") and dim.dim_value == 0 else dim.dim_param or None


def submodel(model: Model, names: Sequence[str]) -> Model:
    """Return the model with only these outputs and the nodes needed for them."""
    outputs = {v.name: v for v in model.proto.graph.output}
    check_names("output", names, tuple(outputs))
    proto = clone(model.proto)
    refill(proto.graph, "output", [outputs[name] for name in dict.fromkeys(names)])
    refill(proto.graph, "node", needed(model.proto.graph.node, names))
    return Model(proto, model.path)


def written_to(graph: GraphProto) -> frozenset[str]:
    """Return the inputs a run may overwrite: BatchNormalization in training updates statistics in place."""
    names = {name for n in all_nodes(graph.node) if n.op_type == "BatchNormalization" for name in n.input[3:]}
    for node in reversed(graph.node):
        if node.op_type == "Identity" and node.output[0] in names:  # onnxruntime's optimizer removes it
            names.update(node.input)
    return frozenset(names)


def check_names(kind: str, names: Sequence[str] | Mapping[str, object], legal: tuple[str, ...]) -> None:
    """Raise ModelError for an unknown name, and suggest the closest legal one."""
    for name in names:
        if name not in legal:
            hint = advice(name, legal, f"it has {', '.join(map(repr, legal)) or 'none'}")
            raise ModelError(f"the model has no {kind} {name!r}; {hint}")


_FROM_FOLDER = "session.model_external_initializers_file_folder_path"
_MAX_MESSAGE_BYTES = 1 << 26  # of tensors in memory; a larger model is passed as a file


@contextmanager
def model_input(model: Model) -> Iterator[tuple[bytes | str, Mapping[str, str]]]:
    """Yield a model for onnxruntime, as bytes that reference weight files or as a path, and its session entries."""
    heavy = [t for t in wire.tensors(model.proto) if is_stub(t)]
    in_memory = sum(nbytes(t) for t in wire.tensors(model.proto) if not is_stub(t) or source(t).in_memory)
    if in_memory <= _MAX_MESSAGE_BYTES and not any(map(is_pending, heavy)):
        yield _message(model.proto, heavy)
        return
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "model.onnx"
        try:
            model.save(path, external_data=True)
        except ModelError as cause:
            raise ModelError(
                f"the model must be written to a temporary folder before it is opened, but this failed: {cause};"
                " set TMPDIR to a folder with more space, or save the model and load it again"
            ) from cause
        yield str(path), {}


def _message(proto: ModelProto, heavy: Sequence[TensorProto]) -> tuple[bytes, Mapping[str, str]]:
    if not heavy:
        return proto.SerializeToString(), {}
    places = [place for tensor in heavy if not (place := source(tensor)).in_memory]
    copy = clone(proto)
    with Sources() as sources:
        for tensor in wire.tensors(copy):
            if is_stub(tensor) and source(tensor).in_memory:
                tensor.CopyFrom(materialized(tensor, sources))
        for first in {(p.path, p.stamp): p for p in places}.values():
            sources.read(first, 0, 0)  # raises an error if the file has changed
    if not places:
        return copy.SerializeToString(), {}
    folder = os.path.commonpath([os.path.dirname(p.path) for p in places])  # noqa: PTH120
    for tensor in wire.tensors(copy):
        if is_stub(tensor):
            place = source(tensor)
            del tensor.external_data[:]
            where = Path(place.path).relative_to(folder).as_posix()
            for key, value in (("location", where), ("offset", place.offset), ("length", place.length)):
                tensor.external_data.add(key=key, value=str(value))
    return copy.SerializeToString(), {_FROM_FOLDER: folder}
