"""Values that must leave the range: products over an axis, and the results of placeholder weights for ones."""

from __future__ import annotations

from collections.abc import Iterator

from amp_rewrite.decide import reasons
from amp_rewrite.decide.bounds.uniform_constants import number_throughout
from amp_rewrite.decide.hazards.rule import HeldOp, rule
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import dependents, float32_ops
from amp_rewrite.ir.op_classes import LAYERS
from amp_rewrite.ir.view import OpId, ValueId, View


@rule(
    reasons.PROVED_OVERFLOW,
    "Values that are bound to leave the type's range are computed in float32.",
    cases=(reasons.PROVED_OVERFLOW, "product"),
)
def proved_overflow(view: View, to: DType) -> Iterator[HeldOp]:
    """Hold products over an axis, and ops behind placeholder layers whose values are proved to exceed the low type.

    O(ops + uses + weights).

    What it protects: ReduceProd, unless the low type has the range of float32; models without their trained weights,
        where every weight is one number throughout.
    Why: A sum grows linearly with the number of terms, a product exponentially: twelve factors can make 479001600 or
        1e-12, beyond float16 at either end. Trained weights differ in sign, so most of a sum cancels; placeholders do
        not cancel, and values grow from layer to layer. The values for an input of ones are bounded from below by
        weights and shapes; an unknown op ends the proof. Without a layer of placeholders nothing is computed: whether
        other inputs are as large as 1 is not known.
    Example: The joint probability of independent events; the "light" models of the ONNX test suite, whose weights are
        ConstantOfShape.
    How to override: `--lower 'op=ReduceProd'`; calibration with `--data`.
    Source: IEEE 754 binary16: range 6e-8 to 65504; ONNX backend test data, "light" models; docs/concepts/bounds.md.
    """
    for op in view.of_kinds(("ReduceProd",)) if to.tiny > DType.FLOAT.tiny else ():
        note = f"a product of many numbers goes beyond {to.max:g}, or below {to.tiny:.0e}, by nature"
        yield HeldOp(op.id, None, note)
    layers = placeholders(view, to)
    if not layers:
        return
    from amp_rewrite.decide.bounds.analysis import magnitudes_of_ones  # late: only such models pay for it

    least, causes = magnitudes_of_ones(view), dependents(view, layers)
    behind = {value: cause for op_id, cause in causes.items() for value in view.ops[op_id].results}
    for op in view.ops:
        grown = max((v for v in op.ports if v in behind), key=lambda v: least.get(v, 0.0), default=None)
        if grown is not None and least.get(grown, 0.0) > to.max:
            note = f"weights that are one number throughout let values grow to {least[grown]:.0e}, beyond {to.max:g}"
            yield HeldOp(op.id, behind[grown], note)


def placeholders(view: View, to: DType) -> frozenset[OpId]:
    """Return the float32 layers whose weights are one number throughout.

    O(ops). Constants are read only if their magnitudes, known from `View.fit`, are all equal.
    """
    layers = float32_ops(view, LAYERS)
    return frozenset(op.id for op in layers if any(_alike(view, to, value) for value in op.inputs[:2]))


def _alike(view: View, to: DType, value: ValueId | None) -> bool:
    if value is not None and view.constant(value) is not None:
        fit = view.fit(value, to) if view.dtype(value) is DType.FLOAT else None
        if fit is None or not fit.count or fit.nonfinite or fit.absmin != fit.absmax:
            return False
    return number_throughout(view, value) is not None
