"""Keys of ops: digests that ignore names and types, so that two reports recognize the same op."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache

from amp_rewrite.reports.attributes import Plain


def key_of(kind: str, attributes: Plain, weights: Mapping[int, tuple[int, ...]]) -> str:
    """Return the key of an op: its kind, and the shape of each weight that it reads, by input slot. 12 hex digits.

    Tensors among the attributes count by their shapes; bodies do not count.
    """
    if not attributes:
        return _plain_key(kind, tuple(weights.items()))
    stated = sorted([f"{name}={value}" for _, name, value in attributes if name not in _TYPE_ATTRIBUTES])
    shapes = (f"{slot}:{shape}" for slot, shape in weights.items())
    return _digest("\n".join((kind, *stated, *shapes)))


@lru_cache(maxsize=1 << 12)
def _plain_key(kind: str, weights: Iterable[tuple[int, tuple[int, ...]]]) -> str:
    return _digest("\n".join((kind, *(f"{slot}:{shape}" for slot, shape in weights))))


@lru_cache(maxsize=1 << 12)  # most ops of a model are like many others
def _digest(text: str) -> str:
    return hashlib.blake2s(text.encode("utf-8", "replace"), digest_size=6).hexdigest()


# They name an element type, which is what a conversion changes.
_TYPE_ATTRIBUTES = {"to", "dtype", "output_dtype", "output_datatype", "stash_type", "saturate", "round_mode"}
