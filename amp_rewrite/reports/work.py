"""Work of products, convolutions, recurrent ops and attention: operations, and sizes for tensor cores.

Each multiply-add counts as two operations. Sources: the operator documentation of ONNX and, for contrib operators
written by exporters, of onnxruntime 1.31.1. Since onnx does not infer the result shapes of contrib operators, their
input shapes determine the count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import prod

from amp_rewrite.decide.sizes import UNKNOWN_DIMENSION, shape, size, summed_terms
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.attributes import int_attribute
from amp_rewrite.ir.op_classes import PRODUCTS, RECURRENT
from amp_rewrite.ir.shapes import shape_of
from amp_rewrite.ir.view import Op, ValueId, View

_MAX_OPERATIONS = 1e60  # a larger count comes from hostile dimensions


def flops(view: View, op: Op) -> float:
    """Return an op's number of operations, exact for known shapes; 0 if unknown or if attributes contradict shapes."""
    count = _COUNTS.get(op.kind)
    try:
        operations = count(view, op) if count is not None else 0.0
    except (ArithmeticError, IndexError):  # a stride or a group of 0, sizes beyond the range of floats
        return 0.0
    return operations if 0 <= operations < _MAX_OPERATIONS else 0.0


def _dimension(view: View, value: ValueId | None, axis: int) -> int:
    if value is None:
        return 0
    dims = shape(view, value)
    return dims[axis] if -len(dims) <= axis < len(dims) else UNKNOWN_DIMENSION


def _summed(view: View, op: Op) -> float:
    shapes = [shape(view, value) or None for value in (op.inputs if op.kind == "Einsum" else op.inputs[:1])]
    return 2.0 * size(view, op.outputs[0]) * summed_terms(op, shapes)


def _factors(view: View, op: Op) -> float:
    """Count a product with an unknown result shape: one factor's elements times rows or columns of the other."""
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
    """Count attention over queries, separate or packed with keys and values; `past`: the input of past keys."""
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
_MIN_LARGE = 256
"""From this size up, NVIDIA only recommends multiples of 8 (TensorFlow's mixed precision guide)."""
_DIMENSIONS = {"MatMul": ("k", "n"), "Gemm": ("k", "n"), "Conv": ("out", "in"), "ConvTranspose": ("in", "out")}
"""Names of the dimensions of a weight: the last two of a matrix, the first two of a convolution."""


def misaligned(view: View, low: DType) -> dict[tuple[str, str, int], list[str]]:
    """Return the names of low products with a fixed dimension not divisible by 8, in order. O(nodes).

    Keys: the op type, the dimension and its size.
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
    weight = shape_of(view, op.inputs[1]) if op.kind in _DIMENSIONS and len(op.inputs) > 1 else None
    if weight is None or len(weight) < 2:
        return ()
    if op.kind in ("Conv", "ConvTranspose"):
        depthwise = weight[1] == 1  # does not run on tensor cores
        return () if depthwise else zip(_DIMENSIONS[op.kind], weight[:2], strict=True)
    names = reversed(_DIMENSIONS[op.kind]) if int_attribute(op.node, "transB", 0) else _DIMENSIONS[op.kind]
    return zip(names, weight[-2:], strict=True)


def better_size(size: int) -> int:
    """Return the next efficient size for tensor cores: a power of two below 256, and a multiple of 8 above."""
    power = 1 << max(size - 1, ALIGNED - 1).bit_length()
    return power if size < _MIN_LARGE else -(-size // ALIGNED) * ALIGNED
