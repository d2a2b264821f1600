"""The operators that only move or repeat numbers, in numpy.

To run them by onnx's reference would load all of it, which takes longer than most models take to be looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx.helper
from onnx import NodeProto

from amp_rewrite.files.casting import Array
from amp_rewrite.ir.schema import normal_domain

Stated = Mapping[str, Any]

# What numpy raises for shapes and axes that do not go together, and a table for what it does not hold.
_FAULTS = (ValueError, TypeError, IndexError, KeyError)


def moved(nodes: Iterable[NodeProto], result: str, feed: Mapping[str, Array]) -> Array | None:
    """Run nodes on a feed of their inputs; return `result`. None where one does more than move its input,
    or cannot be run: onnx's reference may tell why."""
    known = dict(feed)
    try:
        for node in nodes:
            row = _ROWS[node.op_type] if normal_domain(node.domain) == "" else None
            if row is None or len(node.output) != 1:
                return None
            stated = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            known[node.output[0]] = row([known[name] for name in node.input], stated)
        return known[result]
    except _FAULTS:
        return None


def _identity(read: Sequence[Array], stated: Stated) -> Array:
    (x,) = read
    return x


def _transpose(read: Sequence[Array], stated: Stated) -> Array:
    (x,) = read
    return x.transpose(stated.get("perm"))


def _reshape(read: Sequence[Array], stated: Stated) -> Array:
    x, shape = read
    kept = not stated.get("allowzero", 0)
    return x.reshape([x.shape[i] if size == 0 and kept else size for i, size in enumerate(_integers(shape))])


def _unsqueeze(read: Sequence[Array], stated: Stated) -> Array:
    x, *axes = read
    return np.expand_dims(x, _integers(axes[0]) if axes else tuple(stated["axes"]))


def _squeeze(read: Sequence[Array], stated: Stated) -> Array:
    x, *axes = read
    named = _integers(axes[0]) if axes else stated.get("axes")
    return x.squeeze(None if named is None else tuple(named))


def _expand(read: Sequence[Array], stated: Stated) -> Array:
    x, shape = read
    return np.broadcast_to(x, np.broadcast_shapes(x.shape, _integers(shape)))


def _concat(read: Sequence[Array], stated: Stated) -> Array:
    return np.concatenate(read, axis=stated["axis"])


def _shape(read: Sequence[Array], stated: Stated) -> Array:
    (x,) = read
    return np.array(x.shape[stated.get("start", 0) : stated.get("end")], np.int64)


def _slice(read: Sequence[Array], stated: Stated) -> Array:
    x, starts, ends, *more = read
    axes = _integers(more[0]) if more else tuple(range(len(starts)))
    steps = _integers(more[1]) if len(more) > 1 else (1,) * len(axes)
    cut = [slice(None)] * x.ndim
    for axis, start, end, step in zip(axes, _integers(starts), _integers(ends), steps, strict=True):
        cut[axis] = slice(start, end, step)
    return x[tuple(cut)]


def _integers(values: Array) -> tuple[int, ...]:
    return tuple(values.astype(np.int64).reshape(-1).tolist())


_ROWS: Mapping[str, Callable[[Sequence[Array], Stated], Array]] = {
    "Concat": _concat,
    "Expand": _expand,
    "Identity": _identity,
    "Reshape": _reshape,
    "Shape": _shape,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
"""Each of what it reads and of its attributes."""
