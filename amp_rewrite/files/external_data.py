"""Tensors outside a model file: external data in its folder, and programs of torch or onnx_ir in memory."""

from __future__ import annotations

import copy
import os
import re
import secrets
import stat
from collections.abc import Callable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import onnx
from onnx import ModelProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError, one_line
from amp_rewrite.files.protos import clone
from amp_rewrite.files.tensors import ProgramTensor, Source, dtype, elements, stamp

_NUMBER = re.compile(r"[0-9]{1,19}", re.ASCII)


class Folder:
    """The folder of a model's external data. `also`: the folder of the real file, for a model opened by a link."""

    def __init__(self, folder: Path, also: Path | None = None) -> None:
        self.path = folder
        self._roots = tuple(Path(os.path.realpath(p)) for p in (folder, also) if p is not None)
        self._files: dict[str, tuple[str, int, str]] = {}

    def source(self, tensor: onnx.TensorProto) -> Source:
        """Return the source of a tensor with external data.

        ModelError with the tensor's name if the location is outside the folder (an absolute path, "..", a link), is
        missing or is not a regular file, or if the byte count does not match the tensor's dims and type or exceeds the
        size of the file.
        """
        entries = {entry.key: entry.value for entry in tensor.external_data}
        where = f"external data of tensor {tensor.name!r}"
        if any(isinstance(text, bytes) for entry in entries.items() for text in entry):
            raise ModelError(f"{where}: its description is not UTF-8, so the file is damaged; export the model again")
        location = entries.get("location", "")
        if location not in self._files:
            self._files[location] = self._file(location, where)
        path, size, file_stamp = self._files[location]
        kind = dtype(tensor)
        if kind is DType.STRING:
            raise ModelError(f"{where}: strings cannot be external; export the model again")
        needed = kind.nbytes(elements(tensor))
        offset = _number(entries.get("offset", "0"), "offset", where)
        length = _number(entries["length"], "length", where) if "length" in entries else needed
        if length != needed:
            raise ModelError(
                f"{where} is {length} bytes long, but its dims {list(tensor.dims)} of {kind.spelling} need"
                f" {needed}; export the model again"
            )
        if offset + length > size:
            raise ModelError(
                f"{where} needs bytes {offset} to {offset + length} of {location!r}, which has only {size};"
                " copy the file again"
            )
        return Source(path, offset, length, kind, file_stamp)

    def _file(self, location: str, where: str) -> tuple[str, int, str]:
        if not location or "\0" in location:
            raise ModelError(f"{where} has the location {location!r}, which is not a file name; export the model again")
        paths = PurePosixPath(location), PureWindowsPath(location)
        if any(path.anchor or ".." in path.parts for path in paths):
            raise ModelError(
                f"{where} has the location {location!r}, which is outside the model's folder; move"
                " the file into the folder, and set the location to its name"
            )
        real = Path(os.path.realpath(self.path / location))
        if not any(real.is_relative_to(root) for root in self._roots):
            raise ModelError(f"{where}: {location!r} links to a file outside the model's folder; move the file there")
        try:
            status = real.stat()
        except OSError as cause:
            raise ModelError(
                f"{where}: cannot read {self.path / location}: {cause.strerror}; put the file next to the model"
            ) from cause
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{where}: {self.path / location} is not a regular file; replace it with one")
        return str(real), status.st_size, stamp(status)


