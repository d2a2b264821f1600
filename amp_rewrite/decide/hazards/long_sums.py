"""Sums of so many terms that a device which adds up in the low type loses too many digits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.rule import rule
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import computes_float32
from amp_rewrite.ir.schema import attribute, int_attribute
from amp_rewrite.ir.shapes.onnx_shapes import Shape, shape_at, shapes_of
from amp_rewrite.ir.view import Op, OpId, View
from amp_rewrite.settings.choices import Target

MOST_TERMS = 128
"""Terms of all sums of a model that stay in float16, together: they add at most 3.5e-3 to the error of outputs."""
FREE = 128
"""The size that stands for a free dimension, as in the cost model."""


@rule(reasons.LONG_SUM, "The longest sums of products are computed in float32.", target=Target.WEBGPU.value)
def long_sums(view: View, to: DType) -> Iterator[Pin]:
    """Pin products and pools, the longest first, until the others add up 128 terms in all. O(nodes log nodes).

    What it protects: MatMul, Gemm, Conv, ConvTranspose and Einsum, whose shaders on WebGPU add one product after
        another in float16, and pools over a whole image, whose sum overflows where the mean does not.
    Why: Each addition rounds, so the error of a sum grows like the root of its terms: measured on the device, it is 4
        times that of one rounding at 36 terms, 19 times at 768. The errors of all sums add up likewise. On 28 exported
        models and 3 others, what they add to the error of the outputs is at most 3.1e-4 times the root of all terms. A
        free dimension counts as 128.
    Example: The feed-forward layers of a transformer, over 768 and 3072 terms.
    How to override: `--lower 'op=MatMul'`, then compare on the device with `amp-rewrite verify`.
    Source: Measured, docs/evidence/webgpu.md; Higham, Accuracy and Stability of Numerical Algorithms, section 4.2.
    """
    terms = terms_of(view)
    left = sum(terms.values())
    for op in sorted(terms, key=lambda op: (-terms[op], -op)):
        if left <= MOST_TERMS:
            return
        left -= terms[op]
        note = f"adds up {terms[op]} terms; in float16, all such sums of a model may have {MOST_TERMS} on this target"
        yield Pin(op, reasons.LONG_SUM, None, note)


def terms_of(view: View) -> Mapping[OpId, int]:
    """Return the number of terms that each result of a float32 product or global pool adds up. O(nodes)."""
    sums = [op for op in view.ops if op.kind in _TERMS and computes_float32(view, op)]
    shapes = shapes_of(view) if sums else {}
    return {op.id: _TERMS[op.kind](op, [shape_at(shapes, view, value) for value in op.inputs]) for op in sums}


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
