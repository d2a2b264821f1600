"""A model: its proto, and where the bytes of its tensors live. The only door to ONNX files."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias

import onnx
import onnx.defs
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import ModelProto, TensorProto
from onnx.serialization import registry

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.files import casting, program, store, tensors, wire
from amp_rewrite.files.casting import Array, cast
from amp_rewrite.files.external_data import Folder
from amp_rewrite.files.foreign import foreign
from amp_rewrite.files.function_expansion import check_expansion
from amp_rewrite.files.program_tensors import ProgramTensor, any_held
from amp_rewrite.files.protos import clone
from amp_rewrite.files.regular_files import open_regular
from amp_rewrite.files.rounding import Fit
from amp_rewrite.files.skeleton import skeleton
from amp_rewrite.files.tensors import Source, Sources, is_stub
from amp_rewrite.files.text import text_model

HEAVY = 1 << 14  # bytes of a tensor from which it is left in its file

FIRST_IR_WITH_OPSET_IMPORTS = 3
"""The IR version from which a model must import the opsets of its ops."""

_LFS = b"version https://git-lfs.github.com/spec/"


class HoldsModel(Protocol):
    """A result with a model in it, such as that of `convert` and of `repair`."""

    @property
    def result(self) -> Model:
        """The model."""


class ExportedProgram(Protocol):
    """A torch ONNXProgram, known without torch."""

    @property
    def model_proto(self) -> ModelProto:
        """The model."""


class IrModel(Protocol):
    """An onnx_ir.Model, known without onnx_ir."""

    @property
    def graph(self) -> Any:
        """The main graph."""

    @property
    def functions(self) -> Any:
        """Local functions."""


class Readable(Protocol):
    """A file that is open to read bytes, such as one of fsspec."""

    def read(self) -> bytes:
        """Return all that is left."""


_Bytes: TypeAlias = "bytes | bytearray | memoryview | Readable"
ModelSource: TypeAlias = "str | os.PathLike[str] | _Bytes | ModelProto | Model | HoldsModel | ExportedProgram | IrModel"
"""Forms of a model that `Model.load` takes."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Model:
    """A model proto, read only and maybe shared, whose heavy tensors may be *stubs* (see `tensors`), and its path.

    It keeps alive the tensors of a program to which its stubs refer.

    Attributes:
        proto: the ModelProto.
        path: the file that it was read from; None for one from memory.
        held: the tensors of a program.

    Example:
        >>> from amp_rewrite import Model
        >>> model = Model.load("model.onnx")
        >>> model.nbytes
        104504
    """

    proto: ModelProto
    path: Path | None = None
    held: frozenset[ProgramTensor] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        stubs = (t for t in wire.tensors(self.proto) if is_stub(t)) if any_held() else ()
        object.__setattr__(self, "held", frozenset(h for t in stubs if (h := tensors.source(t).held) is not None))

    @classmethod
    def load(cls, source: object, *, folder: str | Path | None = None) -> Model:
        """Load a model and return it; return a Model as is, also that of a result of `convert` or `repair`.

        From a path or a program, tensors above 16 KiB become stubs instead of being read; text formats are recognized
        by suffix (.onnxtxt, .textproto, .json).

        Args:
            source: a path, bytes, an open file, a ModelProto, a torch ONNXProgram or an onnx_ir.Model, never changed.
            folder: the folder of external data, by default that of the path.

        Raises:
            ModelError: the model is invalid; in one line.
        """
        if isinstance(held := getattr(source, "result", source), Model):
            return held
        place = None if folder is None else Path(folder)
        if isinstance(source, (str, os.PathLike)):
            path = Path(source)
            return cls(_of_path(path, place), path)
        own: dict[str, Source] = {}
        source = _read(source) if hasattr(source, "read") else source
        if isinstance(source, (bytes, bytearray, memoryview)):
            proto = _parsed(bytes(source), "the model")
        elif isinstance(source, ModelProto):
            proto = source
        else:
            proto, own = program.lazily(source, place)
        _check(proto, "the model")
        stubs = [t for sparse in (False, True) for t in wire.tensors(proto, sparse=sparse) if is_stub(t)]
        if stubs:
            if place is None and not all(_location(stub) in own for stub in stubs):
                raise ModelError(
                    "the model has external data, but no folder is known for it; load it from its path, or pass the"
                    " folder"
                )
            if proto is source:
                proto = clone(proto)
            _resolve(proto, Folder(place or Path()), own)
        return cls(proto)

    def __repr__(self) -> str:
        return f"<Model {str(self.path or self.proto.graph.name)!r}: {len(self.proto.graph.node)} nodes>"

    def array(self, tensor: TensorProto) -> Array:
        """Return all values of a tensor, read and cast for a stub. Do not modify the result.

        Args:
            tensor: one of the model.
        """
        with Sources() as sources:
            return tensors.array(tensor, sources)

    def chunks(self, tensor: TensorProto, elements: int = tensors.CHUNK) -> Iterator[Array]:
        """Yield the tensor's values as flat arrays, in their type in the file.

        Args:
            tensor: one of the model.
            elements: the largest size of an array.
        """
        with Sources() as sources:
            yield from tensors.chunks(tensor, elements, sources)

    def fit(self, tensor: TensorProto, to: DType, memory: Array | None = None) -> Fit:
        """Return the effects of rounding the tensor to the floating type `to`, streamed. O(values).

        Args:
            tensor: one of the model.
            to: a floating type.
            memory: reusable memory from `tensors.fresh_memory`.

        Raises:
            ModelError: the tensor is not floating.
        """
        kind = tensors.dtype(tensor)
        if not kind.floating:
            raise ModelError(f"tensor {tensor.name!r} is {kind.spelling}; only floating tensors have a fit")
        with Sources() as sources:
            if not is_stub(tensor):
                return Fit.of(tensors.chunks(tensor, tensors.CHUNK, sources), to)
            chunks = tensors.chunks(tensor, tensors.CHUNK, sources, memory=sources.memory if memory is None else memory)
            pending = tensors.is_pending(tensor)
            return Fit.of((cast(c, kind) for c in chunks) if pending else chunks, to, ours=True)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors after pending casts."""
        dense = sum(map(tensors.nbytes, wire.tensors(self.proto)))
        return dense + sum(map(tensors.nbytes, wire.tensors(self.proto, sparse=True)))

    def save(
        self,
        path: str | Path | store.Writable,
        *,
        overwrite: bool = False,
        external_data: bool | str | None = None,
        shard_size: str | int | None = None,
        resume: bool = False,
        progress: store.Progress | None = None,
    ) -> None:
        """Write the model to a file, weights streamed; on failure nothing is left and the old file stays.

        The path may be that of the file that the model came from, but then its stubs point to a file that is gone, and
        the model must be loaded again. Of a link the name is replaced, not the file that it leads to.

        A shard size asks for external data; further files of a given name get "_1", "_2" … after it. An open file is
        not closed, and holds a part of the model if writing fails.

        Args:
            path: the file to write; or an open one, such as one of fsspec, which gets the whole model.
            overwrite: True to replace an existing file.
            external_data: weights in `<stem>.<hash>.data`, or a file of that name, with a suffix; None: above 1.5 GB.
            shard_size: the size of a data file from which another begins: "5GB", or "source" for those of the source.
            resume: keep finished data files if saving fails, and take up those that an earlier attempt left.
            progress: called as `progress(done, total)` with bytes.

        Raises:
            ModelError: the file cannot be written, or exists; or weights of the model are read from it.
            PolicyError: `shard_size` is not a size, or `external_data` not the name of a file.
        """
        if not isinstance(path, (str, os.PathLike)):
            if not hasattr(path, "write"):
                raise ModelError(f"cannot write a model to {type(path).__qualname__}; give a path, or a file")
            if external_data or shard_size is not None or resume:
                raise ModelError(
                    "an open file has no others beside it, nor a name to go on from; give a path for these"
                )
            store.stream(self.proto, path, progress)
            return
        asked = store.SaveOptions(overwrite is True, external_data, shard_size, resume is True)
        store.Saving.of(Path(path), self.path, self.nbytes, asked).save(self.proto, progress)

    def to_proto(self) -> ModelProto:
        """Return a copy with every tensor in memory.

        Raises:
            ModelError: it is larger than 2 GB, protobuf's limit.
        """
        if self.nbytes > store.LARGEST_FILE:
            raise ModelError(
                f"the model has {self.nbytes} bytes of tensors, more than a ModelProto can serialize; use"
                " save(path) instead"
            )
        out = clone(self.proto)
        with Sources() as sources:
            for tensor in wire.tensors(out):
                if is_stub(tensor):
                    tensor.CopyFrom(tensors.materialized(tensor, sources))
        return out

    def skeleton(self) -> ModelProto:
        """Return a light copy for onnx's checker and shape inference, as `skeleton.skeleton` describes it."""
        return skeleton(self.proto, HEAVY)


