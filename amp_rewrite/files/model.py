"""A model: its proto, and the places of its tensors' bytes. The only door to ONNX files."""

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
from amp_rewrite.files.loading import HEAVY, of_memory, of_path
from amp_rewrite.files.mends import mended
from amp_rewrite.files.protos import clone
from amp_rewrite.files.skeleton import skeleton
from amp_rewrite.files.tensors import HELD, ProgramTensor, Source, Sources, is_stub


class HoldsModel(Protocol):
    """A result with a model, as of `convert` or `repair`."""

    @property
    def result(self) -> Model:
        """The model."""


class ExportedProgram(Protocol):
    """A torch ONNXProgram, known without torch."""

    @property
    def model(self) -> Any:
        """The model, one of onnx_ir."""


class IrModel(Protocol):
    """An onnx_ir.Model, known without onnx_ir."""

    @property
    def graph(self) -> Any:
        """The main graph."""

    @property
    def functions(self) -> Any:
        """Local functions."""


METADATA_KEY = "amp_rewrite"
"""Key of the metadata entry of a converted model: version, type, lists and settings."""
ModelSource: TypeAlias = "str | os.PathLike[str] | bytes | ModelProto | Model | HoldsModel | ExportedProgram | IrModel"
"""Forms of a model that `Model.load` takes."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Model:
    """A model proto, read-only and possibly shared, with *stubs* for heavy tensors (see `tensors`), and its path.

    It keeps alive the tensors of a program to which its stubs refer.

    Attributes:
        proto: the ModelProto.
        path: the file that it was read from; None for one from memory.
        mends: defects of the file that runtimes overlook, and what became of them.
        held: the tensors of a program.

    Example:
        >>> from amp_rewrite import Model
        >>> model = Model.load("model.onnx")
        >>> model.nbytes
        104504
    """

    proto: ModelProto
    path: Path | None = None
    mends: tuple[Finding, ...] = field(default=(), repr=False)
    held: frozenset[ProgramTensor] = field(init=False, repr=False)
    _fits: dict[tuple[Source, int, DType] | None, Fit] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        stubs = (t for t in wire.tensors(self.proto) if is_stub(t)) if HELD else ()
        object.__setattr__(self, "held", frozenset(h for t in stubs if (h := tensors.source(t).held) is not None))

    @classmethod
    def load(cls, source: object, *, folder: str | Path | None = None) -> Model:
        """Load a model and return it; return a Model as is, also the one in a result of `convert` or `repair`.

        From a path or a program, tensors above 16 KiB become stubs instead of being read.

        Args:
            source: a path, bytes, a ModelProto, a torch ONNXProgram or an onnx_ir.Model, never changed.
            folder: the folder of external data, by default that of the path.

        Raises:
            ModelError: the model is invalid; in one line.
        """
        if isinstance(held := getattr(source, "result", source), Model):
            return held
        place = None if folder is None else Path(folder)
        if isinstance(source, (str, os.PathLike)):
            proto, mends = mended(of_path(Path(source), place), owned=True)
            return cls(proto, Path(source), mends)
        own: dict[str, Source] = {}  # holds the tensors of a program until the model does
        proto, mends = mended(of_memory(source, place, own), owned=False)
        return cls(proto, None, mends)

    def __repr__(self) -> str:
        return f"<Model {str(self.path or self.proto.graph.name)!r}: {len(self.proto.graph.node)} nodes>"

    def array(self, tensor: TensorProto) -> Array:
        """Return all values of a tensor, read and cast for a stub. Do not modify the result."""
        with Sources() as sources:
            return tensors.array(tensor, sources)

    def chunks(self, tensor: TensorProto, elements: int = tensors.CHUNK) -> Iterator[Array]:
        """Yield the tensor's values as flat arrays of at most `elements` elements, cast for a stub."""
        with Sources() as sources:
            yield from tensors.chunks(tensor, elements, sources)

    def fit(self, tensor: TensorProto, to: DType) -> Fit:
        """Return the effects of rounding the tensor to the floating type `to`. O(values).

        A stub is streamed, once for this model and those made of it by `dataclasses.replace`.

        Raises:
            ModelError: the tensor is not floating.
        """
        kind = tensors.dtype(tensor)
        if not kind.floating:
            raise ModelError(f"tensor {tensor.name!r} is {kind.spelling}; only floating-point tensors can be fitted")
        key = (tensors.source(tensor), kind.code, to) if is_stub(tensor) else None
        if key in self._fits:
            return self._fits[key]
        with Sources() as sources:
            fit = Fit.of(tensors.chunks(tensor, tensors.CHUNK, sources), to, ours=key is not None)
        if key is not None:
            self._fits[key] = fit
        return fit

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors after pending casts."""
        return sum(tensors.nbytes(t) for sparse in (False, True) for t in wire.tensors(self.proto, sparse=sparse))

    def stated(self, word: str) -> str:
        """Return a word of the metadata of a conversion, as in "target"; "" without one.

        Args:
            word: its name.

        Returns:
            The text behind the "=".
        """
        texts = {p.key: p.value for p in self.proto.metadata_props if isinstance(p.value, str)}  # bytes are not UTF-8
        entry = texts.get(METADATA_KEY, "")
        return next((value for name, _, value in (pair.partition("=") for pair in entry.split()) if name == word), "")

    def save(
        self,
        path: str | Path,
        *,
        overwrite: bool = False,
        external_data: bool | str | None = None,
        progress: store.Progress | None = None,
    ) -> None:
        """Write the model to a file, weights streamed; on failure nothing is left and the old file stays.

        The path may be that of the file that the model came from, but then its stubs point to a file that is gone, and
        the model must be loaded again. A link is replaced, not the file that it points to.

        Args:
            path: the file to write.
            overwrite: True to replace an existing file.
            external_data: weights in `<stem>.<hash>.data`, or a file of that name, with a suffix; None: above 1.5 GB.
            progress: called as `progress(done, total)` with bytes.

        Raises:
            ModelError: the file cannot be written, or exists; or weights of the model are read from it.
            PolicyError: `external_data` is not the name of a file.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise ModelError(f"cannot write a model to {type(path).__qualname__}; give a path")
        external = self.nbytes > store.LARGEST_INLINE if external_data is None else external_data
        read, overwrite = self.path, overwrite is True
        store.save(self.proto, Path(path), progress, read=read, overwrite=overwrite, external_data=external)

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
