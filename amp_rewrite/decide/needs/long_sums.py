"""Sums that a runtime adds up in the low type, term by term."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from amp_rewrite.decide.flops import summed_terms
from amp_rewrite.ir.dataflow import float32_ops
from amp_rewrite.ir.op_classes import LAYERS
from amp_rewrite.ir.shapes.onnx_shapes import shape_of
from amp_rewrite.ir.view import OpId, View

MOST_TERMS = 128
"""Terms of all sums of a model that stay in float16, together: they add at most 3.5e-3 to the error of outputs."""
_SUMMING = LAYERS | {"Einsum", "GlobalAveragePool"}


def long_sums(view: View) -> Iterator[tuple[OpId, str]]:
    """Yield products and pools with a note, the longest first, until the others add up 128 terms in all."""
    terms = terms_of(view)
    left = sum(terms.values())
    for op in sorted(terms, key=lambda op: (-terms[op], -op)):
        if left <= MOST_TERMS:
            return
        left -= terms[op]
        note = f"adds up {terms[op]} terms; in float16, all such sums of a model may have {MOST_TERMS} on this target"
        yield op, note


def terms_of(view: View) -> Mapping[OpId, int]:
    """Return the number of terms that each result of a float32 product or global pool adds up. O(nodes)."""
    sums = float32_ops(view, _SUMMING)
    return {op.id: summed_terms(op, [shape_of(view, value) for value in op.inputs]) for op in sums}
