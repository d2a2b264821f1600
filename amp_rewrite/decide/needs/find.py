"""What must stay float32 in a model, by the facts of its values and the needs of their readers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from amp_rewrite.decide import reasons
from amp_rewrite.decide.needs.backward import Needs
from amp_rewrite.decide.needs.exemptions import benign, numbers
from amp_rewrite.decide.needs.forward import Facts
from amp_rewrite.decide.needs.held import Held
from amp_rewrite.decide.reasons import Pin, described
from amp_rewrite.decide.sizes import summed_terms
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.ir.dataflow import computes_float32, float32_ops
from amp_rewrite.ir.op_classes import LAYERS
from amp_rewrite.ir.patterns.clusters import clusters
from amp_rewrite.ir.patterns.fills import far_reaches, fills, held_fills
from amp_rewrite.ir.patterns.integers import integer_ops
from amp_rewrite.ir.shapes.onnx_shapes import shape_of
from amp_rewrite.ir.view import OpId, ValueId, View
from amp_rewrite.runtime.faults import faults
from amp_rewrite.settings.choices import Target

MOST_TERMS = 128
"""Terms of all sums of a model that stay in float16, together: they add at most 3.5e-3 to the error of outputs."""
_SUMMING = LAYERS | {"Einsum", "GlobalAveragePool"}


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
    for op, because, note in held_fills(view, to):
        yield op, Held(reasons.MASK_FILL if note.startswith("adds") else reasons.CONSTANT_RANGE, because, note)


def _on_integers(view: View) -> Iterator[tuple[OpId, Held]]:
    for op, cause in integer_ops(view).items():
        passed = f"on the way of {described(view, cause)}, which runs on integers" if cause != op else ""
        yield op, Held(reasons.QUANTIZED, cause, passed)


def _of_runtime(view: View, to: DType, target: Target | None) -> Iterator[tuple[OpId, Held]]:
    for op, note in long_sums(view) if target is Target.WEBGPU else ():
        yield op, Held(reasons.LONG_SUM, None, note)
    for faulty, fault in faults(view, to, target.aim) if target is not None else ():
        note = f"{fault.runtime} {fault.harm} ({fault.source})"
        yield faulty.id, Held(reasons.RUNTIME_FAULT, None, note)


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


def _saturated(view: View, to: DType, held: Mapping[OpId, Held]) -> tuple[frozenset[ValueId], tuple[Finding, ...]]:
    """Return the values to clamp when they are lowered, and a finding for each constant that a low op selects."""
    overflowing = {value: fill for value, fill in fills(view, to).items() if fill.overflows}
    findings = []
    for value, fill in overflowing.items():
        if any(use.op not in held for use in view.uses[value]):
            level = fill.absmax if fill.level is None else fill.level
            stored = to.max if level > 0 else -to.max
            note = f"the fill value {level:g} becomes {stored:g} · {reasons.HARMLESS}: it only selects"
            findings.append(Finding("saturated", view.value_name(value), note))
    return frozenset((*overflowing, *chain(*(reach.held for reach in far_reaches(view, to))))), tuple(findings)