def _number(text: str, key: str, where: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise ModelError(f"{where} has the {key} {text!r}, which is not a byte count; export the model again")
    return int(text)


# -- programs of torch and onnx_ir ------------------------------------------------------------------------------------


def load_program(source: object, folder: Path | None) -> tuple[ModelProto, dict[str, Source]]:
    """Return the proto of a torch ONNXProgram or an onnx_ir.Model, and the sources of its stubs by location.

    Torch is not imported, and the program is not changed. `folder`: the folder of external data, which is then resolved
    later; by default, each tensor knows its own folder.
    """
    model: Any = next((m for m in (source, getattr(source, "model", None)) if _is_onnx_ir(m)), None)
    if model is None:
        raise ModelError(
            f"cannot load a model from {type(source).__qualname__}; pass a path, bytes, a ModelProto, an ONNXProgram,"
            " an onnx_ir.Model, or a result of convert or repair"
        )
    import onnx_ir

    stubs = _Stubs(folder)
    try:
        model = model.clone()  # the program must not change
        map_tensors(model, stubs.stub)
        proto = onnx_ir.serde.serialize_model(model)
    except onnx_ir.serde.SerdeError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = one_line(cause)
        raise ModelError(f"onnx_ir cannot convert the program to a ModelProto: {reason}; export it again") from error
    assert isinstance(proto, ModelProto)
    return proto, stubs.sources


def _is_onnx_ir(model: object) -> bool:
    return type(model).__module__.partition(".")[0] == "onnx_ir" and hasattr(model, "graph")


def map_tensors(model: Any, new: Callable[[Any], Any]) -> None:
    """Replace all tensors of an onnx_ir model in place, including those in attributes, bodies and functions."""
    import onnx_ir

    def replace(attributes: Any) -> None:
        for name, a in list(attributes.items()):
            kind = onnx_ir.AttributeType.UNDEFINED if a.is_ref() else a.type
            if kind == onnx_ir.AttributeType.TENSOR:
                attributes[name] = onnx_ir.AttrTensor(name, new(a.value), doc_string=a.doc_string)
            elif kind == onnx_ir.AttributeType.TENSORS:
                attributes[name] = onnx_ir.AttrTensors(name, list(map(new, a.value)), doc_string=a.doc_string)

    graphs = [model.graph, *model.graph.subgraphs()]
    for function in model.functions.values():
        replace(function.attributes)
        graphs += [function, *function.subgraphs()]
    for graph in graphs:
        for value in getattr(graph, "initializers", {}).values():
            if value.const_value is not None:
                value.const_value = new(value.const_value)
        for node in graph:
            replace(node.attributes)


class _Stubs:
    """Stubs for the tensors of a program, and the source of each by location."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.sources: dict[str, Source] = {}
        self._secret = secrets.token_hex(16)  # cannot collide with a location of external data
        self._folders: dict[str, Folder] = {}
        self._keys: dict[int, tuple[object, str]] = {}  # the tensor is kept so that its id is not reused

    def stub(self, tensor: Any) -> Any:

        import onnx_ir

        kind, external = DType.of(tensor.dtype.value), isinstance(tensor, onnx_ir.ExternalTensor)
        if isinstance(tensor, onnx_ir.serde.TensorProtoTensor):
            proto = tensor.raw
            if not proto.HasField("raw_data") or proto.HasField("segment") or kind in (None, DType.STRING):
                return onnx_ir.serde.TensorProtoTensor(clone(proto))
        elif kind in (None, DType.STRING) or (external and (self.folder or not os.fspath(tensor.base_dir))):
            return copy.copy(tensor)
        if id(tensor) not in self._keys:
            key = f"{self._secret}.{len(self.sources)}"
            self.sources[key] = self._source(tensor, kind)
            self._keys[id(tensor)] = tensor, key
        return onnx_ir.ExternalTensor(
            self._keys[id(tensor)][1],
            None,
            None,
            tensor.dtype,
            shape=onnx_ir.Shape(tensor.shape.numpy()),
            name=tensor.name,
            doc_string=tensor.doc_string,
            metadata_props=dict(tensor.metadata_props),
        )

    def _source(self, tensor: Any, kind: DType) -> Source:
        import onnx_ir

        proto = onnx.TensorProto(name=tensor.name or "", data_type=kind.code, dims=tensor.shape.numpy())
        if isinstance(tensor, onnx_ir.ExternalTensor):
            for key in ("location", "offset", "length"):
                if (value := getattr(tensor, key)) is not None:
                    proto.external_data.add(key=key, value=str(value))
            base = os.fspath(tensor.base_dir)
            return self._folders.setdefault(base, Folder(Path(base))).source(proto)
        in_memory = ProgramTensor(tensor, kind, count := elements(proto))
        return Source("", 0, kind.nbytes(count), kind, in_memory.key, tensor=in_memory)
