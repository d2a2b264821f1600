"""The safety rules, and their results on a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.constant_folding import folded, numbers
from amp_rewrite.decide.hazards.constants import constant_range
from amp_rewrite.decide.hazards.counts import whole_numbers
from amp_rewrite.decide.hazards.differences import cancellation
from amp_rewrite.decide.hazards.exemptions import benign
from amp_rewrite.decide.hazards.magnified import magnified
from amp_rewrite.decide.hazards.mask_fills import mask_fill, saturated
from amp_rewrite.decide.hazards.positions import positions
from amp_rewrite.decide.hazards.quantized import quantized
from amp_rewrite.decide.hazards.rule import PinningRule, Rule, pinned
from amp_rewrite.decide.hazards.sums import long_sums, running_sums
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.ir.patterns.clusters import clusters
from amp_rewrite.ir.view import OpId, ValueId, View
from amp_rewrite.runtime.faults import faults
from amp_rewrite.settings.choices import Target

PINNING: tuple[PinningRule, ...] = (
    whole_numbers,
    positions,
    mask_fill,
    constant_range,
    magnified,
    folded,
    cancellation,
    quantized,
    running_sums,
    long_sums,
)
"""The rules that pin ops to float32. If several pin one op, the first gives the reason."""
RULES: tuple[Rule[..., Any], ...] = PINNING
"""The rules that read the model alone."""


@dataclass(frozen=True, slots=True)
class Hazards:
    """Results of the safety rules on a model.

    `pins`: ops that stay float32, at most one pin per op, in order of the ops. `saturate`: values to clamp to the low
    type's finite range when they are lowered; constants are clamped when baked, results at their Cast. `numbers`: ops
    that compute with shapes and constants alone; their denial need not spread. `benign`: ops on the deny list that are
    harmless in their context, with the reason. `findings`: notes for the report. `guarded`: the rule on the border
    between the types (`coloring/no_gain.py`) runs, too.
    """

    pins: tuple[Pin, ...] = ()
    findings: tuple[Finding, ...] = ()
    saturate: frozenset[ValueId] = frozenset()
    numbers: frozenset[OpId] = frozenset()
    benign: Mapping[OpId, str] = field(default_factory=dict)
    guarded: bool = False


def find_hazards(view: View, to: DType, *, but: Collection[str] = (), target: Target | None = None) -> Hazards:
    """Run every safety rule on a model, `but` some that pin ops. O(nodes + uses); reads each float32 constant once.

    `target`: the runtime, for rules that hold for one alone, and for what its releases compute wrongly.
    """
    pins: dict[OpId, Pin] = {}
    for pinning in PINNING:
        if pinning.target in ("", target and target.value) and pinning.name not in but:
            for pin in pinned(pinning.reason, pinning(view, to), view):
                pins.setdefault(pin.op, pin)
    for op, fault in faults(view, to, target.aim) if target is not None else ():
        note = f"{fault.runtime} {fault.harm} ({fault.source})"
        pins.setdefault(op.id, Pin(op.id, reasons.RUNTIME_FAULT, None, note))
    saturate, findings = saturated(view, to)
    pins_in_order = tuple(pins[op] for op in sorted(pins))
    return Hazards(pins_in_order, findings, saturate, numbers(view), benign(view, clusters(view), to), guarded=True)
