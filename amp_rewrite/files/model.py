"""The `Model` class: a ModelProto with its heavy tensors left in their files.

Only modules of `files` open ONNX files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from onnx import ModelProto, TensorProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding, ModelError
from amp_rewrite.files import casting, store, tensors, wire
from amp_rewrite.files.casting import Array, Fit, cast
from amp_rewrite.files.loading import HEAVY, load_object, load_path
from amp_rewrite.files.mends import mended
from amp_rewrite.files.protos import clone
from amp_rewrite.files.skeleton import skeleton
from amp_rewrite.files.tensors import PROGRAM_TENSORS, ProgramTensor, Source, Sources, is_stub


class HoldsModel(Protocol):
    """A result with a model, such as the result of `convert` or `repair`."""

    @property
    def result(self) -> Model:
        """The model."""


class ExportedProgram(Protocol):
    """A torch ONNXProgram, recognized without importing torch."""

    @property
    def model(self) -> Any:
        """The onnx_ir.Model."""


class IrModel(Protocol):
    """An onnx_ir.Model, recognized without importing onnx_ir."""

    @property
    def graph(self) -> Any:
        """The main graph."""

    @property
    def functions(self) -> Any:
        """The local functions."""


METADATA_KEY = "amp_rewrite"
"""Metadata key for the version, type, lists and settings of a conversion."""
ModelSource: TypeAlias = "str | os.PathLike[str] | bytes | ModelProto | Model | HoldsModel | ExportedProgram | IrModel"
"""Everything accepted by `Model.load`."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Model:
    """A read-only, possibly shared ModelProto with *stubs* for heavy tensors (see `files.tensors`), and its path.

    Attributes:
        proto: the ModelProto.
        path: the file it was loaded from; None for a model from memory.
        mends: the defects fixed on loading.
        kept: the tensors of a program, kept alive for the stubs.

    Example:
        >>> from amp_rewrite import Model
        >>> model = Model.load("model.onnx")
        >>> model.nbytes
        104504
    """

    proto: ModelProto
    path: Path | None = None
    mends: tuple[Finding, ...] = field(default=(), repr=False)
    kept: frozenset[ProgramTensor] = field(init=False, repr=False)
    _fits: dict[tuple[Source, int, DType] | None, Fit] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        stubs = (t for t in wire.tensors(self.proto) if is_stub(t)) if PROGRAM_TENSORS else ()
        object.__setattr__(self, "kept", frozenset(p for t in stubs if (p := tensors.source(t).tensor) is not None))

    @classmethod
    def load(cls, source: object, *, folder: str | Path | None = None) -> Model:
        """Load and return a model. A Model, or the one in a result of `convert` or `repair`, is returned unchanged.

        Tensors above 16 KiB in a file or a program become stubs instead of being read.

        Args:
            source: a path, bytes, a ModelProto, a torch ONNXProgram or an onnx_ir.Model; it is never changed.
            folder: the folder of external data, by default the folder of the path.

        Raises:
            ModelError: the model cannot be read, or is invalid.
        """
        if isinstance(loaded := getattr(source, "result", source), Model):
            return loaded
        place = None if folder is None else Path(folder)
        if isinstance(source, (str, os.PathLike)):
            proto, mends = mended(load_path(Path(source), place), owned=True)
            return cls(proto, Path(source), mends)
        by_location: dict[str, Source] = {}  # keeps a program's tensors alive until the model holds them
        proto, mends = mended(load_object(source, place, by_location), owned=False)
        return cls(proto, None, mends)

    def __repr__(self) -> str:
        return f"<Model {str(self.path or self.proto.graph.name)!r}: {len(self.proto.graph.node)} nodes>"

    def array(self, tensor: TensorProto) -> Array:
        """Return all values of a tensor, which must not be modified. A stub is read, and its pending cast applied."""
        with Sources() as sources:
            return tensors.array(tensor, sources)

    def chunks(self, tensor: TensorProto, elements: int = tensors.CHUNK) -> Iterator[Array]:
        """Yield the values of a tensor as `array` does, in flat arrays of at most `elements` elements."""
        with Sources() as sources:
            yield from tensors.chunks(tensor, elements, sources)

    def fit(self, tensor: TensorProto, to: DType) -> Fit:
        """Return statistics of rounding the tensor to the floating-point type `to`. O(values).

        A stub is streamed once, including for models made from this one by `dataclasses.replace`.

        Raises:
            ModelError: the tensor is not a floating-point tensor.
        """
        kind = tensors.dtype(tensor)
        if not kind.floating:
            raise ModelError(f"tensor {tensor.name!r} is {kind.spelling}; only floating-point tensors can be fitted")
        key = (tensors.source(tensor), kind.code, to) if is_stub(tensor) else None
        if key in self._fits:
            return self._fits[key]
        with Sources() as sources:
            fit = Fit.of(tensors.chunks(tensor, tensors.CHUNK, sources), to, owned=key is not None)
        if key is not None:
            self._fits[key] = fit
        return fit

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors after pending casts."""
        return sum(tensors.nbytes(t) for sparse in (False, True) for t in wire.tensors(self.proto, sparse=sparse))

    def recorded(self, setting: str) -> str:
        """Return a setting of the conversion recorded in the metadata; "" if there is none.

        Args:
            setting: its name, such as "target".

        Returns:
            The text after "=".
        """
        texts = {p.key: p.value for p in self.proto.metadata_props if isinstance(p.value, str)}  # bytes are not UTF-8
        pairs = (pair.partition("=") for pair in texts.get(METADATA_KEY, "").split())
        return next((value for name, _, value in pairs if name == setting), "")

    def save(
        self,
        path: str | Path,
        *,
        overwrite: bool = False,
        external_data: bool | str | None = None,
        progress: store.ByteProgress | None = None,
    ) -> None:
        """Write the model to a file and stream its weights. On failure, the folder is unchanged.

        A model saved to the file it was loaded from must be loaded again, since its stubs point to the old file. A
        link is replaced, not its target.

        Args:
            path: the file to write.
            overwrite: True to replace an existing file.
            external_data: True to store the weights in `<stem>.<hash>.data`, or the name of a data file, with a
                suffix. By default, True above 1.5 GB.
            progress: called as `progress(done, total)` with bytes.

        Raises:
            ModelError: the file exists, cannot be written, or contains weights of the model that have not been read.
            PolicyError: `external_data` is not the name of a file.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise ModelError(f"cannot write a model to {type(path).__qualname__}; pass a path")
        external = self.nbytes > store.MAX_INLINE_BYTES if external_data is None else external_data
        to, origin, replace_old = Path(path), self.path, overwrite is True
        store.save(self.proto, to, progress, loaded_from=origin, overwrite=replace_old, external_data=external)

    def to_proto(self) -> ModelProto:
        """Return a copy with every tensor in memory.

        Raises:
            ModelError: the model is larger than 2 GB, protobuf's limit.
        """
        if self.nbytes > store.MAX_FILE_BYTES:
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
        """Return a copy without heavy tensors for onnx's checker and shape inference (see `skeleton.skeleton`)."""
        return skeleton(self.proto, HEAVY)


