"""Shift a view: plan exponents for values that go beyond the low type, and carry them out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from amp_rewrite.files.fit import Fit
from amp_rewrite.ir.attributes import int_attribute
from amp_rewrite.ir.versions import FIRST_IR_WITH_FREE_INITIALIZERS
from amp_rewrite.ir.view import OpId, ValueId, View
from amp_rewrite.rewrite.replace import run_round
from amp_rewrite.rewrite.replacement import Context, Outcome
from amp_rewrite.rewrite.shift.emit import Origin, Shifted, emit
from amp_rewrite.rewrite.shift.equations import Equations
from amp_rewrite.rewrite.shift.plan import ShiftPlan, ShiftRequest, plan_shift


@dataclass(frozen=True)
class Shift:
    """A shifted view and how it came about.

    `origins`: what each new value is; `results`: the names of what the replaced ops make now.
    """

    view: View
    plan: ShiftPlan
    origins: Mapping[str, Origin] = field(default_factory=dict)
    results: Mapping[OpId, tuple[str, ...]] = field(default_factory=dict)
    emitted: Shifted = field(default_factory=Shifted)


def shift_view(
    view: View, overflowing: Mapping[ValueId, Fit], fits: Mapping[ValueId, Fit], want: ShiftRequest
) -> Shift:
    """Return the view with values beyond the low type shifted into it; the view itself without such values.

    `overflowing`: the values that the low type could not hold; `fits`: how all known values round to it.
    """
    if not overflowing or refusal(view):
        return Shift(view, ShiftPlan())
    equations = Equations.of(view)
    return shifted_by(equations, plan_shift(equations, overflowing, fits, want), fits, want)


def shifted_by(equations: Equations, plan: ShiftPlan, fits: Mapping[ValueId, Fit], want: ShiftRequest) -> Shift:
    """Return the view shifted by a plan, whatever its exponents are."""
    view = equations.view
    emitted = emit(equations, plan, fits, want)

    def carried(_: View, __: Context) -> Iterable[Outcome]:
        return emitted.replacements

    after, _ = run_round(view, (carried,), Context(want.to))
    return Shift(after, plan, emitted.origins, emitted.results, emitted)


def refusal(view: View) -> str | None:
    """Return why no part of a model may be shifted; None if one may."""
    proto = view.model.proto
    if proto.training_info:
        return "the model carries its training"
    if proto.ir_version < FIRST_IR_WITH_FREE_INITIALIZERS:
        return "its weights are inputs (IR version 3)"
    for op in view.ops:
        if op.kind == "BatchNormalization" and int_attribute(op.node, "training_mode", 0):
            return f"{op.name} is in training mode"
        if op.kind == "Dropout" and len(op.inputs) > 2 and op.inputs[2] is not None:
            mode = view.array(op.inputs[2])
            if mode is None or mode.any():
                return f"{op.name} may be in training mode"
    return None
