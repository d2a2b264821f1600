"""How many operations products, convolutions, recurrent ops and attention take, from the shapes of what they read.

2 for each product that is summed. Inputs are those of ONNX's operator documentation and of onnxruntime 1.31.1's for
its own operators, of whose results onnx infers no shape; so these count by their inputs. Quantized mixtures of experts
and attention by a carried state are not in the table: they count by what they read and write alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Protocol

from amp_rewrite.ir.schema import attribute, int_attribute
from amp_rewrite.ir.view import Op, ValueId

UNKNOWN_DIMENSION = 128
"""What a free dimension counts as: in most exported models a length of text, or a batch."""


class Sizes(Protocol):
    """What is known of values: a shape with free dimensions filled in, () where it is not known; and elements."""

    def shape(self, value: ValueId | None) -> tuple[int, ...]:
        """The shape."""
        ...

    def size(self, value: ValueId | None) -> int:
        """The elements; 0 of None."""
        ...


def operations(sizes: Sizes, op: Op) -> float:
    """The operations of an op, exact where shapes are; 0 of ops that are not in the table."""
    count = _COUNTS.get(op.kind)
    return count(sizes, op) if count is not None else 0.0


def _input(op: Op, slot: int) -> ValueId | None:
    return op.inputs[slot] if slot < len(op.inputs) else None


def _dimension(sizes: Sizes, value: ValueId | None, axis: int) -> int:
    """One dimension of a value, as UNKNOWN_DIMENSION where its rank is not known; 0 of None."""
    if value is None:
        return 0
    shape = sizes.shape(value)
    return shape[axis] if -len(shape) <= axis < len(shape) else UNKNOWN_DIMENSION


# -- products and convolutions ---------------------------------------------------------------------------


def _product(sizes: Sizes, op: Op) -> float:
    """Of a MatMul: one sum of as many products as the first factor has columns, for each result."""
    return 2.0 * sizes.size(op.outputs[0]) * _dimension(sizes, op.inputs[0], -1)


def _gemm(sizes: Sizes, op: Op) -> float:
    summed = 0 if int_attribute(op.node, "transA", 0) else -1
    return 2.0 * sizes.size(op.outputs[0]) * _dimension(sizes, op.inputs[0], summed)


def _factors(sizes: Sizes, op: Op) -> float:
    """Of a product whose result has no shape: each element of one factor meets the rows or columns of the other."""
    first, second = op.inputs[0], op.inputs[1]
    along = -1 if int_attribute(op.node, "transA", 0) else -2
    across = -2 if int_attribute(op.node, "transB", 0) else -1
    rows = _dimension(sizes, first, along) if len(sizes.shape(first)) != 1 else 1
    columns = _dimension(sizes, second, across)
    return 2.0 * max(sizes.size(first) * columns, sizes.size(second) * rows)


def _packed_weight(*columns: tuple[str, int]) -> Callable[[Sizes, Op], float]:
    """Of products with weights in a packed form: attributes say how many columns they have, so many times."""

    def count(sizes: Sizes, op: Op) -> float:
        return 2.0 * sizes.size(op.inputs[0]) * sum(times * int_attribute(op.node, name, 0) for name, times in columns)

    return count


def _einsum(sizes: Sizes, op: Op) -> float:
    """One sum over all letters that the result has not, for each result."""
    stated = attribute(op.node, "equation")
    equation = stated.s.decode("utf-8", "replace").replace(" ", "") if stated is not None else ""
    terms, arrow, result = equation.partition("->")
    summed: dict[str, int] = {}
    for term, value in zip(terms.split(","), op.inputs, strict=False):
        front, _, back = term.partition("...")
        for at, letter in (*enumerate(front), *enumerate(back, -len(back))):
            if letter not in result if arrow else terms.count(letter) > 1:  # unstated: what stands there once
                summed[letter] = _dimension(sizes, value, at)
    return 2.0 * sizes.size(op.outputs[0]) * prod(summed.values())


def _convolution(sizes: Sizes, op: Op) -> float:
    """One sum over a window for each result."""
    return 2.0 * _convolved(sizes, op) * prod(sizes.shape(op.inputs[1])[1:])


def _convolved(sizes: Sizes, op: Op) -> float:
    """The results of a convolution; where they have no shape, one for each stride and map, as if it were padded."""
    weight = sizes.shape(op.inputs[1])
    if sizes.shape(op.outputs[0]) or not weight:
        return sizes.size(op.outputs[0])
    strides, groups = attribute(op.node, "strides"), int_attribute(op.node, "group", 1)
    channels = weight[1] * groups if len(weight) > 1 else 1
    return sizes.size(op.inputs[0]) / channels * weight[0] / prod(strides.ints if strides is not None else ())


def _spread(sizes: Sizes, op: Op) -> float:
    """Each element of what a ConvTranspose reads goes over a window; as of a convolution of each channel for itself."""
    return 2.0 * sizes.size(op.inputs[0]) * prod(sizes.shape(op.inputs[1])[1:])


def _recurrent(sizes: Sizes, op: Op) -> float:
    """Each step multiplies what it reads by W and the state by R."""
    steps = prod(sizes.shape(op.inputs[0])[:2])
    return 2.0 * steps * (sizes.size(op.inputs[1]) + sizes.size(op.inputs[2]))


def _experts(sizes: Sizes, op: Op) -> float:
    """Each token goes through the two or three layers of `k` experts."""
    layers = (_input(op, slot) for slot in (2, 4, 6))
    weights = sum(prod(sizes.shape(layer)[1:]) for layer in layers if layer is not None)
    tokens = sizes.size(op.inputs[0]) / max(1, _dimension(sizes, op.inputs[0], -1))
    return 2.0 * tokens * int_attribute(op.node, "k", 1) * weights


# -- attention -------------------------------------------------------------------------------------------


def _scores(query: float, keys: int) -> float:
    """Scores, and what they select: two products of each element of a query with all keys."""
    return 4.0 * query * keys


def _attention(sizes: Sizes, op: Op) -> float:
    """Of ONNX's own; keys lie in the last dimension but one, with heads before it or without."""
    keys = _dimension(sizes, op.inputs[1], -2) + _dimension(sizes, _input(op, 4), -2)
    return _scores(sizes.size(op.inputs[0]), keys)


