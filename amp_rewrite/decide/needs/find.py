"""Ops to keep in float32, from facts about their values and needs of their readers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from amp_rewrite.decide import reasons
from amp_rewrite.decide.needs.backward import Backward
from amp_rewrite.decide.needs.facts import Facts, Misfit
from amp_rewrite.decide.needs.forward import find_facts
from amp_rewrite.decide.reasons import Paint, Pin, described, float32
from amp_rewrite.decide.sizes import UNKNOWN_DIMENSION, terms_of_product
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.ir.dataflow import Flow, computes, float32_ops, reduction_axes
from amp_rewrite.ir.op_classes import COPIES, ELEMENTLESS, LAYERS, MAGNIFIES, RANDOM, REDUCTIONS, SUMS
from amp_rewrite.ir.ops import Need
from amp_rewrite.ir.patterns.clusters import clusters, integer_ops, snakes
from amp_rewrite.ir.patterns.fills import far_reaches, fill_carriers, fills
from amp_rewrite.ir.shapes import combined_elements
from amp_rewrite.ir.view import Op, OpId, ValueId, View
from amp_rewrite.runtime.faults import faults
from amp_rewrite.settings.choices import Target

MAX_TERMS = 128
"""Maximum total number of terms in a model's float16 sums; they add at most 3.5e-3 to the outputs' error."""
_SUMMING = LAYERS | {"Einsum", "GlobalAveragePool"}


class Unneeded(NamedTuple):
    """Needs of an op's list entry not shared by any reader, and the reason."""

    needs: Collection[Need]
    because: str


@dataclass(frozen=True, slots=True)
class Needs:
    """Reasons for float32 in a model, and needs without a reader.

    `pins`: ops that stay float32, in order, with the reason. `saturate`: values to clamp to the finite range of the low
    type when they are lowered: constants when they are baked, results at their Cast. `unneeded`: ops with needs that no
    reader has, and the reason. `findings`: notes for the report.
    """

    pins: Mapping[OpId, Paint] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    saturate: frozenset[ValueId] = frozenset()
    unneeded: Mapping[OpId, Unneeded] = field(default_factory=dict)


def find_needs(view: View, to: DType, *, target: Target | None = None, rescale: bool = False) -> Needs:
    """Return the reasons for float32 in a model. O(nodes + uses); reads each float32 constant once.

    `target`: the runtime, which may have needs of its own, and faults in some releases. `rescale`: ops between
    quantizers may be low, since the quantizers get scales of the low type.
    """
    facts = find_facts(view, to)
    causes = dict(Backward(facts).pinned)
    for op, because, level in fill_carriers(view, to):
        note = f"{described(view, because) if because is not None else 'an output'} needs the exact fill {level:g}"
        adds = because is not None and view.ops[because].kind in SUMS
        causes.setdefault(op, float32(reasons.MASK_FILL if adds else reasons.CONSTANT_RANGE, because, note))
    for op in integer_ops(view) if not rescale else ():
        causes.setdefault(op, float32(reasons.QUANTIZED))
    for op, note in long_sums(view) if target == Target.WEBGPU else ():
        causes.setdefault(op, float32(reasons.LONG_SUM, None, note))
    for faulty, fault in faults(view, to, target.runtime_target) if target is not None else ():
        note = f"{fault.runtime} {fault.harm} ({fault.source})"
        causes.setdefault(faulty.id, float32(reasons.RUNTIME_FAULT, None, note))
    pins = {
        op: why._replace(because=why.because if why.because != op else None)
        for op, why in sorted(causes.items())
        if computes(view, view.ops[op], (DType.FLOAT,))
    }
    overflowing = {value: fill for value, fill in fills(view, to).items() if fill.overflows}
    findings = []
    for value, fill in overflowing.items():
        if any(use.op not in causes for use in view.uses[value]):
            level = fill.absmax if fill.level is None else fill.level
            note = f"the fill value {level:g} becomes {math.copysign(to.max, level):g}"
            note += f" · {reasons.HARMLESS}: it only selects"
            findings.append(Finding("saturated", view.value_name(value), note))
    multiples = (value for reach in far_reaches(view, to) for value in reach.multiples)
    return Needs(pins, tuple(findings), frozenset((*overflowing, *multiples)), dict(unneeded(facts)))


