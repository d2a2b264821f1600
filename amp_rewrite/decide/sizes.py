"""Sizes of values, and operations of products, convolutions, recurrent ops and attention, from shapes.

Each summed product counts 2. Sources: ONNX's operator documentation, and onnxruntime 1.31.1's for its own operators,
of which those count that exporters write. onnx infers no shape for their results, so they count by their inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.attributes import equation, int_attribute
from amp_rewrite.ir.op_classes import PRODUCTS, RECURRENT
from amp_rewrite.ir.shapes import Shape, declared_dims, fixed, shape_of
from amp_rewrite.ir.view import MAIN, Op, ValueId, View, once

UNKNOWN_SIZE = 1 << 16
"""Elements of a value without a known shape that is made from no value with one."""
_MOST = 1e60  # operations; more are no measure of an op, but of hostile dims
FREE = 4096
"""What a free dimension counts as in a number of elements that are added up."""
_MANY = 1 << 60
UNKNOWN_DIMENSION = 128
"""The size that stands for a free dimension: in most exported models a length of text, or a batch."""


def size(view: View, value: ValueId | None) -> int:
    """Return the number of elements; without a shape, of the largest value behind it. 0 for None."""
    return _sizes(view)[value] if value is not None else 0


@once
def _sizes(view: View) -> Sequence[int]:
    sizes = [prod(shape(view, value.id)) if _known(view, value.id) is not None else 0 for value in view.values]
    for op in view.ops:
        largest = max((sizes[value] or UNKNOWN_SIZE for value in op.operands), default=UNKNOWN_SIZE)
        for value in op.results:
            sizes[value] = sizes[value] or largest
    return [known or UNKNOWN_SIZE for known in sizes]


def shape(view: View, value: ValueId | None) -> tuple[int, ...]:
    """Return the shape with free dimensions filled in; () if it is unknown."""
    return tuple(UNKNOWN_DIMENSION if d is None else d for d in _known(view, value) or ())


def _known(view: View, value: ValueId | None) -> Shape | None:
    """Return the stated shape, else the inferred one."""
    stated = _stated(view).get(view.value_name(value)) if value is not None else None
    return shape_of(view, value) if stated is None or value is None or view.values[value].scope != MAIN else stated


@once
def _stated(view: View) -> Mapping[str, Shape]:
    graph = view.model.proto.graph
    formals = (*graph.value_info, *graph.input, *graph.output)
    return {formal.name: fixed(dims) for formal in formals if (dims := declared_dims(formal)) is not None}


_AXES = {
    **dict.fromkeys(("Conv", "ConvInteger"), (1, slice(1, None))),
    "ConvTranspose": (1, slice(1)),
    "GlobalAveragePool": (0, slice(2, None)),
}
"""The input whose axes an op sums up, and these axes."""


def summed_axes(op: Op, slot: int) -> list[int]:
    """Return the axes of an operand summed by a product of matrices."""
    if op.kind == "Einsum":
        return [at for at, _ in summed_labels(op)[slot]]
    last = (slot == 0) is not bool(int_attribute(op.node, ("transA", "transB")[slot], 0))
    return [-1 if last else -2]


def summed_terms(op: Op, shapes: Sequence[Shape | None], free: int = UNKNOWN_DIMENSION) -> int:
    """Return how many terms each result of a product or global pool adds up; `free` stands for an unknown length."""
    lengths: Iterable[int | None] = [None]
    if op.kind == "Einsum":
        named = {label: (at, s) for axes, s in zip(summed_labels(op), shapes, strict=False) for at, label in axes}
        lengths = [s[at] if s is not None and -len(s) <= at < len(s) else None for at, s in named.values()]
    elif op.kind in _AXES:
        slot, axes = _AXES[op.kind]
        shape = shapes[slot]
        lengths = shape[axes] if shape is not None else [None]
    else:
        ends = ((s, summed_axes(op, slot)[0] if len(s) > 1 else -1) for slot, s in enumerate(shapes[:2]) if s)
        known = (s[axis] for s, axis in ends)
        lengths = [next((length for length in known if length is not None), None)]
    groups = int_attribute(op.node, "group", 1) if op.kind == "ConvTranspose" else 1
    return max(1, prod(free if length is None else length for length in lengths) // max(1, groups))


def stated_terms(view: View, op: Op, free: int = FREE) -> int:
    """Return the terms of a product by its stored factors, else by shapes; `free` stands for an unknown length."""
    stored = [tuple(t.dims) if (t := view.constant(v)) is not None else None for v in op.inputs[:2]]
    known = any(stored) and op.kind != "Einsum"
    return min(_MANY, summed_terms(op, stored if known else [shape_of(view, v) for v in op.inputs], free))


def summed_labels(op: Op) -> list[list[tuple[int, str]]]:
    """Return the summed axes of an Einsum, with their labels, for each operand."""
    operands, result = equation(op.node)
    parts = [labels.partition("...") for labels in operands]
    axes = ((*enumerate(front), *enumerate(back, -len(back))) for front, _, back in parts)
    return [[(at, label) for at, label in own if label not in result] for own in axes]


def flops(view: View, op: Op) -> float:
    """Return the operations of an op, exact for known shapes; 0 for other ops, and if attributes contradict shapes."""
    count = _COUNTS.get(op.kind)
    try:
        known = count(view, op) if count is not None else 0.0
    except (ArithmeticError, IndexError):  # a stride or a group of 0, sizes beyond all floats
        return 0.0
    return known if 0 <= known < _MOST else 0.0


def _dimension(view: View, value: ValueId | None, axis: int) -> int:
    if value is None:
        return 0
    dims = shape(view, value)
    return dims[axis] if -len(dims) <= axis < len(dims) else UNKNOWN_DIMENSION


def _summed(view: View, op: Op) -> float:
    shapes = [shape(view, value) or None for value in (op.inputs if op.kind == "Einsum" else op.inputs[:1])]
    return 2.0 * size(view, op.outputs[0]) * summed_terms(op, shapes)


def _factors(view: View, op: Op) -> float:
    """Count a product without a known result: each element of one factor meets rows or columns of the other."""
    first, second = op.inputs[0], op.inputs[1]
    along = -1 if int_attribute(op.node, "transA", 0) else -2
    across = -2 if int_attribute(op.node, "transB", 0) else -1
    rows = _dimension(view, first, along) if len(shape(view, first)) != 1 else 1
    return 2.0 * max(size(view, first) * _dimension(view, second, across), size(view, second) * rows)


def _convolution(view: View, op: Op) -> float:
    around = op.inputs[0] if op.op_type == "ConvTranspose" else op.outputs[0]
    return 2.0 * size(view, around) * prod(shape(view, op.inputs[1])[1:])


def _recurrent(view: View, op: Op) -> float:
    steps = prod(shape(view, op.inputs[0])[:2])
    return 2.0 * steps * (size(view, op.inputs[1]) + size(view, op.inputs[2]))


def _attention(view: View, op: Op, past: int) -> float:
    """Count attention over projected queries, alone or packed with keys and values; `past`: the input of past keys."""
    query, key = op.inputs[0], op.inputs[1] if len(op.inputs) > 1 else None
    elements = float(size(view, query))
    if key is None:
        heads = int_attribute(op.node, "num_heads", 1)
        elements *= heads / (heads + 2 * int_attribute(op.node, "kv_num_heads", heads))
    new = key if key is not None else query
    length = _dimension(view, new, 2 if len(shape(view, new)) == 4 else 1)
    return 4.0 * elements * (length + _dimension(view, op.inputs[past] if past < len(op.inputs) else None, -2))


_COUNTS: Mapping[str, Callable[[View, Op], float]] = {
    **dict.fromkeys(PRODUCTS, _summed),
    **dict.fromkeys(RECURRENT, _recurrent),
    **dict.fromkeys(("Conv", "ConvTranspose"), _convolution),
    "Attention": partial(_attention, past=4),
    "com.microsoft::MultiHeadAttention": partial(_attention, past=6),
    "com.microsoft::GroupQueryAttention": partial(_attention, past=3),
    **{f"com.microsoft::{name}": _factors for name in ("Attention", "FusedGemm", "FusedMatMul", "GemmFastGelu")},
    "com.microsoft::MatMulNBits": lambda view, op: 2.0 * size(view, op.inputs[0]) * int_attribute(op.node, "N", 0),
}


# -- tensor cores ------------------------------------------------------------------------------------

# A row of this many 16-bit elements is 16 bytes, the unit of tensor core loads: NVIDIA, Matrix Multiplication
# Background User's Guide, "Tensor Core Requirements".
ALIGNED = 8
_LARGE = 256
"""From this size on, NVIDIA asks for multiples of 8 only (TensorFlow's mixed precision guide)."""
_NAMED = {"MatMul": ("k", "n"), "Gemm": ("k", "n"), "Conv": ("out", "in"), "ConvTranspose": ("in", "out")}
"""Names of the dimensions of a weight: the last two of a matrix, the first two of a convolution."""


def misaligned(view: View, low: DType) -> dict[tuple[str, str, int], list[str]]:
    """Return the names of low products with a fixed dimension off multiples of 8, in order. O(nodes).

    Keys are the kind of op, the dimension and its size.
    """
    groups: dict[tuple[str, str, int], list[str]] = {}
    for op in view.ops:
        types = (v.type.dtype for v in view.variables[op.id] if v.type is not None)
        if next((dtype for dtype in types if dtype is not None and dtype.floating), None) is low:
            for dimension, size in _aligned_dimensions(view, op):
                if size is not None and size % ALIGNED:
                    groups.setdefault((op.kind, dimension, size), []).append(op.name)
    return groups


def _aligned_dimensions(view: View, op: Op) -> Iterable[tuple[str, int | None]]:
    weight = shape_of(view, op.inputs[1]) if op.kind in _NAMED and len(op.inputs) > 1 else None
    if weight is None or len(weight) < 2:
        return ()
    if op.kind in ("Conv", "ConvTranspose"):
        depthwise = weight[1] == 1  # off tensor cores
        return () if depthwise else zip(_NAMED[op.kind], weight[:2], strict=True)
    names = reversed(_NAMED[op.kind]) if int_attribute(op.node, "transB", 0) else _NAMED[op.kind]
    return zip(names, weight[-2:], strict=True)


def better_size(size: int) -> int:
    """Return the next good size for tensor cores: a power of two below 256, else a multiple of 8."""
    power = 1 << max(size - 1, ALIGNED - 1).bit_length()
    return power if size < _LARGE else -(-size // ALIGNED) * ALIGNED
