"""Fingerprints of models: one hash of the graph and one of the weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx
from google.protobuf.message import Message  # type: ignore[import-untyped]

from amp_rewrite.dtypes import DType
from amp_rewrite.files import tensors, wire
from amp_rewrite.files.tensors import Sources, is_stub

if TYPE_CHECKING:
    from amp_rewrite.files.model import Model

# Doc strings, provenance and derived facts.
_SKIP = frozenset({"doc_string", "metadata_props", "value_info", "producer_name", "producer_version", "model_version"})
_SAMPLE_BYTES, _SAMPLES = 1 << 12, 16  # bytes per sample, samples per large tensor


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Two SHA-256 digests in hexadecimal.

    `graph`: inputs, outputs, ops, attributes and names, and the types and shapes of all tensors. Doc strings, metadata,
    value_info and the producer are ignored. `weights`: the values of all tensors. Tensors above 64 KiB are sampled in
    16 evenly spread pieces of 4 KiB, so a model of any size takes milliseconds. A local change to a large weight may go
    unnoticed, but another training run does not.
    """

    graph: str
    weights: str


def fingerprint(model: Model) -> Fingerprint:
    """Return the fingerprint of a model, the same for all its sources. O(nodes + tensors)."""
    proto = onnx.ModelProto.FromString(_serialized(model, _bare))
    _strip(proto)
    weights = hashlib.sha256()
    with Sources() as sources:
        for tensor in wire.tensors(model.proto):
            weights.update(_bare(tensor).SerializeToString(deterministic=True))
            for piece in _sampled(tensor, sources):
                weights.update(piece)
    return Fingerprint(hashlib.sha256(proto.SerializeToString(deterministic=True)).hexdigest(), weights.hexdigest())


def digest(model: Model) -> str:
    """Stream a model, and return its SHA-256 digest in hexadecimal, regardless of the storage of its weights. O(bytes).

    Unlike a `Fingerprint`, it covers doc strings, metadata and every byte of the weights, after pending casts.
    """
    content = hashlib.sha256(_serialized(model, tensors.without_values))
    with Sources() as sources:
        for tensor in wire.tensors(model.proto):  # the dims and types hashed above delimit each one
            if DType.of(tensor.data_type) in (None, DType.STRING):
                content.update(tensor.SerializeToString(deterministic=True))
            else:
                for part in tensors.payload(tensor, sources):
                    content.update(part)
    return content.hexdigest()


def _serialized(model: Model, strip: Callable[[onnx.TensorProto], onnx.TensorProto]) -> bytes:
    pieces = wire.pieces(model.proto, lambda tensor: [strip(tensor).SerializeToString(deterministic=True)])
    return b"".join(p for p in pieces or [model.proto.SerializeToString(deterministic=True)] if isinstance(p, bytes))


def _bare(tensor: onnx.TensorProto) -> onnx.TensorProto:
    return onnx.TensorProto(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type)


def _strip(message: Message) -> None:
    for field, value in message.ListFields():
        if field.name in _SKIP:
            message.ClearField(field.name)
        elif isinstance(value, Message):
            _strip(value)
        elif field.message_type is not None:
            for child in value:
                _strip(child)


def _sampled(tensor: onnx.TensorProto, sources: Sources) -> Iterator[bytes | memoryview]:
    """Yield the tensor's bytes, or samples of them, in the type it declares."""
    kind = DType.of(tensor.data_type)
    if kind in (None, DType.STRING):
        yield b"".join(tensor.string_data) + tensor.raw_data
        return
    yield kind.name.encode()
    if is_stub(tensor) and not tensors.is_pending(tensor):
        place = tensors.source(tensor)
        yield from (sources.read(place, at, length).data for at, length in _spread(place.length))
        return
    whole = memoryview(b"".join(tensors.payload(tensor, sources)))
    yield from (whole[at : at + length] for at, length in _spread(len(whole)))


def _spread(length: int) -> Iterator[tuple[int, int]]:
    if length <= _SAMPLE_BYTES * _SAMPLES:
        yield 0, length
        return
    for i in range(_SAMPLES):
        yield (length - _SAMPLE_BYTES) * i // (_SAMPLES - 1), _SAMPLE_BYTES
