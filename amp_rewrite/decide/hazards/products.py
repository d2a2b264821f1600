"""Products over an axis: a dozen numbers make 479001600, or 1e-12, and no more than one number comes out.

Sums grow with how many numbers there are, products in the power of it, so that float16 is left at either end by what
is harmless elsewhere. In float32 the op costs as much, and its result takes a Cast of what is small.
"""

from __future__ import annotations

from collections.abc import Iterator

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.flow import computes_float32
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.view import View


def products(view: View, to: DType) -> Iterator[Pin]:
    """Pins on every product over an axis, where the low type reaches less far than float32. O(ops)."""
    if to.tiny <= DType.FLOAT.tiny:
        return
    for op in view.ops:
        if op.kind == "ReduceProd" and computes_float32(view, op):
            note = f"a product of many numbers goes beyond {to.max:g}, or below {to.tiny:.0e}, by nature"
            yield Pin(op.id, reasons.PRODUCT, None, note)
