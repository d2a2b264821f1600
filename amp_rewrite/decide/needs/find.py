"""What must stay float32 in a model, by the facts of its values and the needs of their readers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from amp_rewrite.decide import reasons
from amp_rewrite.decide.needs.backward import Held, Needs
from amp_rewrite.decide.needs.exemptions import benign, numbers
from amp_rewrite.decide.needs.forward import Facts
from amp_rewrite.decide.needs.long_sums import long_sums
from amp_rewrite.decide.pin import Pin, described
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.ir.dataflow import computes_float32
from amp_rewrite.ir.patterns.clusters import clusters
from amp_rewrite.ir.patterns.fill_reach import far_reaches, held_fills
from amp_rewrite.ir.patterns.integers import integer_ops
from amp_rewrite.ir.patterns.mask_fills import mask_fills
from amp_rewrite.ir.view import OpId, ValueId, View
from amp_rewrite.runtime.faults import faults
from amp_rewrite.settings.choices import Target


@dataclass(frozen=True, slots=True)
class Hazards:
    """What must stay float32 in a model, and what is harmless there.

    `pins`: ops that stay float32, at most one pin per op, in order of the ops. `saturate`: values to clamp to the low
    type's finite range when they are lowered; constants are clamped when baked, results at their Cast. `numbers`: ops
    that compute with shapes and constants alone; their denial need not spread. `benign`: ops on the deny list that are
    harmless in their context, with the reason. `findings`: notes for the report. `guarded`: only what a lowered
    product gains from is worth a low type.
    """

    pins: tuple[Pin, ...] = ()
    findings: tuple[Finding, ...] = ()
    saturate: frozenset[ValueId] = frozenset()
    numbers: frozenset[OpId] = frozenset()
    benign: Mapping[OpId, str] = field(default_factory=dict)
    guarded: bool = False


def find_hazards(view: View, to: DType, *, target: Target | None = None, rescale: bool = False) -> Hazards:
    """Return what must stay float32 in a model. O(nodes + uses); reads each float32 constant once.

    `target`: the runtime, for needs of one alone, and for what its releases compute wrongly. `rescale`: ops between
    quantizers may be low, since the quantizers get scales of the low type.
    """
    held = dict(Needs.of(Facts.of(view, to)).held)
    for op, why in (*_of_fills(view, to), *(() if rescale else _on_integers(view)), *_of_runtime(view, to, target)):
        held.setdefault(op, why)
    pins = [
        Pin(op, why.reason, why.because if why.because != op else None, why.note)
        for op, why in sorted(held.items())
        if computes_float32(view, view.ops[op])
    ]
    saturate, findings = _saturated(view, to, held)
    return Hazards(tuple(pins), findings, saturate, numbers(view), benign(view, clusters(view), to), guarded=True)


def _of_fills(view: View, to: DType) -> Iterator[tuple[OpId, Held]]:
    """Yield the ops that hold a fill whose number matters, or leaves the type."""
    for op, because, note in held_fills(view, to):
        yield op, Held(reasons.MASK_FILL if note.startswith("adds") else reasons.CONSTANT_RANGE, because, note)


def _on_integers(view: View) -> Iterator[tuple[OpId, Held]]:
    """Yield the ops that runtimes run on integers, and the copies between them and their quantizers."""
    for op, cause in integer_ops(view).items():
        passed = f"on the way of {described(view, cause)}, which runs on integers" if cause != op else ""
        yield op, Held(reasons.QUANTIZED, cause, passed)


def _of_runtime(view: View, to: DType, target: Target | None) -> Iterator[tuple[OpId, Held]]:
    """Yield the ops that a runtime adds up in the low type, or computes wrongly."""
    for op, note in long_sums(view) if target is Target.WEBGPU else ():
        yield op, Held(reasons.LONG_SUM, None, note)
    for faulty, fault in faults(view, to, target.aim) if target is not None else ():
        note = f"{fault.runtime} {fault.harm} ({fault.source})"
        yield faulty.id, Held(reasons.RUNTIME_FAULT, None, note)


def _saturated(view: View, to: DType, held: Mapping[OpId, Held]) -> tuple[frozenset[ValueId], tuple[Finding, ...]]:
    """Return the values to clamp when they are lowered, and a finding for each constant that a low op selects."""
    overflowing = {value: fill for value, fill in mask_fills(view, to).items() if fill.overflows}
    findings = []
    for value, fill in overflowing.items():
        if any(use.op not in held for use in view.uses[value]):
            level = fill.absmax if fill.level is None else fill.level
            stored = to.max if level > 0 else -to.max
            note = f"the fill value {level:g} becomes {stored:g} · {reasons.HARMLESS}: it only selects"
            findings.append(Finding("saturated", view.value_name(value), note))
    return frozenset((*overflowing, *chain(*(reach.held for reach in far_reaches(view, to))))), tuple(findings)
