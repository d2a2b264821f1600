"""Guard: compare measured ranges with the low type, and pin ops to float32 if their values do not fit.

A value that does not fit stays out of the low type: its producer, every op that computes with it, and ops that only
move it in between are pinned; the minimum cut says what follows. The affected values depend on the colors, so the guard
paints, pins, and paints again until every low value fits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.paint import Coloring
from amp_rewrite.decide.reasons import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.evidence.ranges import Range, Ranges, key
from amp_rewrite.ir.dataflow import Flow, exact, input_variable, output_variable
from amp_rewrite.ir.op_classes import COPIES, ELEMENTLESS, MAGNIFIES, SELECTIONS
from amp_rewrite.ir.shapes import combined_elements
from amp_rewrite.ir.view import Op, OpId, ValueId, View
from amp_rewrite.reports.evidence import GUARDED, Evidence, Guarded
from amp_rewrite.reports.render import count
from amp_rewrite.settings.choices import HEADROOM

FLUSHED_SHARE = 0.5
"""The share of nonzero elements that may round to zero where an op divides by them or takes their root or logarithm.
Elsewhere what is flushed is smaller than the rounding of the largest element, and does no harm."""

Paint = Callable[[Sequence[Pin]], Coloring]


@dataclass(frozen=True, slots=True)
class RangeFault:
    """Reason why a value must not be low: the rule ("overflow", "underflow", "nonfinite", "unseen") and the number.

    `inside`: the fault arises inside the op that makes the value. Readers may be low.
    """

    rule: str
    note: str
    inside: bool = False


def guard(
    view: View,
    paint: Paint,
    ranges: Ranges,
    *,
    headroom: float = HEADROOM,
    saturate: Collection[ValueId] = (),
) -> Guarded:
    """Return pins and findings by ranges.

    `paint` gives the coloring of `view` under pins; `saturate`: values that are clamped where they become low. There is
    one finding for each value that would be low and does not fit, of kind "overflow", "underflow", "nonfinite"
    (infinity or NaN that the op itself gives in float32) or "unseen" (no element of it was seen), and one of kind
    "calibrated" about the data. An op of a cluster takes the cluster along. O(nodes + uses) for each painting; mostly
    there are two.
    """
    faults = _faults(view, ranges, headroom, saturate)
    held: dict[OpId, Pin] = {}
    unfit: dict[ValueId, RangeFault] = {}
    while faults:
        pins, low = _unfit(view, paint(tuple(held.values())), faults)
        unfit |= low
        fresh = {pin.op: pin for pin in pins if pin.op not in held}
        if not fresh:
            break
        held |= fresh
    batches = f"{count(ranges.batches, 'batch', 'batches')}, headroom {headroom:g}"
    doubt = "; random data is not real data: calibrate with yours before you rely on this" if ranges.random else ""
    findings = (Finding(fault.rule, view.value_name(v), fault.note) for v, fault in sorted(unfit.items()))
    return Guarded(
        tuple(held[op] for op in sorted(held)),
        (Finding("calibrated", ranges.origin, batches + doubt), *findings),
        Evidence(GUARDED, ranges.origin, ranges.batches, ranges.random),
    )


def overflowing(
    view: View, coloring: Coloring, ranges: Ranges, headroom: float, saturate: Collection[ValueId] = ()
) -> Mapping[ValueId, Range]:
    """Return the overflowing values of a coloring, made or read low, with their ranges. O(nodes + uses)."""
    seen, faults = seen_ranges(view, ranges), _faults(view, ranges, headroom, saturate)
    _, unfit = _unfit(view, coloring, {v: fault for v, fault in faults.items() if fault.rule == reasons.OVERFLOW})
    return {value: seen[value] for value in unfit}


def _faults(view: View, ranges: Ranges, headroom: float, saturate: Collection[ValueId]) -> Mapping[ValueId, RangeFault]:
    """Return the fault of each floating value but constants and those that are clamped."""
    to, faults = DType.parse(ranges.to), dict[ValueId, RangeFault]()
    seen, magnified, picks = seen_ranges(view, ranges), _magnified(view), Flow(view, _PICKS)
    for value in view.values:
        dtype = view.dtype(value.id)
        if dtype is None or not dtype.floating or view.constant(value.id) is not None or value.id in saturate:
            continue
        if value.id in seen:
            fault = _fault(seen[value.id], to, headroom, value.id in magnified)
            if (inside := _sum_fault(view, value.id, seen[value.id].absmax * headroom, to)) is not None:
                faults[value.id] = inside
        else:
            sources = list(picks.sources(value.id)) if _unmeasured(view, ranges, value.id) else []
            if sources and all(view.constant(source) is not None for source in sources):
                continue  # selected from constants only, which are checked themselves
            fault = RangeFault(reasons.UNSEEN, ranges.untapped.get(key(view, value.id), "it was not measured"))
        if fault is not None and (fault.rule != reasons.NONFINITE or _arises(view, value.id, seen)):
            faults[value.id] = fault
    return faults


def seen_ranges(view: View, ranges: Ranges) -> dict[ValueId, Range]:
    """Return the range of each value: its own, or that of its source for an unmeasured copy.

    Values that fusion introduced were not measured. Each gets the range of the value that it is selected from, or of
    the only value that is selected from it.
    """
    flow, picks = Flow(view, COPIES), Flow(view, _PICKS)
    seen: dict[ValueId, Range] = {}
    for value in view.values:  # sources come first, except for the state that a loop carries
        own = ranges.of(view, value.id)
        if own is None:
            walk = picks if _unmeasured(view, ranges, value.id) else flow
            own = _merged([seen.get(s) for s in walk.sources(value.id) if view.constant(s) is None])
        if own is not None:
            seen[value.id] = own
    for value in reversed(view.values):
        if value.id not in seen and _unmeasured(view, ranges, value.id):
            results = list(picks.results(value.id))
            own = _merged([seen.get(r) for r in results]) if len(results) == len(view.uses[value.id]) else None
            if own is not None:
                seen[value.id] = own
    return seen


_PICKS = {**COPIES, "Where": SELECTIONS["Where"]}


def _merged(ranges: Sequence[Range | None]) -> Range | None:
    """Return the merged range; None if one of them is unknown."""
    known = [r for r in ranges if r is not None]
    return reduce(Range.merge, known) if known and len(known) == len(ranges) else None


def _unmeasured(view: View, ranges: Ranges, value: ValueId) -> bool:
    """True if the measured model does not contain the value, neither tapped nor listed as untapped."""
    name = key(view, value)
    return name not in ranges.values and name not in ranges.untapped


def _fault(seen: Range, to: DType, headroom: float, magnified: bool) -> RangeFault | None:
    needed, elements = seen.absmax * headroom, f"of {seen.count} elements"
    if seen.count == 0:
        note = "the data never reached it: a branch was not taken, or a tensor was empty; add data that reaches it"
        return RangeFault(reasons.UNSEEN, note)
    if needed > to.max:
        beyond = f", beyond {to.max:g}" if seen.absmax > to.max else f"; with headroom {headroom:g}, beyond {to.max:g}"
        note = f"reaches {seen.absmax:g}{beyond}"
        fits = to is DType.FLOAT16 and needed <= DType.BFLOAT16.max
        return RangeFault(reasons.OVERFLOW, note + ("; fits bfloat16" if fits else ""))
    if seen.nonfinite:
        return RangeFault(reasons.NONFINITE, f"{seen.nonfinite} {elements} are already infinite or NaN in float32")
    if 0 < seen.absmax < to.tiny * headroom:
        note = f"stays below {seen.absmax:g}, which is less than {headroom:g} times {to.tiny:g}"
        return RangeFault(reasons.UNDERFLOW, note)
    if magnified and seen.flushed > FLUSHED_SHARE * seen.count:
        return RangeFault(reasons.UNDERFLOW, f"{seen.flushed} {elements} round to zero, and its readers divide by it")
    return None


def _sum_fault(view: View, value: ValueId, size: float, to: DType) -> RangeFault | None:
    """Return the fault of a mean with too large a sum: kernels store it in the low type before they divide."""
    op = view.producer(value, "ReduceMean")
    terms = combined_elements(view, op) if op is not None else None
    if terms is None or terms * size <= to.max:
        return None
    note = f"is a mean of {terms} terms, whose sum reaches {terms * size:g} with headroom, beyond {to.max:g}"
    return RangeFault(reasons.OVERFLOW, note, inside=True)


def _magnified(view: View) -> Collection[ValueId]:
    """Return values with small elements that matter: a root, logarithm or quotient reads them, perhaps after a move."""
    starts = (
        value
        for op in view.ops
        for slot in MAGNIFIES.get(op.kind, ())
        if slot < len(op.inputs) and (value := op.inputs[slot]) is not None
    )
    return Flow(view, COPIES).back(starts)


def _arises(view: View, value: ValueId, seen: Mapping[ValueId, Range]) -> bool:
    """True if infinities arise at this value. Those from a mask or from the data are infinite in every type."""
    op = view.producer(value)
    if op is None or op.bodies:
        return False
    for read in op.operands:
        dtype = view.dtype(read)
        if dtype is not None and dtype.floating:
            fit = view.fit(read, DType.FLOAT16) if view.constant(read) is not None else seen.get(read)
            if fit is not None and fit.nonfinite:
                return False
    return True


def _unfit(
    view: View, coloring: Coloring, faults: Mapping[ValueId, RangeFault]
) -> tuple[list[Pin], dict[ValueId, RangeFault]]:
    """Return a pin for each writer and reader of a faulty value in the low type, and these values."""
    pins: list[Pin] = []
    unfit: dict[ValueId, RangeFault] = {}
    for value, fault in faults.items():
        name, words = view.value_name(value), fault.note
        if fault.rule == reasons.UNSEEN:
            words = "was not seen"
        elif fault.rule == reasons.NONFINITE:
            words = f"has values out of range: {words}"
        op = view.producer(value)
        if op is not None and made_low(view, coloring, value):
            unfit[value] = fault
            pins.append(Pin(op.id, fault.rule, None, f"its result {name!r} {words}", raises=True))
        for use in view.uses[value]:
            reader = view.ops[use.op]
            if not fault.inside and reader.kind not in ELEMENTLESS and read_low(view, coloring, reader, use.slot):
                unfit[value] = fault
                because = op.id if op is not None and op.id != use.op else None
                pins.append(Pin(use.op, fault.rule, because, f"its operand {name!r} {words}", raises=True))
    return pins, unfit


def is_low(view: View, coloring: Coloring, value: ValueId) -> bool:
    """True if an op makes or reads a value in a low type, by the coloring or in the model."""
    uses = view.uses[value]
    return made_low(view, coloring, value) or any(read_low(view, coloring, view.ops[u.op], u.slot) for u in uses)


def made_low(view: View, coloring: Coloring, value: ValueId) -> bool:
    """True if an op makes a value in a low type, by the coloring or in the model."""
    return _low(view, coloring, value, output_variable(view, value))


def read_low(view: View, coloring: Coloring, op: Op, slot: int) -> bool:
    """True if an op reads an input in a low type, by the coloring or in the model."""
    value = op.inputs[slot]
    return value is not None and _low(view, coloring, value, input_variable(op, slot))


def _low(view: View, coloring: Coloring, value: ValueId, variable: tuple[OpId, str] | None) -> bool:
    dtype = (coloring.dtype(variable) or view.dtype(value)) if variable is not None else None
    return dtype is not None and dtype.low


def carried(view: View, pins: Sequence[Pin]) -> Iterator[Pin]:
    """Yield pins for low movers of results of pinned ops; unpinned, they would round. O(uses).

    Each has the rule of the pin that it follows. Sequences are not raised, since all ops on them would have to follow.
    """
    rules = {pin.op: pin.rule for pin in pins}
    for op in view.ops:
        if op.id in rules or op.bodies or op.signature is None or op.kind == "Constant" or not exact(op):
            continue
        moved = [v for v in op.operands if view.tensor_dtype(v) in view.low_types and view.constant(v) is None]
        makers = [maker for v in moved if (maker := view.producer(v)) is not None and maker.id in rules]
        if makers and len(makers) == len(moved):
            first = makers[0]
            rules[op.id] = rules[first.id]
            yield Pin(op.id, rules[op.id], first.id, f"moves the result of {first.name!r}", raises=True)