def baked(tensor: TensorProto, to: DType, *, name: str | None = None, model: Model) -> TensorProto:
    """Return a copy of `tensor` cast to the floating-point type `to`, under a new name if one is given.

    Values in memory are cast at once (see `cast`). A stub gets a pending cast, which replaces an earlier one that only
    widens. ModelError if the tensor or the type is not a floating-point one.
    """
    kind = tensors.dtype(tensor)
    if not (kind.floating and to.floating):
        raise ModelError(f"tensor {tensor.name!r} is {kind.spelling}; only floating-point tensors can be cast")
    if kind is to:
        out = clone(tensor)
    else:
        out = tensors.without_values(tensor)
        out.data_type = to.code
        stored = tensors.source(tensor).dtype if is_stub(tensor) else None
        if stored is not None and (stored is kind or (stored.low and kind is DType.FLOAT)):
            tensors.make_stub(out, tensors.source(tensor))
        else:
            out.raw_data = cast(model.array(tensor), to).tobytes()
    if name is not None:
        out.name = name
    return out


def scaled(tensor: TensorProto, exponent: int, *, name: str, model: Model) -> TensorProto:
    """Return a copy of a float32 `tensor` with its values times 2⁻ᵉ, under a new name.

    Values in memory are scaled at once. A stub gets a pending scale.
    """
    out = tensors.without_values(tensor)
    if is_stub(tensor):
        source = tensors.source(tensor)
        tensors.make_stub(out, replace(source, exponent=source.exponent + exponent))
    else:
        out.raw_data = casting.scaled(model.array(tensor).copy(), exponent).tobytes()
    out.name = name
    return out