def baked(tensor: TensorProto, to: DType, *, name: str | None = None, model: Model) -> TensorProto:
    """Return a new tensor with the values of `tensor` in the floating type `to`; all but the name is kept.

    Values in memory are cast at once (see `cast`). A stub gets a pending cast, which replaces one that only widens.
    ModelError for a tensor or a type that is not floating.
    """
    kind = tensors.dtype(tensor)
    if not (kind.floating and to.floating):
        raise ModelError(f"tensor {tensor.name!r} is {kind.spelling}; only floating types cast to {to.spelling}")
    if kind is to:
        out = clone(tensor)
    else:
        out = tensors.without_values(tensor)
        out.data_type = to.code
        if is_stub(tensor) and ((held := tensors.source(tensor).dtype) is kind or (held.low and kind is DType.FLOAT)):
            tensors.make_stub(out, tensors.source(tensor))
        else:
            out.raw_data = cast(model.array(tensor), to).tobytes()
    if name is not None:
        out.name = name
    return out


def scaled(tensor: TensorProto, exponent: int, *, name: str, model: Model) -> TensorProto:
    """Return a new tensor with the values of a float32 `tensor` times 2⁻ᵉ; all but the name is kept.

    Values in memory are scaled at once. A stub gets a pending scale.
    """
    out = tensors.without_values(tensor)
    if is_stub(tensor):
        place = tensors.source(tensor)
        tensors.make_stub(out, replace(place, exponent=place.exponent + exponent))
    else:
        out.raw_data = casting.scaled(model.array(tensor).copy(), exponent).tobytes()
    out.name = name
    return out


def _of_path(path: Path, folder: Path | None) -> ModelProto:
    own: dict[str, Source] = {}
    try:
        if path.is_dir():
            raise ModelError(foreign(path) or f"cannot read {path}: it is a folder; name the model file in it")
        format_ = registry.get_format_from_file_extension(path.suffix.lower())
        if format_ not in (None, "protobuf"):
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
