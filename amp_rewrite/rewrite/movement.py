"""The operators that only move or repeat numbers, in numpy.

To run them by onnx's reference would load all of it, which takes longer than to look at most models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import onnx.helper
from onnx import NodeProto

from amp_rewrite.files.casting import Array
from amp_rewrite.ir.schema import normal_domain
from amp_rewrite.rewrite.bounded import MOST_ELEMENTS

Attributes = Mapping[str, Any]

# What numpy raises for shapes and axes that do not go together, and a table for what it does not hold.
_FAULTS = (ValueError, TypeError, IndexError, KeyError)


def moved(
    nodes: Iterable[NodeProto], result: str, feed: Mapping[str, Array], most: int = MOST_ELEMENTS
) -> Array | None:
    """Run nodes on a feed of their inputs; return `result`. None where one does more than move its input, would give
    more than `most` elements together, or cannot be run: onnx's reference may tell why."""
    known = dict(feed)
    try:
        for node in nodes:
            row = _ROWS[node.op_type] if normal_domain(node.domain) == "" else None
            if row is None or len(node.output) != 1:
                return None
            attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            operands = [known[name] for name in node.input]
            if node.op_type == "Concat" and sum(x.size for x in operands) > most:
                return None
            array = known[node.output[0]] = row(attributes, *operands)
            most -= array.size
            if most < 0:
                return None
        return known[result]
    except _FAULTS:
        return None


def _reshape(attributes: Attributes, x: Array, shape: Array) -> Array:
    kept = not attributes.get("allowzero", 0)
    return x.reshape([x.shape[i] if size == 0 and kept else size for i, size in enumerate(_integers(shape))])


def _unsqueeze(attributes: Attributes, x: Array, axes: Array | None = None) -> Array:
    return np.expand_dims(x, tuple(attributes["axes"]) if axes is None else _integers(axes))


def _squeeze(attributes: Attributes, x: Array, axes: Array | None = None) -> Array:
    named = attributes.get("axes") if axes is None else _integers(axes)
    return x.squeeze(None if named is None else tuple(named))


def _expand(attributes: Attributes, x: Array, shape: Array) -> Array:
    return np.broadcast_to(x, np.broadcast_shapes(x.shape, _integers(shape)))


def _shape(attributes: Attributes, x: Array) -> Array:
    return np.array(x.shape[attributes.get("start", 0) : attributes.get("end")], np.int64)


def _slice(attributes: Attributes, x: Array, starts: Array, ends: Array, *more: Array) -> Array:
    axes = _integers(more[0]) if more else tuple(range(len(starts)))
    steps = _integers(more[1]) if len(more) > 1 else (1,) * len(axes)
    cut = [slice(None)] * x.ndim
    for axis, start, end, step in zip(axes, _integers(starts), _integers(ends), steps, strict=True):
        cut[axis] = slice(start, end, step)
    return x[tuple(cut)]


def _integers(values: Array) -> tuple[int, ...]:
    return tuple(values.astype(np.int64).reshape(-1).tolist())


_ROWS: Mapping[str, Callable[..., Array]] = {
    "Concat": lambda attributes, *parts: np.concatenate(parts, axis=attributes["axis"]),
    "Expand": _expand,
    "Identity": lambda attributes, x: x,
    "Reshape": _reshape,
    "Shape": _shape,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Transpose": lambda attributes, x: x.transpose(attributes.get("perm")),
    "Unsqueeze": _unsqueeze,
}
"""Each of its attributes and of what it reads."""
