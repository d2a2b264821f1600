"""Sizes of values, and operations of products, convolutions, recurrent ops and attention, from shapes.

Each summed product counts 2. Sources: ONNX's operator documentation, and onnxruntime 1.31.1's for its own operators.
onnx infers no shape for results of the latter, so they count by their inputs. Quantized mixtures of experts and
attention by a carried state are not in the table: only their inputs and outputs count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from onnx import ValueInfoProto

from amp_rewrite.ir.attributes import equation, int_attribute, ints_attribute
from amp_rewrite.ir.op_classes import PRODUCTS, RECURRENT, TENSOR_CORE_STEP
from amp_rewrite.ir.shapes.onnx_shapes import Shape, declared_dims, fixed, shape_of
from amp_rewrite.ir.view import MAIN, Op, ValueId, View

UNKNOWN_SIZE = 1 << 16
"""Elements of a value without a known shape that is made from no value with one."""
_MOST = 1e60  # operations; more are no measure of an op, but of hostile dims
UNKNOWN_DIMENSION = 128
"""The size that stands for a free dimension: in most exported models a length of text, or a batch."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model's values, each computed once.

    Shapes are those that the main graph states; if one that it does not state is needed, onnx infers them all.
    """

    view: View
    known: dict[ValueId, int] = field(default_factory=dict, repr=False)

    def flops(self, op: Op) -> float:
        """Return the operations of a matrix product, convolution, recurrent op or attention; 0 for other ops."""
        return flops_of(self, op)

    def is_tiny(self, op: Op) -> bool:
        """True if a product is known to sum fewer terms than tensor cores multiply in a step."""
        if op.outputs[0] is None:
            return False
        for slot, value in enumerate(op.inputs[:2]):
            tensor = self.view.constant(value)
            if tensor is not None and op.kind != "Einsum":
                terms = summed_length(op, slot, tuple(tensor.dims))
                return terms is not None and terms < TENSOR_CORE_STEP
        return 0 < self.flops(op) < 2 * TENSOR_CORE_STEP * self.size(op.outputs[0])

    def shape(self, value: ValueId | None) -> tuple[int, ...]:
        """Return the shape with free dimensions filled in; () if it is unknown."""
        shape = self._shape(value) if value is not None else None
        return tuple(UNKNOWN_DIMENSION if d is None else d for d in shape or ())

    def size(self, value: ValueId | None) -> int:
        """Return the number of elements; without a shape, that of the largest value behind it. 0 for None."""
        if value is None:
            return 0
        pending = [value] if value not in self.known else []
        while pending:
            current = pending[-1]
            shape, op = self._shape(current), self.view.producer(current)
            operands = op.operands if op is not None and shape is None else []
            unseen = [v for v in operands if v not in self.known]
            if unseen:
                pending.extend(unseen)
                continue
            if shape is not None:
                size = prod(UNKNOWN_DIMENSION if d is None else d for d in shape)
            else:
                size = max((self.known[v] for v in operands), default=0) or UNKNOWN_SIZE
            self.known.setdefault(pending.pop(), size)
        return self.known[value]

    def is_stated(self, value: ValueId) -> bool:
        """True if the number of elements is known, without a guess for a free dimension."""
        shape = self._shape(value)
        return shape is not None and None not in shape

    def _shape(self, value: ValueId) -> Shape | None:
        known = self.view.values[value]
        if known.tensor is not None:
            return tuple(known.tensor.dims)
        stated = self._stated.get(known.name) if known.scope == MAIN else None
        dims = declared_dims(stated) if stated is not None else None
        return fixed(dims) if dims is not None else shape_of(self.view, value)

    @cached_property
    def _stated(self) -> Mapping[str, ValueInfoProto]:
        graph = self.view.model.proto.graph
        return {v.name: v for v in (*graph.value_info, *graph.input, *graph.output)}


_AXES = {
    **dict.fromkeys(("Conv", "ConvInteger"), (1, slice(1, None))),
    "ConvTranspose": (1, slice(1)),
    "GlobalAveragePool": (0, slice(2, None)),
}
"""The input whose axes an op sums up, and these axes."""


def summed_length(op: Op, slot: int, shape: Shape) -> int | None:
    """Return the length of the axis that a MatMul or Gemm sums, by the shape of one operand; None for a scalar."""
    if not shape:
        return None
    last = (slot == 0) is not bool(int_attribute(op.node, ("transA", "transB")[slot], 0))
    return shape[-1] if last or len(shape) == 1 else shape[-2]


def summed_terms(op: Op, shapes: Sequence[Shape | None], free: int = UNKNOWN_DIMENSION) -> int:
    """Return how many terms each result of a product or global pool adds up; `free` stands for an unknown length."""
    lengths: Iterable[int | None] = [None]
    if op.kind == "Einsum":
        lengths = _summed_labels(op, shapes).values()
    elif op.kind in _AXES:
        slot, axes = _AXES[op.kind]
        shape = shapes[slot]
        lengths = shape[axes] if shape is not None else [None]
    else:
        known = (summed_length(op, slot, shape) for slot, shape in enumerate(shapes[:2]) if shape)
        lengths = [next((length for length in known if length is not None), None)]
    groups = int_attribute(op.node, "group", 1) if op.kind == "ConvTranspose" else 1
    return max(1, prod(free if length is None else length for length in lengths) // max(1, groups))


def _summed_labels(op: Op, shapes: Sequence[Shape | None]) -> Mapping[str, int | None]:
    operands, result = equation(op.node)
    lengths: dict[str, int | None] = {}
    for labels, shape in zip(operands, shapes, strict=False):
        front, _, back = labels.partition("...")
        for at, label in (*enumerate(front), *enumerate(back, -len(back))):
            if label not in result:
                lengths[label] = shape[at] if shape is not None and -len(shape) <= at < len(shape) else None
    return lengths


def flops_of(sizes: Sizes, op: Op) -> float:
    """Return the operations of an op, exact for known shapes; 0 for ops that are not in the table, and where attributes
    contradict shapes."""
    count = _COUNTS.get(op.kind)
    try:
        flops = count(sizes, op) if count is not None else 0.0
    except (ArithmeticError, IndexError):  # a stride or a group of 0, sizes beyond all floats
        return 0.0
    return flops if 0 <= flops < _MOST else 0.0


def _input(op: Op, slot: int) -> ValueId | None:
    return op.inputs[slot] if slot < len(op.inputs) else None


def _dimension(sizes: Sizes, value: ValueId | None, axis: int) -> int:
    """Return one dimension of a value; UNKNOWN_DIMENSION if its rank is unknown, 0 for None."""
    if value is None:
        return 0
    shape = sizes.shape(value)
    return shape[axis] if -len(shape) <= axis < len(shape) else UNKNOWN_DIMENSION


# -- products and convolutions ---------------------------------------------------------------------------


def _summed(sizes: Sizes, op: Op) -> float:
    shapes = [sizes.shape(value) or None for value in (op.inputs if op.kind == "Einsum" else op.inputs[:1])]
    return 2.0 * sizes.size(op.outputs[0]) * summed_terms(op, shapes)


def _factors(sizes: Sizes, op: Op) -> float:
    """Count a product whose result has no shape: each element of one factor meets rows or columns of the other."""
    first, second = op.inputs[0], op.inputs[1]
    along = -1 if int_attribute(op.node, "transA", 0) else -2
    across = -2 if int_attribute(op.node, "transB", 0) else -1
    rows = _dimension(sizes, first, along) if len(sizes.shape(first)) != 1 else 1
    columns = _dimension(sizes, second, across)
    return 2.0 * max(sizes.size(first) * columns, sizes.size(second) * rows)


def _packed_weight(*columns: tuple[str, int]) -> Callable[[Sizes, Op], float]:
    """Count products with packed weights: attributes give their numbers of columns, each with a factor."""

    def count(sizes: Sizes, op: Op) -> float:
        return 2.0 * sizes.size(op.inputs[0]) * sum(times * int_attribute(op.node, name, 0) for name, times in columns)

    return count


def _convolution(sizes: Sizes, op: Op) -> float:
    return 2.0 * _convolved(sizes, op) * prod(sizes.shape(op.inputs[1])[1:])


_CHANNELS_LAST = {"com.microsoft::NhwcConv", "com.microsoft::NhwcFusedConv"}
"""Convolutions whose weight has maps, window, channels, in this order."""


def _convolved(sizes: Sizes, op: Op) -> float:
    """Return the number of results; if they have no shape, one for each stride and map, as if it were padded."""
    weight = sizes.shape(op.inputs[1])
    if sizes.shape(op.outputs[0]) or not weight:
        return sizes.size(op.outputs[0])
    strides, groups = ints_attribute(op.node, "strides"), int_attribute(op.node, "group", 1)
    channels = weight[-1 if op.kind in _CHANNELS_LAST else 1] * groups if len(weight) > 1 else 1
    return sizes.size(op.inputs[0]) / channels * weight[0] / prod(strides)


def _spread(sizes: Sizes, op: Op) -> float:
    """Count a ConvTranspose, or a convolution by channel: each input element goes over a window."""
    return 2.0 * sizes.size(op.inputs[0]) * prod(sizes.shape(op.inputs[1])[1:])


def _recurrent(sizes: Sizes, op: Op) -> float:
    steps = prod(sizes.shape(op.inputs[0])[:2])
    return 2.0 * steps * (sizes.size(op.inputs[1]) + sizes.size(op.inputs[2]))


def _experts(sizes: Sizes, op: Op) -> float:
    """Count a mixture: each token goes through the two or three layers of `k` experts."""
    layers = (_input(op, slot) for slot in (2, 4, 6))
    weights = sum(prod(sizes.shape(layer)[1:]) for layer in layers if layer is not None)
    tokens = sizes.size(op.inputs[0]) / max(1, _dimension(sizes, op.inputs[0], -1))
    return 2.0 * tokens * int_attribute(op.node, "k", 1) * weights


# -- attention -------------------------------------------------------------------------------------------


def _scores(query: float, keys: int) -> float:
    """Count scores and the values that they weigh: two products of each element of a query with all keys."""
    return 4.0 * query * keys


def _attention(sizes: Sizes, op: Op) -> float:
    """Count ONNX's Attention; keys are along the last dimension but one, with or without heads before it."""
    keys = _dimension(sizes, op.inputs[1], -2) + _dimension(sizes, _input(op, 4), -2)
    return _scores(sizes.size(op.inputs[0]), keys)


