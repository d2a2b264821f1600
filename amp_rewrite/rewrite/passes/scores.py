"""The sums of scores and masks that a softmax reads."""

from __future__ import annotations

from collections.abc import Sequence

from amp_rewrite.decide.hazards.mask import fills
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import Flow
from amp_rewrite.ir.op_classes import AFFINE, COPIES, SELECTIONS, SOFTMAXES
from amp_rewrite.ir.versions import FIRST_WHERE
from amp_rewrite.ir.view import Op, ValueId, View

LOST = -1e30
"""At or below it a float32 number swallows whatever it is added to, as far as that is below 1e22."""

_CARRY = {**COPIES, "Where": SELECTIONS["Where"], **dict.fromkeys(AFFINE - {"Sum"}, (0, 1))}
_SOFTMAXES = SOFTMAXES - {"com.microsoft::BiasSoftmax"}  # that has a sum of its own


def scored(view: View) -> list[Op]:
    """The float32 Adds whose result a softmax reads, but for those of scores that hold another mask's fill already.

    None below opset 9, which has no Where to select with.

    What both masks hide is −inf there, and less than what one hides: that shows in a row that is masked throughout.
    """
    if view.opsets.get("", 1) < FIRST_WHERE:
        return []
    read = {value for op in view.ops if op.kind in _SOFTMAXES for value in op.inputs}
    found = (op for op in view.ops if op.kind == "Add" and op.outputs[0] in read) if read else ()
    sums = [op for op in found if (result := op.outputs[0]) is not None and view.dtype(result) is DType.FLOAT]
    filled = _filled(view, sums) if sums else frozenset()
    return [op for op in sums if not filled.issuperset(op.inputs)]


def _filled(view: View, sums: Sequence[Op]) -> frozenset[ValueId | None]:
    """What the sums are made of that a fill beside which scores are lost has entered, through copies and arithmetic."""
    flow = Flow.of(view, _CARRY)
    origins = flow.back({value: value for op in sums for value in op.inputs if value is not None})
    levels = fills(view, DType.FLOAT16, among=origins).items()
    return frozenset(flow.forth({value: value for value, fill in levels if fill.absmax >= -LOST}))
