"""Checks of a coloring against measured ranges: values outside the low type's range, and their ops."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import reduce

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.paint import Coloring
from amp_rewrite.decide.needs.facts import Misfit
from amp_rewrite.decide.reasons import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.evidence.ranges import Range, Ranges, key
from amp_rewrite.ir.dataflow import Flow, exact, input_variable, output_variable
from amp_rewrite.ir.op_classes import COPIES, ELEMENTLESS, MAGNIFIES, SELECTIONS
from amp_rewrite.ir.shapes import combined_elements
from amp_rewrite.ir.view import Op, OpId, ValueId, View

MAX_FLUSHED_SHARE = 0.5
"""Maximum share of elements flushed to zero in a value, if an op divides by it or takes its root or logarithm.
For other ops, a flushed element is harmless: it is smaller than the rounding error of the largest element."""


def misfits(
    view: View, coloring: Coloring, ranges: Ranges, headroom: float, saturate: Collection[ValueId]
) -> Mapping[ValueId, Misfit]:
    """Return a coloring's low values outside the range of the low type, except constants. O(nodes + uses).

    The reason is "overflow", "underflow", "nonfinite" (the op itself produces infinity or NaN in float32) or "unseen"
    (no element was measured). `saturate`: values to skip, because the cast to the low type clamps them.
    """
    to, misfits_by_value = DType.parse(ranges.to), dict[ValueId, Misfit]()
    seen, magnified, picks = seen_ranges(view, ranges), _magnified(view), Flow(view, _PICKS)
    for value in view.values:
        dtype = view.dtype(value.id)
        if dtype is None or not dtype.floating or view.constant(value.id) is not None or value.id in saturate:
            continue
        if value.id in seen:
            misfit = _misfit(seen[value.id], to, headroom, value.id in magnified)
            if (inside := _sum_misfit(view, value.id, seen[value.id].absmax * headroom, to)) is not None:
                misfit = inside
        else:
            sources = list(picks.sources(value.id)) if _unmeasured(view, ranges, value.id) else []
            if sources and all(view.constant(source) is not None for source in sources):
                continue  # selected only from constants, which have their own check
            untapped = ranges.untapped.get(key(view, value.id))
            misfit = Misfit(reasons.UNSEEN, "was not measured" + (f": {untapped}" if untapped else ""))
        if misfit is None or (misfit.reason == reasons.NONFINITE and not _creates_infinity(view, value.id, seen)):
            continue
        if (made_low if misfit.inside else is_low)(view, coloring, value.id):
            misfits_by_value[value.id] = misfit
    return misfits_by_value


def seen_ranges(view: View, ranges: Ranges) -> dict[ValueId, Range]:
    """Return the range of each value, or of its source if it is an unmeasured copy.

    Values introduced by a fusion were not measured. Such a value gets the merged range of the values that it is
    selected from. If these are unknown and all its readers select from it, it gets the merged range of their results.
    """
    flow, picks = Flow(view, COPIES), Flow(view, _PICKS)
    seen: dict[ValueId, Range] = {}
    for value in view.values:  # sources come first, except for loop-carried states
        range_ = ranges.of(view, value.id)
        if range_ is None:
            walk = picks if _unmeasured(view, ranges, value.id) else flow
            range_ = _merged([seen.get(s) for s in walk.sources(value.id) if view.constant(s) is None])
        if range_ is not None:
            seen[value.id] = range_
    for value in reversed(view.values):
        if value.id not in seen and _unmeasured(view, ranges, value.id):
            results = list(picks.results(value.id))
            range_ = _merged([seen.get(r) for r in results]) if len(results) == len(view.uses[value.id]) else None
            if range_ is not None:
                seen[value.id] = range_
    return seen


_PICKS = {**COPIES, "Where": SELECTIONS["Where"]}


def _merged(ranges: Sequence[Range | None]) -> Range | None:
    """Return the merged range; None if one of them is unknown."""
    known = [r for r in ranges if r is not None]
    return reduce(Range.merge, known) if known and len(known) == len(ranges) else None


def _unmeasured(view: View, ranges: Ranges, value: ValueId) -> bool:
    """True if the measured model does not contain the value: it is neither tapped nor listed as untapped."""
    name = key(view, value)
    return name not in ranges.values and name not in ranges.untapped


def _misfit(seen: Range, to: DType, headroom: float, magnified: bool) -> Misfit | None:
    needed, elements = seen.absmax * headroom, f"of {seen.count} elements"
    if seen.count == 0:
        note = "was never reached by the data: a branch was not taken, or a tensor was empty; add data that reaches it"
        return Misfit(reasons.UNSEEN, note)
    if needed > to.max:
        beyond = f", beyond {to.max:g}" if seen.absmax > to.max else f"; with headroom {headroom:g}, beyond {to.max:g}"
        note = f"reaches {seen.absmax:g}{beyond}"
        fits = to is DType.FLOAT16 and needed <= DType.BFLOAT16.max
        return Misfit(reasons.OVERFLOW, note + ("; fits bfloat16" if fits else ""))
    if seen.nonfinite:
        return Misfit(reasons.NONFINITE, f"has {seen.nonfinite} {elements} already infinite or NaN in float32")
    if 0 < seen.absmax < to.tiny * headroom:
        note = f"never exceeds {seen.absmax:g}, which is less than {headroom:g} times {to.tiny:g}"
        return Misfit(reasons.UNDERFLOW, note)
    if magnified and seen.flushed > MAX_FLUSHED_SHARE * seen.count:
        return Misfit(reasons.UNDERFLOW, f"has {seen.flushed} {elements} rounded to zero, and its readers divide by it")
    return None


def _sum_misfit(view: View, value: ValueId, size: float, to: DType) -> Misfit | None:
    """Return the misfit of a mean with too large a sum: kernels store the sum in the low type before they divide."""
    op = view.producer(value, "ReduceMean")
    terms = combined_elements(view, op) if op is not None else None
    if terms is None or terms * size <= to.max:
        return None
    note = f"is a mean of {terms} terms, whose sum reaches {terms * size:g} with headroom, beyond {to.max:g}"
    return Misfit(reasons.OVERFLOW, note, inside=True)


def _magnified(view: View) -> Collection[ValueId]:
    """Return the values with significant small elements: inputs (or their sources) of roots, logarithms, divisions."""
    starts = (
        value
        for op in view.ops
        for slot in MAGNIFIES.get(op.kind, ())
        if slot < len(op.inputs) and (value := op.inputs[slot]) is not None
    )
    return Flow(view, COPIES).back(starts)


def _creates_infinity(view: View, value: ValueId, seen: Mapping[ValueId, Range]) -> bool:
    """True if an op produces infinity from finite inputs. Infinities in a mask or in the data exist in every type."""
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


def is_low(view: View, coloring: Coloring, value: ValueId) -> bool:
    """True if an op writes a value or reads its elements in a low type, by the coloring or in the model."""
    uses = ((view.ops[use.op], use.slot) for use in view.uses[value])
    reads = (read_low(view, coloring, op, slot) for op, slot in uses if op.kind not in ELEMENTLESS)
    return made_low(view, coloring, value) or any(reads)


def is_low_op(view: View, coloring: Coloring, op: Op) -> bool:
    """True if an op reads or writes any value in a low type, by the coloring or in the model."""
    reads = any(read_low(view, coloring, op, slot) for slot in range(len(op.inputs)))
    return reads or any(made_low(view, coloring, value) for value in op.results)


def made_low(view: View, coloring: Coloring, value: ValueId) -> bool:
    """True if an op writes a value in a low type, by the coloring or in the model."""
    return _low(view, coloring, value, output_variable(view, value))


def read_low(view: View, coloring: Coloring, op: Op, slot: int) -> bool:
    """True if an op reads an input in a low type, by the coloring or in the model."""
    value = op.inputs[slot]
    return value is not None and _low(view, coloring, value, input_variable(op, slot))


def _low(view: View, coloring: Coloring, value: ValueId, variable: tuple[OpId, str] | None) -> bool:
    dtype = (coloring.dtype(variable) or view.dtype(value)) if variable is not None else None
    return dtype is not None and dtype.low


def carried(view: View, pins: Sequence[Pin]) -> Iterator[Pin]:
    """Yield pins to keep the results of pinned ops unrounded in low ops without arithmetic. O(uses).

    Each new pin has the rule of the pinned op whose result it moves. Ops on sequences are not pinned, since every op on
    the same sequence would need a pin.
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
