"""Sums of so many terms that a device which adds up in the low type loses too many digits."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.rule import rule
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import computes_float32
from amp_rewrite.ir.schema import attribute, int_attribute
from amp_rewrite.ir.shapes.onnx_shapes import Shape, shape_at, shapes_of
from amp_rewrite.ir.view import Op, View
from amp_rewrite.settings.choices import Target

MOST_TERMS = 31
"""Terms of the longest sum in float16: its error is about four times that of one rounding."""
FREE = 128
"""The size that stands for a free dimension, as in the cost model."""


@rule(reasons.LONG_SUM, "A product or pool over many terms is computed in float32.", target=Target.WEBGPU.value)
def long_sums(view: View, to: DType) -> Iterator[Pin]:
    """Pin products and pools that add up more than 31 terms, for targets that add up in the low type. O(nodes).

    What it protects: MatMul, Gemm, Conv, ConvTranspose and Einsum, whose shaders on WebGPU add one product after
        another in float16, and pools over a whole image, whose sum overflows where the mean does not.
    Why: Each addition rounds, and over k terms the error grows like the root of k. Measured on the device, it is 4
        times that of one rounding at 36 terms, 6 times at 96, 19 times at 768 and 34 times at 2050. A free dimension
        counts as 128.
    Example: The second product of a feed-forward layer, over 3072 terms.
    How to override: `--lower 'op=MatMul'`, then compare on the device with `amp-rewrite verify`.
    Source: Measured, docs/evidence/webgpu.md; Higham, Accuracy and Stability of Numerical Algorithms, section 4.2.
    """
    shapes = None
    for op in view.ops:
        if op.kind not in _TERMS or not computes_float32(view, op):
            continue
        shapes = shapes_of(view) if shapes is None else shapes
        terms = _TERMS[op.kind](op, [shape_at(shapes, view, value) for value in op.inputs])
        if terms > MOST_TERMS:
            yield Pin(op.id, reasons.LONG_SUM, None, f"adds up {terms} terms, in float16 on this target")


def _size(shape: Shape | None, axis: int) -> int:
    if shape is None or not -len(shape) <= axis < len(shape):
        return FREE
    size = shape[axis]
    return FREE if size is None else size


def _matmul(op: Op, shapes: list[Shape | None]) -> int:
    left, right = (*shapes, None, None)[:2]
    inner = [s[axis] for s, axis in ((left, -1), (right, -2)) if s is not None and len(s) >= -axis]
    return next((size for size in inner if size is not None), FREE)


def _gemm(op: Op, shapes: list[Shape | None]) -> int:
    return _size(shapes[0], -2 if int_attribute(op.node, "transA", 0) else -1)


def _conv(op: Op, shapes: list[Shape | None]) -> int:
    weight = shapes[1]
    return FREE if weight is None else prod(_size(weight, axis) for axis in range(1, len(weight)))


def _conv_transpose(op: Op, shapes: list[Shape | None]) -> int:
    groups = int_attribute(op.node, "group", 1)
    return max(1, _size(shapes[1], 0) // max(1, groups))


def _einsum(op: Op, shapes: list[Shape | None]) -> int:
    stated = attribute(op.node, "equation")
    left, arrow, result = (stated.s.decode() if stated is not None else "").replace(" ", "").partition("->")
    operands = left.split(",")
    if not arrow or "." in left:
        return FREE
    sizes = {
        label: _size(shape, axis)
        for labels, shape in zip(operands, shapes, strict=False)
        for axis, label in enumerate(labels)
    }
    return prod(size for label, size in sizes.items() if label not in result)


def _pool(op: Op, shapes: list[Shape | None]) -> int:
    shape = shapes[0]
    return FREE if shape is None else prod(_size(shape, axis) for axis in range(2, len(shape)))


_TERMS = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Einsum": _einsum,
    "Gemm": _gemm,
    "GlobalAveragePool": _pool,
    "MatMul": _matmul,
}
