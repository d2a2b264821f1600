"""Sizes of values, and operations of products, convolutions, recurrent ops and attention, from shapes.

Each summed product counts 2. Sources: ONNX's operator documentation, and onnxruntime 1.31.1's for its own operators,
of which those count that exporters write. onnx infers no shape for their results, so they count by their inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from onnx import ValueInfoProto

from amp_rewrite.ir.attributes import equation, int_attribute
from amp_rewrite.ir.op_classes import PRODUCTS, RECURRENT, TENSOR_CORE_STEP
from amp_rewrite.ir.shapes import Shape, declared_dims, fixed, shape_of
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

    def is_short(self, op: Op) -> bool:
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
        """Return the number of elements; without a shape, of the largest value behind it. 0 for None."""
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
    """Return the length of a MatMul's or Gemm's summed axis, by the shape of one operand; None for a scalar."""
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
    """Return the operations of an op, exact for known shapes; 0 for other ops, and if attributes contradict shapes."""
    count = _COUNTS.get(op.kind)
    try:
        flops = count(sizes, op) if count is not None else 0.0
    except (ArithmeticError, IndexError):  # a stride or a group of 0, sizes beyond all floats
        return 0.0
    return flops if 0 <= flops < _MOST else 0.0


def _input(op: Op, slot: int) -> ValueId | None:
    return op.inputs[slot] if slot < len(op.inputs) else None


def _dimension(sizes: Sizes, value: ValueId | None, axis: int) -> int:
    if value is None:
        return 0
    shape = sizes.shape(value)
    return shape[axis] if -len(shape) <= axis < len(shape) else UNKNOWN_DIMENSION


# -- products and convolutions ---------------------------------------------------------------------------


def _summed(sizes: Sizes, op: Op) -> float:
    shapes = [sizes.shape(value) or None for value in (op.inputs if op.kind == "Einsum" else op.inputs[:1])]
    return 2.0 * sizes.size(op.outputs[0]) * summed_terms(op, shapes)


def _factors(sizes: Sizes, op: Op) -> float:
    """Count a product without a known result: each element of one factor meets rows or columns of the other."""
    first, second = op.inputs[0], op.inputs[1]
    along = -1 if int_attribute(op.node, "transA", 0) else -2
    across = -2 if int_attribute(op.node, "transB", 0) else -1
    rows = _dimension(sizes, first, along) if len(sizes.shape(first)) != 1 else 1
    columns = _dimension(sizes, second, across)
    return 2.0 * max(sizes.size(first) * columns, sizes.size(second) * rows)


def _packed_weight(sizes: Sizes, op: Op) -> float:
    return 2.0 * sizes.size(op.inputs[0]) * int_attribute(op.node, "N", 0)


def _convolution(sizes: Sizes, op: Op) -> float:
    return 2.0 * sizes.size(op.outputs[0]) * prod(sizes.shape(op.inputs[1])[1:])


def _spread(sizes: Sizes, op: Op) -> float:
    return 2.0 * sizes.size(op.inputs[0]) * prod(sizes.shape(op.inputs[1])[1:])


def _recurrent(sizes: Sizes, op: Op) -> float:
    steps = prod(sizes.shape(op.inputs[0])[:2])
    return 2.0 * steps * (sizes.size(op.inputs[1]) + sizes.size(op.inputs[2]))


# -- attention -------------------------------------------------------------------------------------------


def _scores(query: float, keys: int) -> float:
    return 4.0 * query * keys


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


def _projecting(sizes: Sizes, op: Op) -> float:
    read, columns = op.inputs[0], _dimension(sizes, op.inputs[1], -1)
    projected = sizes.size(read) / max(1, _dimension(sizes, read, -1)) * columns / 3
    keys = _dimension(sizes, read, 1) + _dimension(sizes, _input(op, 4), -2)
    return 2.0 * sizes.size(read) * columns + _scores(projected, keys)


_Table = tuple[tuple[Callable[[Sizes, Op], float], str], ...]
_ONNX: _Table = (
    (_heads(past=4), "Attention"),
    (_convolution, "Conv DeformConv"),
    (_summed, " ".join(sorted(PRODUCTS))),
    (_recurrent, " ".join(sorted(RECURRENT))),
    (_spread, "CausalConvWithState ConvTranspose"),
)
_CONTRIB: _Table = (
    (_factors, "FusedGemm FusedMatMul FusedMatMulActivation GemmFastGelu GemmFloat8 TransposeMatMul"),
    (_heads(past=3), "GroupQueryAttention SparseAttention"),
    (_heads(past=6), "MultiHeadAttention"),
    (_packed_weight, "MatMulBnb4 MatMulNBits"),
    (_projecting, "Attention"),
)
_COUNTS = {
    domain + name: count
    for domain, table in (("", _ONNX), ("com.microsoft::", _CONTRIB))
    for count, names in table
    for name in names.split()
}
