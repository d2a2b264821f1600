"""Values that an input of ones drives out of the range, through layers whose weights are one number throughout."""

from __future__ import annotations

from collections.abc import Iterator

from amp_rewrite.decide import reasons
from amp_rewrite.decide.bounds.throughout import number_throughout
from amp_rewrite.decide.hazards.rule import rule
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import computes_float32
from amp_rewrite.ir.op_classes import LAYERS
from amp_rewrite.ir.view import OpId, ValueId, View


@rule(
    reasons.PROVED_OVERFLOW,
    "Placeholder weights do not drive values out of the type's range.",
    aliases=("growth", "placeholders"),
)
def proved_overflow(view: View, to: DType) -> Iterator[Pin]:
    """Pin ops behind placeholder layers whose values are proved to exceed the low type. O(ops + uses + weights).

    What it protects: Models without their trained weights, where every weight is one number throughout.
    Why: Trained weights differ in sign, so most of a sum cancels and the next layer reads values of the same size.
        Placeholders do not cancel, and values grow from layer to layer. The values for an input of ones are bounded
        from below by weights and shapes; an unknown op ends the proof. Without a layer of placeholders nothing is
        computed: whether other inputs are as large as 1 is not known.
    Example: The "light" models of the ONNX test suite, whose weights are ConstantOfShape.
    How to override: Calibration with `--data`.
    Source: ONNX backend test data, "light" models; docs/concepts/bounds.md.
    """
    layers = placeholders(view, to)
    if not layers:
        return
    from amp_rewrite.decide.bounds.analysis import magnitudes_of_ones  # late: only such models pay for it

    least = magnitudes_of_ones(view)
    behind = _behind(view, layers)
    for op in view.ops:
        grown = max((v for v in op.ports if v in behind), key=lambda v: least.get(v, 0.0), default=None)
        if grown is not None and least.get(grown, 0.0) > to.max and computes_float32(view, op):
            note = f"weights that are one number throughout let values grow to {least[grown]:.0e}, beyond {to.max:g}"
            yield Pin(op.id, reasons.PROVED_OVERFLOW, behind[grown], note)


def placeholders(view: View, to: DType) -> frozenset[OpId]:
    """Return the float32 layers whose weights are one number throughout.

    O(ops). Constants are read only if their magnitudes, known from `View.fit`, are all equal.
    """
    layers = (op for op in view.ops if op.kind in LAYERS and computes_float32(view, op))
    return frozenset(op.id for op in layers if any(_alike(view, to, value) for value in op.inputs[:2]))


def _alike(view: View, to: DType, value: ValueId | None) -> bool:
    if value is not None and view.constant(value) is not None:
        fit = view.fit(value, to) if view.dtype(value) is DType.FLOAT else None
        if fit is None or not fit.count or fit.nonfinite or fit.absmin != fit.absmax:
            return False
    return number_throughout(view, value) is not None


def _behind(view: View, layers: frozenset[OpId]) -> dict[ValueId, OpId]:
    """Return the values that follow from a layer, each with the last layer before it."""
    behind: dict[ValueId, OpId] = {}
    for op in view.ops:
        causes = [behind[v] for v in op.operands if v in behind]
        if op.id in layers or causes:
            behind.update(dict.fromkeys(op.results, op.id if op.id in layers else causes[0]))
    return behind
