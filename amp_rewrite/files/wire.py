"""The protobuf wire format of ONNX files, for reading a model without its weights and streaming them on writing.

The encoding is described at https://protobuf.dev/programming-guides/encoding. Reading takes O(fields of messages with
heavy tensors), not O(bytes): all other messages are skipped by their length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import onnx
from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]
from google.protobuf.unknown_fields import UnknownFieldSet  # type: ignore[import-untyped]

from amp_rewrite.errors import ModelError


class NotOnnxError(ModelError):
    """A file is not an ONNX model, or is truncated."""


# The fields that lead to tensors. Sparse tensors are listed separately, since their parts are always in memory.
DENSE: dict[type[Message], tuple[str, ...]] = {
    onnx.ModelProto: ("graph", "training_info", "functions"),
    onnx.TrainingInfoProto: ("initialization", "algorithm"),
    onnx.FunctionProto: ("node", "attribute_proto"),
    onnx.GraphProto: ("node", "initializer"),
    onnx.NodeProto: ("attribute",),
    onnx.AttributeProto: ("t", "g", "tensors", "graphs"),
}
SPARSE: dict[type[Message], tuple[str, ...]] = {
    onnx.GraphProto: ("sparse_initializer",),
    onnx.AttributeProto: ("sparse_tensor", "sparse_tensors"),
}
_NESTED: dict[type[Message], dict[int, Any]] = {
    kind: {(field := kind.DESCRIPTOR.fields_by_name[name]).number: field for name in names}
    for kind, names in DENSE.items()
}
"""The fields of `DENSE` by number."""
RAW_DATA = onnx.TensorProto.RAW_DATA_FIELD_NUMBER

_PLAIN_ATTRIBUTES = frozenset(
    onnx.AttributeProto.AttributeType.Value(name)
    for name in ("FLOAT", "INT", "STRING", "FLOATS", "INTS", "STRINGS", "TYPE_PROTO", "TYPE_PROTOS")
)
_BUFFER_BYTES = 1 << 13
_MAX_HEAD_BYTES = 20  # a tag and a length, at most ten bytes each
_MAX_DEPTH = 100  # the limit of protobuf's own parser


@dataclass(frozen=True, slots=True)
class StreamedPiece:
    """A tensor's values as a piece of a file, `nbytes` long and produced on writing."""

    nbytes: int
    chunks: Callable[[], Iterable[bytes | memoryview]]
    tensor: str


Piece = bytes | StreamedPiece


def total(pieces: list[Piece]) -> int:
    """Return the number of bytes that the pieces take in a file."""
    return sum(len(p) if isinstance(p, bytes) else p.nbytes for p in pieces)


def varint(value: int) -> bytes:
    """Encode a nonnegative number as a base-128 varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def head(number: int, length: int) -> bytes:
    """Encode the tag and the length of a field of `length` bytes."""
    return varint(number << 3 | 2) + varint(length)


def tensors(message: Message, *, sparse: bool = False) -> Iterator[onnx.TensorProto]:
    """Yield the message's dense TensorProtos in wire order; with `sparse`, only the parts of sparse tensors."""
    if isinstance(message, onnx.TensorProto):
        if not sparse:
            yield message
        return
    for name in DENSE.get(type(message), ()):
        for child in _children(message, name):
            if not (name == "node" and _plain(child)):
                yield from tensors(child, sparse=sparse)
    for name in SPARSE.get(type(message), ()) if sparse else ():
        for child in _children(message, name):
            yield from (part for _, part in child.ListFields() if isinstance(part, onnx.TensorProto))


def _children(message: Message, name: str) -> Sequence[Any]:
    value: Any = getattr(message, name)
    if not isinstance(value, Message):
        return value  # type: ignore[no-any-return]
    return [value] if message.HasField(name) else ()


def pieces(message: Message, replace: Callable[[onnx.TensorProto], list[Piece] | None]) -> list[Piece] | None:
    """Return the wire format of a message, in field order, with tensors replaced; None if no tensor is replaced.

    `replace` returns the body of a tensor, or None to keep it. The message is neither changed nor copied, except for
    fields without tensors.
    """
    if isinstance(message, onnx.TensorProto):
        return replace(message)
    replaced: dict[str, dict[int, list[Piece]]] = {}
    for name in DENSE.get(type(message), ()):
        for at, child in enumerate(_children(message, name)):  # few nodes have tensors
            if not (name == "node" and _plain(child)) and (body := pieces(child, replace)) is not None:
                replaced.setdefault(name, {})[at] = body
    if not replaced:
        return None
    out: list[Piece] = []
    for field, value in message.ListFields():
        if isinstance(value, bytes):  # protobuf returns text that is not UTF-8 as bytes, but does not accept bytes
            out += [head(field.number, len(value)), value]
            continue
        if field.name not in replaced:
            out.append(type(message)(**{field.name: value}).SerializeToString(deterministic=True))
            continue
        for at, child in enumerate(_children(message, field.name)):
            parts = replaced[field.name].get(at) or [child.SerializeToString(deterministic=True)]
            out += [head(field.number, total(parts)), *parts]
    for unknown in UnknownFieldSet(message):  # from a later version of ONNX
        out.append(varint(unknown.field_number << 3 | unknown.wire_type))
        if unknown.wire_type == 0:
            out.append(varint(unknown.data))
        elif unknown.wire_type in (1, 5):
            out.append(int(unknown.data).to_bytes(8 if unknown.wire_type == 1 else 4, "little"))
        else:
            out += [varint(len(unknown.data)), bytes(unknown.data)]
    return out


