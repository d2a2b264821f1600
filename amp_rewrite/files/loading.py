"""Reading models: from files, whose heavy tensors stay there, and from what is in memory."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any, BinaryIO

import onnx
import onnx.defs
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import ModelProto, TensorProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.files import program, tensors, wire
from amp_rewrite.files.external_data import Folder
from amp_rewrite.files.foreign import foreign
from amp_rewrite.files.function_expansion import check_expansion
from amp_rewrite.files.protos import clone
from amp_rewrite.files.regular_files import open_regular
from amp_rewrite.files.tensors import Source, Sources, is_stub
from amp_rewrite.files.text import format_of, text_model

HEAVY = 1 << 14  # bytes of a tensor from which it is left in its file

FIRST_IR_WITH_OPSET_IMPORTS = 3
"""The IR version from which a model must import the opsets of its ops."""

_LFS = b"version https://git-lfs.github.com/spec/"


def of_path(path: Path, folder: Path | None) -> ModelProto:
    """Return the proto of a file, whose heavy tensors are stubs. ModelError if it is not a model."""
    own: dict[str, Source] = {}
    try:
        if path.is_dir():
            raise ModelError(foreign(path) or f"cannot read {path}: it is a folder; name the model file in it")
        if (format_ := format_of(path)) is not None:
            proto = text_model(path, format_)
        else:
            with open_regular(path) as file:
                proto, own = _lazily(file, path)
        _check(proto, str(path))
    except wire.NotOnnxError as cause:
        raise ModelError(foreign(path) or str(cause)) from cause
    except OSError as cause:
        raise ModelError(f"cannot read {path}: {cause.strerror or cause}") from cause
    real = Path(os.path.realpath(path)).parent
    place = Folder(path.parent, real) if folder is None else Folder(folder)
    _resolve(proto, place, own)
    return proto


def of_memory(source: object, folder: Path | None, own: dict[str, Source]) -> ModelProto:
    """Return the proto of bytes, an open file, a ModelProto or a program, the sources of whose tensors go to `own`.

    ModelError if it is none of these.
    """
    source = _read(source) if hasattr(source, "read") else source
    if isinstance(source, (bytes, bytearray, memoryview)):
        proto = _parsed(bytes(source), "the model")
    elif isinstance(source, ModelProto):
        proto = source
    else:
        proto, lent = program.lazily(source, folder)
        own |= lent
    _check(proto, "the model")
    stubs = [t for sparse in (False, True) for t in wire.tensors(proto, sparse=sparse) if is_stub(t)]
    if stubs:
        if folder is None and not all(_location(stub) in own for stub in stubs):
            raise ModelError(
                "the model has external data, but no folder is known for it; load it from its path, or pass the folder"
            )
        if proto is source:
            proto = clone(proto)
        _resolve(proto, Folder(folder or Path()), own)
    return proto


def _lazily(file: BinaryIO, path: Path) -> tuple[ModelProto, dict[str, Source]]:
    """Read a model without its heavy tensors; return it and their sources by the location of the stubs."""
    status = os.fstat(file.fileno())
    if status.st_size == 0:
        raise ModelError(f"{path} is empty; export or download it again")
    if file.read(len(_LFS)) == _LFS:
        raise ModelError(f"{path} is a Git LFS pointer, not the model itself; run git lfs pull")
    real, stamp = os.path.realpath(path), tensors.stamp(status)
    own: dict[str, Source] = {}
    secret = secrets.token_hex(16)  # cannot collide with a location in the file

    def stub(tensor: TensorProto, offset: int, length: int) -> bool:
        if is_stub(tensor):
            return True  # bytes beside external data are ignored
        kind = DType.of(tensor.data_type)
        if kind in (None, DType.STRING) or tensor.HasField("segment") or tensor.external_data:
            return False
        needed = kind.nbytes(tensors.elements(tensor))
        if needed != length:
            raise ModelError(
                f"tensor {tensor.name!r} of {path} has {length} bytes, but its dims {list(tensor.dims)} of"
                f" {kind.spelling} need {needed}; export the model again"
            )
        key = f"{secret}.{len(own)}"
        explicit = tensor.HasField("data_location")
        own[key] = Source(real, offset, length, kind, stamp, explicit)
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=key)
        return True

    light = wire.lightened(file, status.st_size, HEAVY, stub, str(path))
    if tensors.stamp(os.fstat(file.fileno())) != stamp:
        raise ModelError(f"{path} was written to while it was read; load it again")
    return _parsed(light, str(path)), own


def _read(file: Any) -> object:
    """Return the bytes that are left in an open file. ModelError if it gives none, or text."""
    try:
        content = file.read()
    except (OSError, ValueError) as cause:  # ValueError: closed
        reason = str(cause).rstrip(".")
        raise ModelError(f"cannot read a model from {file!r:.80}: {reason}; open it to read bytes") from cause
    if not isinstance(content, (bytes, bytearray, memoryview)):
        raise ModelError(f"{file!r:.80} gives {type(content).__name__}, not bytes; open it with mode 'rb'")
    return content


def _parsed(content: bytes, name: str) -> ModelProto:
    proto = ModelProto()
    try:
        proto.ParseFromString(content)
    except DecodeError as cause:
        raise wire.NotOnnxError(
            f"{name} is not an ONNX model, or it is damaged; export or download it again"
        ) from cause
    return proto


def _check(proto: ModelProto, name: str) -> None:
    if not proto.HasField("graph"):
        raise wire.NotOnnxError(f"{name} has no graph: it is not an ONNX model; export it again")
    if not proto.opset_import and not 0 < proto.ir_version < FIRST_IR_WITH_OPSET_IMPORTS:
        raise ModelError(f"{name} imports no opset, so its ops have no meaning; export it again")
    newest = onnx.defs.onnx_opset_version()
    for imported in proto.opset_import:
        if imported.domain in ("", "ai.onnx") and not 1 <= imported.version <= newest:
            raise ModelError(
                f"{name} imports ai.onnx opset {imported.version}, but onnx {onnx.__version__} knows 1 to {newest};"
                " upgrade onnx or correct the import"
            )
    check_expansion(proto, name)
    if not proto.graph.output:
        raise ModelError(f"{name} has no outputs, so it computes nothing; export it again")


def _resolve(proto: ModelProto, folder: Folder, own: dict[str, Source]) -> None:
    """Turn each tensor with external data into a stub; light ones, and parts of sparse ones, are read."""
    with Sources() as sources:
        for sparse in (False, True):
            for tensor in wire.tensors(proto, sparse=sparse):
                if is_stub(tensor):
                    place = own.get(_location(tensor)) or folder.source(tensor)
                    tensors.make_stub(tensor, place)
                    if sparse or place.length <= HEAVY:
                        tensor.CopyFrom(tensors.materialized(tensor, sources))


def _location(stub: TensorProto) -> str:
    return stub.external_data[0].value if stub.external_data else ""