def _heads(past: int) -> Callable[[Sizes, Op], float]:
    """Of onnxruntime's with projected queries, alone or packed with keys and values; `past`: where past keys are."""

    def count(sizes: Sizes, op: Op) -> float:
        query, key = op.inputs[0], _input(op, 1)
        size = float(sizes.size(query))
        if key is None:
            heads = int_attribute(op.node, "num_heads", 1)
            size *= heads / (heads + 2 * int_attribute(op.node, "kv_num_heads", heads))
        new = key if key is not None else query
        length = _dimension(sizes, new, 2 if len(sizes.shape(new)) == 4 else 1)
        return _scores(size, length + _dimension(sizes, _input(op, past), -2))

    return count


def _projecting(past: int | None = None, offsets: int | None = None) -> Callable[[Sizes, Op], float]:
    """Of onnxruntime's that multiply by the weights of queries, keys and values first. `past`: where past keys and
    values are; `offsets`: where tokens without padding have their places, by row and column."""

    def count(sizes: Sizes, op: Op) -> float:
        read, columns = op.inputs[0], _dimension(sizes, op.inputs[1], -1)
        projected = sizes.size(read) / max(1, _dimension(sizes, read, -1)) * columns / 3
        keys = _dimension(sizes, read if offsets is None else _input(op, offsets), 1)
        keys += _dimension(sizes, _input(op, past), -2) if past is not None else 0
        return 2.0 * sizes.size(read) * columns + _scores(projected, keys)

    return count


def _packed_heads(sizes: Sizes, op: Op) -> float:
    """Of tokens without padding: as many keys as the longest row has places."""
    size = sizes.size(op.inputs[0]) / (3 if _input(op, 1) is None else 1)
    return _scores(size, _dimension(sizes, _input(op, 4), 1))


def _windowed(sizes: Sizes, op: Op) -> float:
    """Projections, and the scores of the tokens around each; those that see everything are counted like the others."""
    size = sizes.size(op.inputs[0])
    return 2.0 * size * _dimension(sizes, op.inputs[1], -1) + _scores(size, 2 * int_attribute(op.node, "window", 0))


_COUNTS: Mapping[str, Callable[[Sizes, Op], float]] = {
    "Attention": _attention,
    "CausalConvWithState": _spread,
    "Conv": _convolution,
    "ConvTranspose": _spread,
    "DeformConv": _convolution,
    "Einsum": _einsum,
    "GRU": _recurrent,
    "Gemm": _gemm,
    "LSTM": _recurrent,
    "MatMul": _product,
    "RNN": _recurrent,
    "com.microsoft::Attention": _projecting(past=4),
    "com.microsoft::CausalConvWithState": _spread,
    "com.microsoft::ConvTransposeWithDynamicPads": _spread,
    "com.microsoft::DecoderMaskedMultiHeadAttention": _heads(past=5),
    "com.microsoft::DecoderMaskedSelfAttention": _projecting(past=4),
    "com.microsoft::FusedConv": _convolution,
    "com.microsoft::FusedGemm": _factors,
    "com.microsoft::FusedMatMul": _factors,
    "com.microsoft::FusedMatMulActivation": _factors,
    "com.microsoft::GemmFastGelu": _factors,
    "com.microsoft::GemmFloat8": _factors,
    "com.microsoft::GroupQueryAttention": _heads(past=3),
    "com.microsoft::LongformerAttention": _windowed,
    "com.microsoft::MatMulBnb4": _packed_weight(("N", 1)),
    "com.microsoft::MatMulNBits": _packed_weight(("N", 1)),
    "com.microsoft::MatMulNBitsMlp": _packed_weight(("N", 2)),
    "com.microsoft::MatMulNBitsQkv": _packed_weight(("Nq", 1), ("Nkv", 2)),
    "com.microsoft::MoE": _experts,
    "com.microsoft::MultiHeadAttention": _heads(past=6),
    "com.microsoft::NhwcConv": _convolution,
    "com.microsoft::NhwcFusedConv": _convolution,
    "com.microsoft::PackedAttention": _projecting(offsets=3),
    "com.microsoft::PackedMultiHeadAttention": _packed_heads,
    "com.microsoft::SparseAttention": _heads(past=3),
    "com.microsoft::TransposeMatMul": _factors,
}
