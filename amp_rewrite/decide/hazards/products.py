"""Products over an axis."""

from __future__ import annotations

from collections.abc import Iterator

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.rule import rule
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import computes_float32
from amp_rewrite.ir.view import View


@rule(reasons.PRODUCT, "A product over an axis is computed in float32.")
def products(view: View, to: DType) -> Iterator[Pin]:
    """Pin every product over an axis, unless the low type has the range of float32. O(ops).

    What it protects: ReduceProd.
    Why: A sum grows linearly with the number of terms, a product exponentially: twelve factors can make 479001600 or
        1e-12, beyond float16 at either end. float32 costs the same, plus a Cast of the small result.
    Example: 1 · 2 · … · 12, or the joint probability of independent events.
    How to override: `--lower 'op=ReduceProd'`.
    Source: IEEE 754 binary16: range 6e-8 to 65504.
    """
    if to.tiny <= DType.FLOAT.tiny:
        return
    for op in view.ops:
        if op.kind == "ReduceProd" and computes_float32(view, op):
            note = f"a product of many numbers goes beyond {to.max:g}, or below {to.tiny:.0e}, by nature"
            yield Pin(op.id, reasons.PRODUCT, None, note)
