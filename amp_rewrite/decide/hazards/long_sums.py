"""Sums of so many terms that a device which adds up in the low type loses too many digits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from math import prod

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.rule import Held, rule
from amp_rewrite.decide.hazards.steps import equation, summed_length
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import computes_float32
from amp_rewrite.ir.op_classes import LAYERS
from amp_rewrite.ir.schema import int_attribute
from amp_rewrite.ir.shapes.onnx_shapes import Shape, shape_at, shapes_of
from amp_rewrite.ir.view import Op, OpId, View
from amp_rewrite.settings.choices import Target

MOST_TERMS = 128
"""Terms of all sums of a model that stay in float16, together: they add at most 3.5e-3 to the error of outputs."""
FREE = 128
"""The size that stands for a free dimension, as in the cost model."""
_AXES = {"Conv": (1, slice(1, None)), "ConvTranspose": (1, slice(1)), "GlobalAveragePool": (0, slice(2, None))}
"""The input whose axes an op sums up, and these axes."""
_SUMMING = LAYERS | {"Einsum", "GlobalAveragePool"}


@rule(reasons.LONG_SUM, "The longest sums of products are computed in float32.", target=Target.WEBGPU.value)
def long_sums(view: View, to: DType) -> Iterator[Held]:
    """Hold products and pools, the longest first, until the others add up 128 terms in all. O(nodes log nodes).

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
        yield Held(op, None, note)


def terms_of(view: View) -> Mapping[OpId, int]:
    """Return the number of terms that each result of a float32 product or global pool adds up. O(nodes)."""
    sums = [op for op in view.ops if op.kind in _SUMMING and computes_float32(view, op)]
    shapes = shapes_of(view) if sums else {}
    return {op.id: _terms(op, [shape_at(shapes, view, value) for value in op.inputs]) for op in sums}


def _terms(op: Op, shapes: list[Shape | None]) -> int:
    lengths: Sequence[int | None] = [None]
    if op.kind == "Einsum":
        operands, result = equation(op)
        terms = zip(operands, shapes, strict=False)
        sizes = {at: n for word, shape in terms for at, n in zip(word, shape or repeat(None), strict=False)}
        stated = bool(operands) and "." not in sizes
        lengths = [length for label, length in sizes.items() if label not in result] if stated else [None]
    elif op.kind in _AXES:
        slot, axes = _AXES[op.kind]
        shape = shapes[slot]
        lengths = shape[axes] if shape is not None else [None]
    else:
        known = (summed_length(op, slot, shape) for slot, shape in enumerate(shapes[:2]) if shape)
        lengths = [next((length for length in known if length is not None), None)]
    groups = int_attribute(op.node, "group", 1) if op.kind == "ConvTranspose" else 1
    return max(1, prod(FREE if length is None else length for length in lengths) // max(1, groups))