def pins_by_data(view: View, misfits: Mapping[ValueId, Misfit]) -> Iterator[Pin]:
    """Yield pins for the producers and readers of misfits. O(uses)."""
    for value, (reason, note, inside) in misfits.items():
        name, maker = view.value_name(value), view.producer(value)
        if maker is not None:
            yield Pin(maker.id, reason, None, f"its result {name!r} {note}", raises=True)
        for op in () if inside else view.readers(value):
            if op.kind not in ELEMENTLESS:
                because = maker.id if maker is not None and maker.id != op.id else None
                yield Pin(op.id, reason, because, f"its operand {name!r} {note}", raises=True)


def long_sums(view: View) -> Iterator[tuple[OpId, str]]:
    """Yield products and pools with a note, longest first, until the rest has at most 128 terms in total."""
    terms = sum_lengths(view)
    left = sum(terms.values())
    for op in sorted(terms, key=lambda op: (-terms[op], -op)):
        if left <= MAX_TERMS:
            return
        left -= terms[op]
        note = f"sums {terms[op]} terms; on this target, the float16 sums of a model may have {MAX_TERMS} in total"
        yield op, note


def sum_lengths(view: View) -> Mapping[OpId, int]:
    """Return the number of terms per result of float32 products and global pools. O(nodes)."""
    return {op.id: terms_of_product(view, op, UNKNOWN_DIMENSION) for op in float32_ops(view, _SUMMING)}


# -- needs without a reader ---------------------------------------------------------------------------

_MAX_SUM_TERMS = 8
_MAX_MEAN_TERMS = 1 << 8
_MAX_POOLED_TERMS = 1 << 12
"""Maximum number of terms of a mean: of any values, and of pooled feature maps. CUDA kernels accumulate in float32, but
round the sum to the low type before they divide it. In float16, 256 terms of 255 fit, or 4096 terms of 16: feature maps
have values near 1, a residual stream does not."""
_POOL_READERS = LAYERS - {"ConvTranspose"}


def unneeded(facts: Facts) -> Iterator[tuple[OpId, Unneeded]]:
    """Yield ops with needs not shared by any reader. O(nodes), plus the copies after squares and means."""
    view, copies = facts.view, Flow(facts.view, COPIES)
    for op in float32_ops(view, ("Sin",)):
        if op.id in snakes(view):
            yield op.id, Unneeded((Need.PLACE,), "in a snake activation: its error is below that of the sum after it")
    for op in (view.ops[op_id] for group in clusters(view) if group.kind == "gelu_tanh" for op_id in group.ops):
        if op.kind == "Pow":
            why = "the cube in a GELU: where it overflows, the tanh around it is already 1 or -1"
            yield op.id, Unneeded((Need.RANGE, Need.DIGITS), why)
    for op in float32_ops(view, ("Pow", "ReduceMean", "ReduceSum")):
        kinds = {reader.kind for reader in copies.readers(copies.forth(op.results[:1], view.holds_floats))}
        if op.kind == "Pow":
            divides = kinds & {*REDUCTIONS, *MAGNIFIES} or any(kind.endswith("Normalization") for kind in kinds)
            if facts[op.inputs[1]].number == 2 and not divides:
                why = "a square that no sum, mean, root or division reads"
                yield op.id, Unneeded((Need.RANGE, Need.DIGITS), why)
            continue
        terms, of_rows = combined_elements(view, op), op.kind == "ReduceMean" and list(reduction_axes(view, op)) == [-1]
        if terms is None or any(len(pair) == 1 or of_rows for pair in facts[op.inputs[0]].squares):
            continue  # sums of squares, or of products along the last axis, as in gradients of norms
        if op.kind == "ReduceSum" and terms <= _MAX_SUM_TERMS:
            yield op.id, Unneeded((Need.RANGE,), f"a sum of at most {_MAX_SUM_TERMS} numbers, as in a few Adds")
        most = _MAX_POOLED_TERMS if kinds and kinds <= _POOL_READERS else _MAX_MEAN_TERMS
        if op.kind == "ReduceMean" and "Sub" not in kinds and terms <= most:
            yield op.id, Unneeded((Need.RANGE,), "a mean of so few numbers that their sum fits")
    for op in constant_ops(view):
        yield op.id, Unneeded(tuple(Need), "computed only from shapes and constants")


def constant_ops(view: View) -> Iterator[Op]:
    """Yield the ops computed only from shapes and constants, for example the root of a head size. O(nodes + uses)."""
    known: set[ValueId | None] = {None, *view.constants}
    for op in view.ops:
        plain = known.issuperset(op.inputs) and not op.bodies and op.signature is not None and op.kind not in RANDOM
        constant = plain and bool(op.operands)
        if constant or op.kind in ELEMENTLESS:
            known.update(op.outputs)
        if constant:
            yield op
