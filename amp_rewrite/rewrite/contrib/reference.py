"""The formulas of onnxruntime's own operators, by its operator document, in the precision of the feed.

Source: docs/ContribOperators.md of onnxruntime 1.31. That its kernels compute the same is a test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx.helper
from onnx import NodeProto

from amp_rewrite.files.casting import Array

DOMAIN = "com.microsoft"

_Given = Sequence[Array | None]
_Stated = Mapping[str, Any]


def computed(node: NodeProto, feed: Mapping[str, Array]) -> dict[str, Array]:
    """The results of a node of this domain by name, for what it reads by name.

    KeyError for an operator that has no row, and for a value that is not fed; ValueError for shapes that do not fit.
    """
    stated = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    given = [feed[name] if name else None for name in node.input]
    with np.errstate(all="ignore"):
        made = FORMULAS[node.op_type](given, stated)
    return {name: array for name, array in zip(node.output, made, strict=False) if name and array is not None}


def _at(given: _Given, slot: int) -> Array | None:
    return given[slot] if slot < len(given) else None


def _plus(array: Array, other: Array | None) -> Array:
    return array if other is None else array + other


def _required(given: _Given, slot: int) -> Array:
    found = _at(given, slot)
    if found is None:
        raise ValueError(f"input {slot} is missing")
    return found


def _layer_norm(given: _Given, stated: _Stated) -> list[Array | None]:
    """(x + skip + bias) normalized over the last axis, times gamma, plus beta; and that sum."""
    total = _plus(_required(given, 0) + _required(given, 1), _at(given, 4))
    centered = total - total.mean(-1, keepdims=True)
    variance = np.mean(centered**2, -1, keepdims=True)
    normal = centered / np.sqrt(variance + stated["epsilon"])
    return [_plus(normal * _required(given, 2), _at(given, 3)), None, None, total]


def _rms_norm(given: _Given, stated: _Stated) -> list[Array | None]:
    """(x + skip + bias) divided by its root mean square over the last axis, times gamma, and that sum."""
    total = _plus(_required(given, 0) + _required(given, 1), _at(given, 3))
    normal = total / np.sqrt(np.mean(total**2, -1, keepdims=True) + stated["epsilon"])
    return [normal * _required(given, 2), None, None, total]


def _gelu(given: _Given, stated: _Stated) -> list[Array | None]:
    """x Φ(x), of x plus a bias where there is one."""
    x = _plus(_required(given, 0), _at(given, 1))
    erf = np.vectorize(math.erf, otypes=[x.dtype])(x / math.sqrt(2))
    return [x * (1 + erf) / 2]


def _fast_gelu(given: _Given, stated: _Stated) -> list[Array | None]:
    """The approximation by tanh. The document rounds √(2/π) and 0.044715 √(2/π) to six digits, its kernels do not."""
    x = _plus(_required(given, 0), _at(given, 1))
    root = math.sqrt(2 / math.pi)
    return [x * (1 + np.tanh(root * x + 0.044715 * root * x**3)) / 2]


def _quick_gelu(given: _Given, stated: _Stated) -> list[Array | None]:
    x = _required(given, 0)
    return [x / (1 + np.exp(-stated["alpha"] * x))]


def _product(given: _Given, stated: _Stated) -> list[Array | None]:
    """alpha · A · B, either of them with its last two axes swapped first."""
    a, b = (
        _required(given, slot).swapaxes(-1, -2) if stated.get(name) else _required(given, slot)
        for slot, name in enumerate(("transA", "transB"))
    )
    return [stated.get("alpha", 1.0) * (a @ b)]


def _attention(given: _Given, stated: _Stated) -> list[Array | None]:
    """softmax(scale · Q Kᵀ + added) V, of each head; keys and values may have their heads split off already.

    `unidirectional`: a token sees those up to its own.
    """
    heads = stated["num_heads"]
    q, k, v = (_split(_required(given, slot), heads) for slot in range(3))
    scores = stated["scale"] * (q @ k.swapaxes(-1, -2))
    scores = _plus(scores, _at(given, 5))
    if stated.get("unidirectional"):
        scores = np.where(np.tri(*scores.shape[-2:]) > 0, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    attended = (weights / weights.sum(-1, keepdims=True)) @ v
    batch, _, tokens, _ = attended.shape
    return [attended.swapaxes(1, 2).reshape(batch, tokens, -1)]


def _split(array: Array, heads: int) -> Array:
    """Heads before tokens."""
    if array.ndim == _SPLIT:
        return array
    batch, tokens, _ = array.shape
    return array.reshape(batch, tokens, heads, -1).swapaxes(1, 2)


_SPLIT = 4  # axes: batch, heads, tokens, width

FORMULAS: Mapping[str, Callable[[_Given, _Stated], list[Array | None]]] = {
    "BiasGelu": _gelu,
    "FastGelu": _fast_gelu,
    "FusedMatMul": _product,
    "Gelu": _gelu,
    "MultiHeadAttention": _attention,
    "QuickGelu": _quick_gelu,
    "SkipLayerNormalization": _layer_norm,
    "SkipSimplifiedLayerNormalization": _rms_norm,
}