def _heads(past: int) -> Callable[[Sizes, Op], float]:
    """Count attention over projected queries, alone or packed with keys and values; `past`: the input of past keys."""

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
    """Count attention that first multiplies by the weights of queries, keys and values. `past`: the input of past keys
    and values; `offsets`: that of the places of tokens without padding, by row and column."""

    def count(sizes: Sizes, op: Op) -> float:
        read, columns = op.inputs[0], _dimension(sizes, op.inputs[1], -1)
        projected = sizes.size(read) / max(1, _dimension(sizes, read, -1)) * columns / 3
        keys = _dimension(sizes, read if offsets is None else _input(op, offsets), 1)
        keys += _dimension(sizes, _input(op, past), -2) if past is not None else 0
        return 2.0 * sizes.size(read) * columns + _scores(projected, keys)

    return count


def _packed_heads(sizes: Sizes, op: Op) -> float:
    """Count attention over tokens without padding: as many keys as the longest row has places."""
    size = sizes.size(op.inputs[0]) / (3 if _input(op, 1) is None else 1)
    return _scores(size, _dimension(sizes, _input(op, 4), 1))


def _windowed(sizes: Sizes, op: Op) -> float:
    """Count projections, and scores of the tokens around each token; global tokens count like the others."""
    size = sizes.size(op.inputs[0])
    return 2.0 * size * _dimension(sizes, op.inputs[1], -1) + _scores(size, 2 * int_attribute(op.node, "window", 0))


