"""The formulas of onnxruntime's own operators, by its operator document, in the precision of the feed.

Source: docs/ContribOperators.md of onnxruntime 1.31. That its kernels compute the same is a test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx.helper
from onnx import NodeProto

from amp_rewrite.files.casting import Array

DOMAIN = "com.microsoft"

_Attributes = Mapping[str, Any]
_Results = tuple[Array | None, ...]


def computed(node: NodeProto, feed: Mapping[str, Array | None]) -> dict[str, Array]:
    """Return the results of a node of this domain by name, for operands by name.

    KeyError for an operator without a row, and for a value that is not fed; ValueError for shapes that do not fit.
    """
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    operands = [feed[name] if name else None for name in node.input]
    with np.errstate(all="ignore"):
        results = FORMULAS[node.op_type](attributes, *operands)
    return {name: array for name, array in zip(node.output, results, strict=False) if name and array is not None}


def _plus(array: Array, other: Array | None) -> Array:
    return array if other is None else array + other


def _layer_norm(
    attributes: _Attributes, x: Array, skip: Array, gamma: Array, beta: Array | None = None, bias: Array | None = None
) -> _Results:
    """(x + skip + bias) normalized over the last axis, times gamma, plus beta; and that sum."""
    total = _plus(x + skip, bias)
    centered = total - total.mean(-1, keepdims=True)
    normal = centered / np.sqrt(np.mean(centered**2, -1, keepdims=True) + attributes["epsilon"])
    return _plus(normal * gamma, beta), None, None, total


def _rms_norm(attributes: _Attributes, x: Array, skip: Array, gamma: Array, bias: Array | None = None) -> _Results:
    """(x + skip + bias) divided by its root mean square over the last axis, times gamma; and that sum."""
    total = _plus(x + skip, bias)
    normal = total / np.sqrt(np.mean(total**2, -1, keepdims=True) + attributes["epsilon"])
    return normal * gamma, None, None, total


def _gelu(attributes: _Attributes, x: Array, bias: Array | None = None) -> _Results:
    x = _plus(x, bias)
    erf = np.vectorize(math.erf, otypes=[x.dtype])(x / math.sqrt(2))
    return (x * (1 + erf) / 2,)


def _fast_gelu(attributes: _Attributes, x: Array, bias: Array | None = None) -> _Results:
    """The approximation by tanh. The document rounds √(2/π) and 0.044715 √(2/π) to six digits, its kernels do not."""
    x = _plus(x, bias)
    root = math.sqrt(2 / math.pi)
    return (x * (1 + np.tanh(root * x + 0.044715 * root * x**3)) / 2,)


def _quick_gelu(attributes: _Attributes, x: Array) -> _Results:
    return (x / (1 + np.exp(-attributes["alpha"] * x)),)


def _product(attributes: _Attributes, a: Array, b: Array) -> _Results:
    a = a.swapaxes(-1, -2) if attributes.get("transA") else a
    b = b.swapaxes(-1, -2) if attributes.get("transB") else b
    return (attributes.get("alpha", 1.0) * (a @ b),)


def _attention(attributes: _Attributes, *operands: Array | None) -> _Results:
    """softmax(scale · Q Kᵀ + added) V, of each head; keys and values may have their heads split off already.

    `unidirectional`: a token sees those up to its own.
    """
    q, k, v = (_split(operand, attributes["num_heads"]) for operand in operands[:3] if operand is not None)
    scores = attributes["scale"] * (q @ k.swapaxes(-1, -2))
    scores = _plus(scores, operands[_ADDED] if len(operands) > _ADDED else None)
    if attributes.get("unidirectional"):
        scores = np.where(np.tri(*scores.shape[-2:]) > 0, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    attended = (weights / weights.sum(-1, keepdims=True)) @ v
    batch, _, tokens, _ = attended.shape
    return (attended.swapaxes(1, 2).reshape(batch, tokens, -1),)


def _grouped(attributes: _Attributes, q: Array, k: Array, v: Array, *more: Array | None) -> _Results:
    """Causal attention, each head of keys and values for several of queries; all tokens are new, and count.

    With `do_rotary` queries and keys are rotated from the first position on.
    """
    heads, fewer = attributes["num_heads"], attributes["kv_num_heads"]
    q, k, v = _split(q, heads), _split(k, fewer), _split(v, fewer)
    if attributes.get("do_rotary"):
        cos, sin = (table for table in more[-2:] if table is not None)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    repeated = (np.repeat(x, heads // fewer, axis=1) for x in (k, v))
    return _attention({**attributes, "unidirectional": 1}, q, *repeated)


def _rotary(attributes: _Attributes, x: Array, first: Array, cos: Array, sin: Array) -> _Results:
    """The rotation of each head from one position on; the heads may be split off already."""
    heads = x if x.ndim == _SPLIT else _split(x, attributes["num_heads"])
    found = rotated(heads, cos[int(first[0]) :], sin[int(first[0]) :])
    return (found if x.ndim == _SPLIT else found.swapaxes(1, 2).reshape(x.shape),)


def rotated(heads: Array, cos: Array, sin: Array) -> Array:
    """Return x · cos + (−second half, first half) · sin, for tables of positions by half of the features."""
    tokens = heads.shape[2]
    a, b = np.split(heads, 2, axis=-1)
    cos, sin = cos[:tokens], sin[:tokens]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _split(array: Array, heads: int) -> Array:
    if array.ndim == _SPLIT:
        return array
    batch, tokens, _ = array.shape
    return array.reshape(batch, tokens, heads, -1).swapaxes(1, 2)


_ADDED = 5  # the operand that is added to scores
_SPLIT = 4  # axes: batch, heads, tokens, width

FORMULAS: Mapping[str, Callable[..., _Results]] = {
    "BiasGelu": _gelu,
    "FastGelu": _fast_gelu,
    "FusedMatMul": _product,
    "Gelu": _gelu,
    "GroupQueryAttention": _grouped,
    "MultiHeadAttention": _attention,
    "QuickGelu": _quick_gelu,
    "RotaryEmbedding": _rotary,
    "SkipLayerNormalization": _layer_norm,
    "SkipSimplifiedLayerNormalization": _rms_norm,
}