def _plain(node: onnx.NodeProto) -> bool:
    # This runs for every node. A slice halves the time of the loop; a generator doubles it.
    for a in node.attribute[:]:  # noqa: SIM110
        if a.type not in _PLAIN_ATTRIBUTES:
            return False
    return True


def lightened(
    file: BinaryIO, size: int, threshold: int, stub: Callable[[onnx.TensorProto, int, int], bool], source: str
) -> bytes:
    """Return the bytes of the ModelProto in `file`, with tensors of more than `threshold` raw bytes as stubs.

    `stub(tensor, offset, length)` receives each of these tensors without its bytes, which are at `offset` in the file.
    It turns the tensor into a stub, or returns False to have the bytes read. ModelError for a file that is truncated or
    not a protobuf message; `source` is its name in the message.
    """
    walk = _WireWalk(file, size, threshold, stub, source)
    light = walk.message(0, size, onnx.ModelProto, 0)
    return walk.read(0, size) if light is None else light


@dataclass(slots=True)
class _WireWalk:
    """A walk over the messages in a file, with one buffer starting at byte `start` of the file."""

    file: BinaryIO
    size: int
    threshold: int
    stub: Callable[[onnx.TensorProto, int, int], bool]
    source: str
    buffer: bytes = b""
    start: int = 0

    def read(self, start: int, stop: int) -> bytes:
        self.file.seek(start)
        content = self.file.read(stop - start)
        if len(content) < stop - start:
            raise self.bad(start + len(content), "the file ends here")
        return content

    def bad(self, position: int, fact: str) -> NotOnnxError:
        return NotOnnxError(
            f"{self.source} is not an ONNX model, or it is damaged (byte {position} of {self.size}: {fact});"
            " export or download it again"
        )

    def message(self, start: int, stop: int, kind: type[Message], depth: int) -> bytes | None:
        """Return the message with stubs in place of heavy tensors; None if there are none."""
        if depth > _MAX_DEPTH:
            raise self.bad(start, f"messages are nested deeper than {_MAX_DEPTH}")
        if kind is onnx.TensorProto:
            return self.tensor(start, stop)
        nested = _NESTED[kind]
        out: list[bytes] = []
        written = start
        for number, wire, at, begin, end in _fields(self, start, stop):
            if number not in nested:
                continue
            if wire != 2:
                raise self.bad(at, f"field {nested[number].name} of {kind.__name__} has wire type {wire}")
            if end - begin <= self.threshold:
                continue
            body = self.message(begin, end, nested[number].message_type._concrete_class, depth + 1)
            if body is not None:
                out += [self.read(written, at), head(number, len(body)), body]
                written = end
        if not out:
            return None
        return b"".join([*out, self.read(written, stop)])

    def tensor(self, start: int, stop: int) -> bytes | None:
        """Return the TensorProto as a stub; None if its bytes must be read."""
        rest: list[tuple[int, int]] = []
        raw: tuple[int, int] | None = None
        for number, wire, at, begin, end in _fields(self, start, stop):
            if number != RAW_DATA:
                rest.append((at, end))
            elif wire != 2:
                raise self.bad(at, f"field raw_data of TensorProto has wire type {wire}")
            else:
                raw = begin, end  # the last occurrence of a field counts
        if raw is None or raw[1] - raw[0] <= self.threshold:
            return None
        tensor = onnx.TensorProto()
        try:
            tensor.ParseFromString(b"".join(self.read(*span) for span in rest))
        except DecodeError as cause:
            raise self.bad(start, "a tensor cannot be parsed") from cause
        if not self.stub(tensor, raw[0], raw[1] - raw[0]):
            return None
        return bytes(tensor.SerializeToString(deterministic=True))


def _fields(walk: _WireWalk, start: int, stop: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (number, wire type, start, start of value, end) for each field between `start` and `stop`."""
    at = start
    while at < stop:
        if at < walk.start or at + _MAX_HEAD_BYTES > walk.start + len(walk.buffer):
            walk.start, walk.buffer = at, walk.read(at, min(at + _BUFFER_BYTES, walk.size))
        buffer, index = walk.buffer, at - walk.start
        tag = buffer[index]
        if tag < 0x80:
            index += 1
        else:
            tag, index = _varint(walk, index)
        wire = tag & 7
        if wire == 2:
            length = buffer[index] if index < len(buffer) else 0x80
            if length < 0x80:
                index += 1
            else:
                length, index = _varint(walk, index)
            begin = walk.start + index
            end = begin + length
        elif wire == 0:
            begin = walk.start + index
            end = walk.start + _varint(walk, index)[1]
        elif wire in (1, 5):
            begin = walk.start + index
            end = begin + (8 if wire == 1 else 4)
        else:
            raise walk.bad(at, "cannot be read")
        if tag < 8:
            raise walk.bad(at, "cannot be read")
        if end > stop:
            raise walk.bad(at, f"field {tag >> 3} runs {end - stop} bytes past the end")
        yield tag >> 3, wire, at, begin, end
        at = end


def _varint(walk: _WireWalk, index: int) -> tuple[int, int]:
    value = shift = 0
    for at in range(index, min(index + 10, len(walk.buffer))):
        byte = walk.buffer[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7
    raise walk.bad(walk.start + index, "a varint does not end")
