"""What must stay float32 in a model, by the facts of its values and the needs of their readers."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.constant_folding import numbers
from amp_rewrite.decide.hazards.exemptions import benign
from amp_rewrite.decide.hazards.find import Hazards
from amp_rewrite.decide.hazards.mask_fills import saturated
from amp_rewrite.decide.hazards.quantized import quantized
from amp_rewrite.decide.hazards.sums import long_sums
from amp_rewrite.decide.needs.backward import Held, Needs
from amp_rewrite.decide.needs.forward import Facts
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import computes_float32
from amp_rewrite.ir.patterns.clusters import clusters
from amp_rewrite.ir.view import OpId, View
from amp_rewrite.runtime.faults import faults
from amp_rewrite.settings.choices import Target


def find_hazards(view: View, to: DType, *, but: Collection[str] = (), target: Target | None = None) -> Hazards:
    """Return what must stay float32 in a model, `but` for some reasons. O(nodes + uses).

    `target`: the runtime, for needs of one alone, and for what its releases compute wrongly.
    """
    held = dict(Needs.of(Facts.of(view, to)).held)
    for op, why in _of_runtimes(view, to, target):
        held.setdefault(op, why)
    pins = [
        Pin(op, why.reason, why.because if why.because != op else None, why.note)
        for op, why in sorted(held.items())
        if why.reason not in but and computes_float32(view, view.ops[op])
    ]
    saturate, findings = saturated(view, to)
    return Hazards(tuple(pins), findings, saturate, numbers(view), benign(view, clusters(view), to), guarded=True)


def _of_runtimes(view: View, to: DType, target: Target | None) -> Iterator[tuple[OpId, Held]]:
    """Yield ops that a runtime computes on integers, adds up in the low type, or computes wrongly."""
    for op, because, note in quantized(view, to):
        yield op, Held(reasons.QUANTIZED, because, note)
    if target is Target.WEBGPU:
        for op, because, note in long_sums(view, to):
            yield op, Held(reasons.LONG_SUM, because, note)
    for faulty, fault in faults(view, to, target.aim) if target is not None else ():
        note = f"{fault.runtime} {fault.harm} ({fault.source})"
        yield faulty.id, Held(reasons.RUNTIME_FAULT, None, note)
