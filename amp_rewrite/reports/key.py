"""Keys of ops: digests that ignore names and types, so that two reports recognize the same op."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import lru_cache

from onnx import AttributeProto, NodeProto


def key_of(kind: str, node: NodeProto, weights: Mapping[int, tuple[int, ...]]) -> str:
    """Return the key of a node: its kind, and the shape of each weight that it reads, by input slot. 12 hex digits."""
    shapes = (f"{slot}:{shape}" for slot, shape in weights.items())
    return _digest("\n".join((kind, *_attributes(node), *shapes)))


@lru_cache(maxsize=1 << 12)  # most ops of a model are like many others
def _digest(text: str) -> str:
    return hashlib.blake2s(text.encode("utf-8", "replace"), digest_size=6).hexdigest()


# They name an element type, which is what a conversion changes.
_TYPE_ATTRIBUTES = {"to", "dtype", "output_dtype", "output_datatype", "stash_type", "saturate", "round_mode"}


def _attributes(node: NodeProto) -> list[str]:
    return sorted(f"{a.name}={_value(a)}" for a in node.attribute[:] if a.name not in _TYPE_ATTRIBUTES)


def _value(a: AttributeProto) -> object:
    """Return the value of an attribute, without parts that a conversion changes: the shape of tensors, no bodies."""
    read = _PLAIN_VALUES.get(a.type)
    return read(a) if read is not None else None


_PLAIN_VALUES: dict[int, Callable[[AttributeProto], object]] = {
    AttributeProto.INT: lambda a: a.i,
    AttributeProto.INTS: lambda a: list(a.ints),
    AttributeProto.FLOAT: lambda a: a.f,
    AttributeProto.FLOATS: lambda a: list(a.floats),
    AttributeProto.STRING: lambda a: a.s,
    AttributeProto.STRINGS: lambda a: list(a.strings),
    AttributeProto.TENSOR: lambda a: tuple(a.t.dims),
}
