"""Load models from files, without their heavy tensors, or from memory."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import onnx
import onnx.defs
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import ModelProto, NodeProto, TensorProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.files import tensors, wire
from amp_rewrite.files.disk import open_regular
from amp_rewrite.files.protos import all_nodes, clone
from amp_rewrite.files.tensors import Source, Sources, is_stub

HEAVY = 1 << 14  # bytes; larger tensors are left in their files

FIRST_IR_WITH_OPSET_IMPORTS = 3
"""The first IR version with mandatory opset imports."""

_MAX_CALL_DEPTH = 100
"""Maximum depth of nested function calls, as in onnx's inliner."""
_MAX_NODES, _MAX_GROWTH = 200_000, 20
"""An inlined model may have `_MAX_NODES` nodes, plus `_MAX_GROWTH` for each node of the file. A node counts as one plus
its size in KiB."""

_LFS_HEADER = b"version https://git-lfs.github.com/spec/"


def load_path(path: Path, folder: Path | None) -> ModelProto:
    """Return the proto of a file, with stubs for heavy tensors. ModelError if it is not a model."""
    try:
        if path.is_dir():
            raise wire.NotOnnxError(f"cannot read {path}: it is a folder; name the model file in it")
        with open_regular(path) as file:
            proto, by_location = _lazily(file, path)
        _check(proto, str(path))
        real = Path(os.path.realpath(path)).parent
        _resolve(proto, (path.parent, real) if folder is None else (folder,), by_location)
    except UnicodeEncodeError as cause:
        raise ModelError(f"cannot read {str(path)!r}: its name is not Unicode; rename the file") from cause
    except wire.NotOnnxError as cause:
        from amp_rewrite.files.foreign import foreign  # late: most files are models

        raise ModelError(foreign(path) or str(cause)) from cause
    except OSError as cause:
        raise ModelError(f"cannot read {path}: {cause.strerror or cause}") from cause
    return proto


def load_object(source: object, folder: Path | None, by_location: dict[str, Source]) -> ModelProto:
    """Return the proto of bytes, a ModelProto or a program, and add the sources of its stubs to `by_location`.

    ModelError for any other object.
    """
    if isinstance(source, bytes):
        proto = _parsed(source, "the model")
    elif isinstance(source, ModelProto):
        proto = source
    else:
        from amp_rewrite.files.external_data import load_program  # late: most models are in files

        proto, sources = load_program(source, folder)
        by_location |= sources
    _check(proto, "the model")
    stubs = [t for sparse in (False, True) for t in wire.tensors(proto, sparse=sparse) if is_stub(t)]
    if stubs:
        if folder is None and not all(_location(stub) in by_location for stub in stubs):
            raise ModelError(
                "the model has external data, but its folder is unknown; load it from its path, or pass the folder"
            )
        if proto is source:
            proto = clone(proto)
        _resolve(proto, (folder or Path(),), by_location)
    return proto