_Table = tuple[tuple[Callable[[Sizes, Op], float], str], ...]
_ONNX: _Table = (
    (_attention, "Attention"),
    (_convolution, "Conv DeformConv"),
    (_summed, " ".join(sorted(PRODUCTS))),
    (_recurrent, " ".join(sorted(RECURRENT))),
    (_spread, "CausalConvWithState ConvTranspose"),
)
_CONTRIB: _Table = (
    (_convolution, "FusedConv NhwcConv NhwcFusedConv"),
    (_experts, "MoE"),
    (_factors, "FusedGemm FusedMatMul FusedMatMulActivation GemmFastGelu GemmFloat8 TransposeMatMul"),
    (_heads(past=3), "GroupQueryAttention SparseAttention"),
    (_heads(past=5), "DecoderMaskedMultiHeadAttention"),
    (_heads(past=6), "MultiHeadAttention"),
    (_packed_heads, "PackedMultiHeadAttention"),
    (_packed_weight(("N", 1)), "MatMulBnb4 MatMulNBits"),
    (_packed_weight(("N", 2)), "MatMulNBitsMlp"),
    (_packed_weight(("Nq", 1), ("Nkv", 2)), "MatMulNBitsQkv"),
    (_projecting(offsets=3), "PackedAttention"),
    (_projecting(past=4), "Attention DecoderMaskedSelfAttention"),
    (_spread, "CausalConvWithState ConvTransposeWithDynamicPads"),
    (_windowed, "LongformerAttention"),
)
_COUNTS = {
    domain + name: count
    for domain, table in (("", _ONNX), ("com.microsoft::", _CONTRIB))
    for count, names in table
    for name in names.split()
}
