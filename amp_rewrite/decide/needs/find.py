"""What must stay float32 in a model, by the facts of its values and the needs of their readers."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from amp_rewrite.decide import reasons
from amp_rewrite.decide.needs.backward import Backward
from amp_rewrite.decide.needs.facts import Facts
from amp_rewrite.decide.needs.forward import find_facts
from amp_rewrite.decide.reasons import Paint, described, float32
from amp_rewrite.decide.sizes import summed_terms
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.ir.dataflow import Flow, axes_of, computes, float32_ops
from amp_rewrite.ir.op_classes import COPIES, ELEMENTLESS, LAYERS, MAGNIFIES, RANDOM, REDUCTIONS, SUMS
from amp_rewrite.ir.ops import Need
from amp_rewrite.ir.patterns.clusters import clusters, integer_ops, snakes
from amp_rewrite.ir.patterns.fills import far_reaches, fills, held_fills
from amp_rewrite.ir.shapes import combined_elements, shape_of
from amp_rewrite.ir.view import Op, OpId, ValueId, View
from amp_rewrite.runtime.faults import faults
from amp_rewrite.settings.choices import Target

MOST_TERMS = 128
"""Terms of all sums of a model that stay in float16, together: they add at most 3.5e-3 to the error of outputs."""
_SUMMING = LAYERS | {"Einsum", "GlobalAveragePool"}


class Unneeded(NamedTuple):
    """Needs without a reader among those of an op, and the reason."""

    needs: frozenset[Need]
    because: str


@dataclass(frozen=True, slots=True)
class Needs:
    """Reasons for float32 in a model, and needs without a reader.

    `pins`: ops that stay float32, in order, with the reason. `saturate`: values to clamp to the low
    type's finite range when they are lowered; constants are clamped when baked, results at their Cast. `unneeded`: ops
    with needs that no reader of them has, and the reason. `findings`: notes for the report. `guarded`: only what a
    lowered product gains from is worth a low type.
    """

    pins: Mapping[OpId, Paint] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    saturate: frozenset[ValueId] = frozenset()
    unneeded: Mapping[OpId, Unneeded] = field(default_factory=dict)
    guarded: bool = False


def find_needs(view: View, to: DType, *, target: Target | None = None, rescale: bool = False) -> Needs:
    """Return the reasons for float32 in a model. O(nodes + uses); reads each float32 constant once.

    `target`: the runtime, for needs of one alone, and for what its releases compute wrongly. `rescale`: ops between
    quantizers may be low, since the quantizers get scales of the low type.
    """
    facts = find_facts(view, to)
    causes = dict(Backward.of(facts).pinned)
    for op, why in _of_patterns(view, to, target, rescale):
        causes.setdefault(op, why)
    pins = {
        op: why._replace(because=why.because if why.because != op else None)
        for op, why in sorted(causes.items())
        if computes(view, view.ops[op], (DType.FLOAT,))
    }
    saturate, findings = _saturated(view, to, causes)
    return Needs(pins, findings, saturate, dict(unneeded(facts)), guarded=True)


def _of_patterns(view: View, to: DType, target: Target | None, rescale: bool) -> Iterator[tuple[OpId, Paint]]:
    for op, because, level in held_fills(view, to):
        note = f"{described(view, because) if because is not None else 'an output'} needs the fill {level:g} itself"
        adds = because is not None and view.ops[because].kind in SUMS
        yield op, float32(reasons.MASK_FILL if adds else reasons.CONSTANT_RANGE, because, note)
    yield from ((op, float32(reasons.QUANTIZED)) for op in integer_ops(view) if not rescale)
    for op, note in long_sums(view) if target == Target.WEBGPU else ():
        yield op, float32(reasons.LONG_SUM, None, note)
    for faulty, fault in faults(view, to, target.aim) if target is not None else ():
        yield faulty.id, float32(reasons.RUNTIME_FAULT, None, f"{fault.runtime} {fault.harm} ({fault.source})")


def long_sums(view: View) -> Iterator[tuple[OpId, str]]:
    """Yield products and pools with a note, the longest first, until the others add up 128 terms in all."""
    terms = sum_lengths(view)
    left = sum(terms.values())
    for op in sorted(terms, key=lambda op: (-terms[op], -op)):
        if left <= MOST_TERMS:
            return
        left -= terms[op]
        note = f"adds up {terms[op]} terms; in float16, all such sums of a model may have {MOST_TERMS} on this target"
        yield op, note


def sum_lengths(view: View) -> Mapping[OpId, int]:
    """Return the number of terms in each result of float32 products and global pools. O(nodes)."""
    sums = float32_ops(view, _SUMMING)
    return {op.id: summed_terms(op, [shape_of(view, value) for value in op.inputs]) for op in sums}


def _saturated(view: View, to: DType, causes: Container[OpId]) -> tuple[frozenset[ValueId], tuple[Finding, ...]]:
    overflowing = {value: fill for value, fill in fills(view, to).items() if fill.overflows}
    findings = []
    for value, fill in overflowing.items():
        if any(use.op not in causes for use in view.uses[value]):
            level = fill.absmax if fill.level is None else fill.level
            note = f"the fill value {level:g} becomes {math.copysign(to.max, level):g}"
            note += f" · {reasons.HARMLESS}: it only selects"
            findings.append(Finding("saturated", view.value_name(value), note))
    held = (value for reach in far_reaches(view, to) for value in reach.held)
    return frozenset((*overflowing, *held)), tuple(findings)


# -- needs that no reader has -------------------------------------------------------------------------

_EVERY, _RANGE, _PLACE = frozenset(Need), frozenset((Need.RANGE,)), frozenset((Need.PLACE,))
_ACCURACY = frozenset((Need.RANGE, Need.DIGITS))
_SMALL_SUM = 8
_FEW = 1 << 8
_FEW_OF_MAPS = 1 << 12
"""Terms of a mean. CUDA kernels accumulate in float32, but store the sum in the low type before they divide it, by a
number of the low type. 256 terms of 255 fit float16, and 4096 terms of 16: feature maps that layers pool have values
near 1, a residual stream does not."""
_POOLED_FOR = LAYERS - {"ConvTranspose"}


def unneeded(facts: Facts) -> Iterator[tuple[OpId, Unneeded]]:
    """Yield ops with needs of no reader. O(nodes), plus the copies after squares and means."""
    view, copies = facts.view, Flow(facts.view, COPIES)
    for op in float32_ops(view, ("Sin",)):
        if op.id in snakes(view):
            yield op.id, Unneeded(_PLACE, "of a snake activation: off by no more than the sum behind it rounds")
    for op in (view.ops[op_id] for group in clusters(view) if group.kind == "gelu_tanh" for op_id in group.ops):
        if op.kind == "Pow":
            why = "the cube in a GELU: where it leaves the range the tanh around it is 1 or -1 already"
            yield op.id, Unneeded(_ACCURACY, why)
    for op in float32_ops(view, ("Pow", "ReduceMean", "ReduceSum")):
        readers = copies.readers(copies.forth(op.results[:1], view.holds_floats))
        if op.kind == "Pow":
            if facts[op.inputs[1]].number == 2 and not any(map(_sums_or_divides, readers)):
                yield op.id, Unneeded(_ACCURACY, "a square that no sum, mean, root or divisor reads, as of Mul")
        elif _sums_squares(facts, op) or (terms := combined_elements(view, op)) is None:
            continue
        elif op.kind == "ReduceSum" and terms <= _SMALL_SUM:
            yield op.id, Unneeded(_RANGE, f"a sum of at most {_SMALL_SUM} numbers, as that many Adds give")
        elif op.kind == "ReduceMean" and not any(reader.kind == "Sub" for reader in readers):
            pooled = bool(readers) and all(reader.kind in _POOLED_FOR for reader in readers)
            if terms <= (_FEW_OF_MAPS if pooled else _FEW):
                yield op.id, Unneeded(_RANGE, "a mean of so few numbers that their sum fits")
    for op in constant_ops(view):
        yield op.id, Unneeded(_EVERY, "computed from shapes and constants alone")


def _sums_or_divides(op: Op) -> bool:
    return op.kind in REDUCTIONS or op.kind in MAGNIFIES or op.kind.endswith("Normalization")


def _sums_squares(facts: Facts, op: Op) -> bool:
    """True if a reduction reads squares, or means of products along the last axis, as in gradients of norms."""
    squares, of_rows = facts[op.inputs[0]].squares, op.kind == "ReduceMean" and list(axes_of(facts.view, op)) == [-1]
    return any(len(pair) == 1 or of_rows for pair in squares)


def constant_ops(view: View) -> Iterator[Op]:
    """Yield the ops on shapes and constants alone, as the root of a head size. O(nodes + uses)."""
    known: set[ValueId | None] = {None, *view.constants}
    for op in view.ops:
        plain = known.issuperset(op.inputs) and not op.bodies and op.signature is not None and op.kind not in RANDOM
        constant = plain and bool(op.operands)
        if constant or op.kind in ELEMENTLESS:
            known.update(op.outputs)
        if constant:
            yield op