def _lazily(file: BinaryIO, path: Path) -> tuple[ModelProto, dict[str, Source]]:
    """Read a model without its heavy tensors; return it, and the source of each stub by location."""
    status = os.fstat(file.fileno())
    if status.st_size == 0:
        raise ModelError(f"{path} is empty; export or download it again")
    if file.read(len(_LFS_HEADER)) == _LFS_HEADER:
        raise ModelError(f"{path} is a Git LFS pointer, not the model; run git lfs pull")
    real, stamp = os.path.realpath(path), tensors.stamp(status)
    by_location: dict[str, Source] = {}
    secret = secrets.token_hex(16)  # cannot collide with a location in the file

    def stub(tensor: TensorProto, offset: int, length: int) -> bool:
        if is_stub(tensor):
            return True  # the tensor has external data, so the bytes here are ignored
        kind = DType.of(tensor.data_type)
        if kind in (None, DType.STRING) or tensor.HasField("segment") or tensor.external_data:
            return False
        needed = kind.nbytes(tensors.elements(tensor))
        if needed != length:
            raise ModelError(
                f"tensor {tensor.name!r} of {path} has {length} bytes, but its dims {list(tensor.dims)} of"
                f" {kind.spelling} need {needed}; export the model again"
            )
        key = f"{secret}.{len(by_location)}"
        by_location[key] = Source(real, offset, length, kind, stamp)
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=key)
        return True

    light = wire.lightened(file, status.st_size, HEAVY, stub, str(path))
    if tensors.stamp(os.fstat(file.fileno())) != stamp:
        raise ModelError(f"{path} changed while it was read; load it again")
    return _parsed(light, str(path)), by_location


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
        raise wire.NotOnnxError(f"{name} has no graph, so it is not an ONNX model; export the model again")
    if not proto.opset_import and not 0 < proto.ir_version < FIRST_IR_WITH_OPSET_IMPORTS:
        raise ModelError(f"{name} imports no opset, so its ops are undefined; export the model again")
    newest = onnx.defs.onnx_opset_version()
    for imported in proto.opset_import:
        if imported.domain in ("", "ai.onnx") and not 1 <= imported.version <= newest:
            raise ModelError(
                f"{name} imports ai.onnx opset {imported.version}, but onnx {onnx.__version__} supports 1 to {newest};"
                " upgrade onnx or correct the import"
            )
    check_expansion(proto, name)
    if not proto.graph.output:
        raise ModelError(f"{name} has no outputs, so it computes nothing; export the model again")


def _resolve(proto: ModelProto, folders: tuple[Path, ...], by_location: dict[str, Source]) -> None:
    """Turn tensors with external data into stubs, except light ones and parts of sparse ones, which are read."""
    stubs = [(t, sparse) for sparse in (False, True) for t in wire.tensors(proto, sparse=sparse) if is_stub(t)]
    if any(_location(tensor) not in by_location for tensor, _ in stubs):
        from amp_rewrite.files.external_data import Folder  # late: most models contain their weights

        folder = Folder(*folders)
    with Sources() as sources:
        for tensor, sparse in stubs:
            place = by_location.get(_location(tensor)) or folder.source(tensor)
            tensors.make_stub(tensor, place)
            if sparse or place.length <= HEAVY:
                tensor.CopyFrom(tensors.materialized(tensor, sources))


def _location(stub: TensorProto) -> str:
    return stub.external_data[0].value if stub.external_data else ""


# -- functions ----------------------------------------------------------------------


def check_expansion(proto: ModelProto, name: str) -> None:
    """Raise ModelError if a model's local functions recurse, or become unreasonably large when inlined.

    Thirty functions that each call the next one twice take 2 kB but expand to a billion nodes. O(nodes).
    """
    if not proto.functions:
        return
    local = {(f.domain, f.name, f.overload): f for f in proto.functions}
    sizes: dict[tuple[str, str, str], int] = {}

    def size(nodes: Iterable[NodeProto], depth: int) -> int:
        if depth > _MAX_CALL_DEPTH:
            raise ModelError(
                f"{name}: its local functions call each other in a cycle, or more than {_MAX_CALL_DEPTH} deep;"
                " export the model again"
            )
        total = 0
        for node in all_nodes(nodes):
            called = node.domain, node.op_type, node.overload
            if called in local and called not in sizes:
                sizes[called] = size(local[called].node, depth + 1)
            total += 1 + (node.ByteSize() >> 10) + sizes.get(called, 0)
        return total

    in_file = sum(1 + (node.ByteSize() >> 10) for f in (proto.graph, *proto.functions) for node in all_nodes(f.node))
    inlined = size(proto.graph.node, 0)
    if inlined > _MAX_NODES + _MAX_GROWTH * in_file:
        raise ModelError(
            f"{name}: inlining its local functions turns {in_file} nodes into {inlined:.3g}, more than any exporter"
            " writes; export the model again"
        )
