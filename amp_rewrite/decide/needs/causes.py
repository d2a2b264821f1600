"""Ops in float32 by facts alone: constants and ranges beyond the type, sums and counts by another name."""

from __future__ import annotations

from collections.abc import Sequence

from amp_rewrite.decide import reasons
from amp_rewrite.decide.needs.facts import INF, NOTHING, Beyond, Fact
from amp_rewrite.decide.needs.forward import Facts
from amp_rewrite.decide.needs.sums import contracts, number_of_terms
from amp_rewrite.decide.reasons import Cause
from amp_rewrite.ir.attributes import float_attribute
from amp_rewrite.ir.dataflow import Flow, loses_digits
from amp_rewrite.ir.op_classes import ATTENTION_MASKS, COPIES, TENSOR_CORE_STEP
from amp_rewrite.ir.ops import OpRow, Trait, Way, row_of
from amp_rewrite.ir.view import Op, ValueId

_WITHOUT_NUMBERS = (Way.PICK, Way.SOURCE, Way.TEST, Way.UNKNOWN)
_NOT_ARITHMETIC = (Way.COPY, *_WITHOUT_NUMBERS)


def cause_of(facts: Facts, op: Op, row: OpRow) -> Cause | None:
    """Return why facts alone keep an op in float32; None if they do not."""
    if op.bodies:
        return None
    read = [facts[v] for v in op.operands if row.way is not Way.COPY or facts.floats(v)]
    varying = [f for f in read if not f.constant or f.decoded]
    by_constants = _by_constants(facts, op, row, read, varying)
    return by_constants or _by_range(facts, op, row, varying) or _by_spelling(facts, op, row, read)


def _by_constants(facts: Facts, op: Op, row: OpRow, read: Sequence[Fact], varying: Sequence[Fact]) -> Cause | None:
    limits = facts.limits
    computes = row.way not in _NOT_ARITHMETIC
    if computes and read and not varying and not row.traits & (Trait.RANDOM | Trait.DEQUANTIZES):
        note = "reads constants alone: computed once, in float32, when a model is loaded"
        return Cause(reasons.FOLDED, None, note)
    if varying and ((computes and row.way is not Way.SELECT) or Trait.COMPARES in row.traits):
        far = next((f for f in read if f.constant and limits.most < f.size < INF), None)
        if far is not None:
            reason = reasons.MASK_FILL if far.fill else reasons.CONSTANT_RANGE
            return Cause(reason, None, f"computes with {far.size:g}, beyond {limits.most:g}")
    note = ""
    if row.way in (Way.SCALE, Way.PRODUCT) or Trait.QUANTIZES in row.traits:
        lost = next((v for slot, v in enumerate(op.inputs) if _loses_digits(facts, op, row, slot, v)), None)
        if lost is not None:
            least = facts.view.fit(lost, facts.to).absmin
            note = f"constant {facts.view.value_name(lost)!r} goes down to {least:g}, below {limits.tiny:g}"
    if op.kind == "BatchNormalization" and len(op.inputs) > 4 and facts[op.inputs[4]].constant:
        least = facts[op.inputs[4]].low + float_attribute(op.node, "epsilon", 1e-5)
        if least < limits.tiny:
            note = f"variance + epsilon is {least:g}, below {limits.tiny:g}"
    return Cause(reasons.CONSTANT_RANGE, None, note) if note else None


def _by_range(facts: Facts, op: Op, row: OpRow, varying: Sequence[Fact]) -> Cause | None:
    if op.kind == "ReduceProd" and facts.limits.narrow:
        return Cause(reasons.CONSTANT_RANGE, None, "a product of many numbers leaves the range")
    made = facts[op.outputs[0]] if op.outputs else NOTHING
    if made.beyond and (made.decoded or not made.constant) and row.way not in _WITHOUT_NUMBERS:
        return _beyond(made.beyond, made)
    sure = row.way is not Way.PRODUCT  # a layer may well bring a value back into the range
    far = next((f for f in varying if f.beyond and (sure or facts.limits.most < f.size < INF)), None)
    if far is not None and far.beyond and row.way not in (Way.SOURCE, Way.TEST, Way.UNKNOWN):
        return _beyond(far.beyond, far)
    return None


def _by_spelling(facts: Facts, op: Op, row: OpRow, read: Sequence[Fact]) -> Cause | None:
    """Return the reason of an op for float32 by its meaning: a sum, a count, a biased softmax."""
    if op.kind == "Range":
        return Cause(reasons.WHOLE_NUMBER, None, "how many elements it gives depends on its arithmetic")
    if op.kind == "Einsum" and not contracts(facts, op) and number_of_terms(facts, op) >= TENSOR_CORE_STEP:
        return Cause(reasons.RUNNING_SUM, None, "a sum, spelled as a product")
    if row.way is Way.PRODUCT and any(f.running for f in read) and not _for_products(facts, op):
        return Cause(reasons.RUNNING_SUM, None, "a running sum or a mean, spelled as a product")
    masks = [op.inputs[slot] for slot in ATTENTION_MASKS.get(op.kind, ()) if slot < len(op.inputs)]
    if any(facts[mask].best > facts.limits.reach for mask in masks):
        return Cause(reasons.POSITION, None, "its mask is a bias that grows with the position")
    return None


def _loses_digits(facts: Facts, op: Op, row: OpRow, slot: int, value: ValueId | None) -> bool:
    """True for weights, a divisor or a single factor with few digits in the low type."""
    if value is None or not facts.floats(value) or facts.view.copied(value) is None:
        return False
    fit = facts.view.fit(value, facts.to)
    if row.way is Way.SCALE and slot == 1 and op.kind != "Mul":
        return bool(fit.flushed or fit.subnormal)
    return (row.way is not Way.SCALE or fit.count == 1) and loses_digits(facts.view, value, facts.to)


def _for_products(facts: Facts, op: Op) -> bool:
    copies = Flow(facts.view, COPIES)
    reached = copies.forth(op.results)
    ways = [row_of(reader.kind).way for reader in copies.readers(reached)]
    return facts.view.yielded.isdisjoint(reached) and bool(ways) and all(way is Way.PRODUCT for way in ways)


def _beyond(why: Beyond, fact: Fact) -> Cause:
    other = reasons.WHOLE_NUMBER if fact.whole is not None else reasons.CONSTANT_RANGE
    return Cause(reasons.MASK_FILL if why.mask else other, None, why.note)
