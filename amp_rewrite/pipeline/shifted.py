"""Range shifting of a draft: regions that overflow by ranges are computed times 2⁻ᵏ before the guard looks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.evidence.ranges import Range, Ranges, key
from amp_rewrite.ir.view import ValueId, View
from amp_rewrite.pipeline.draft import Draft
from amp_rewrite.reports.render import count
from amp_rewrite.rewrite.shift.equations import Equations
from amp_rewrite.rewrite.shift.plan import Region, Want, residual_plan
from amp_rewrite.rewrite.shift.shift import Shift, refusal, shift_view, shifted_by
from amp_rewrite.settings.choices import NO_SHIFT, Target, check_headroom

SHIFTED, UNSHIFTED = "shifted", "not_shifted"
"""Kinds of findings: a region that is shifted, and a value beyond the type that is not."""
_SHOWN = 3


def shifted(draft: Draft, ranges: Ranges | None, headroom: float) -> tuple[Draft, Ranges | None]:
    """Return the draft with regions that overflow shifted, and ranges of its values; both as they are without any.

    Raise what `guard` raises.
    """
    request = draft.request
    if request.shift == NO_SHIFT or request.to is not DType.FLOAT16:
        return draft, ranges
    want = Want(
        request.to,
        headroom,
        request.shift if isinstance(request.shift, int) else None,
        flush=request.target is Target.ONNX,
    )
    if ranges is None:
        return (_unmeasured(draft, want) if want.exponent else draft), ranges
    from amp_rewrite.evidence.guard import (  # late: only conversions with ranges pay for it
        is_low,
        overflowing,
        seen_ranges,
    )

    check_headroom(headroom)
    if ranges.to != request.to.spelling:
        return draft, ranges  # the guard objects
    beyond = overflowing(draft.view, draft.paint(), ranges, want.to, headroom, draft.hazards.saturate)
    if not beyond:
        return draft, ranges
    if why := refusal(draft.view):
        finding = Finding(UNSHIFTED, "model", f"{why}, so what overflows stays float32")
        return replace(draft, notes=(*draft.notes, finding)), ranges
    wide = draft
    if draft.view.low_types:
        wide = Draft.of(draft.source, request, widen=True)
        beyond = overflowing(wide.view, wide.paint(), ranges, want.to, headroom, wide.hazards.saturate)
    seen, coloring = seen_ranges(wide.view, ranges), wide.paint()
    low = {value: known for value, known in seen.items() if is_low(wide.view, coloring, value)}
    shift = shift_view(wide.view, beyond, low, want)
    refused = tuple(_refusals(wide.view, shift))
    if shift.view is wide.view:
        return replace(draft, notes=(*draft.notes, *refused)), ranges
    findings = tuple(_findings(wide.view, shift, seen))
    wide = replace(wide, notes=(*wide.notes, *refused))
    return wide.on(shift.view, shift.results, findings), _ranges(wide.view, shift, ranges, seen)


def _unmeasured(draft: Draft, want: Want) -> Draft:
    """Return the draft with its residual streams shifted by the exponent that is asked for, without any data."""
    if refusal(draft.view):
        return draft
    equations = Equations.of(draft.view)
    plan = residual_plan(equations, want)
    shift = shifted_by(equations, plan, {}, want)
    if shift.view is draft.view:
        return draft
    findings = [
        Finding(SHIFTED, draft.view.value_name(region.largest), _words(draft.view, shift, region))
        for region in plan.regions
    ]
    return draft.on(shift.view, shift.results, findings)


# -- ranges ------------------------------------------------------------------------------------------


def _ranges(before: View, shift: Shift, ranges: Ranges, seen: Mapping[ValueId, Range]) -> Ranges:
    """Return the ranges with those of the shifted view's new values."""
    values, untapped = dict(ranges.values), dict(ranges.untapped)
    for value in shift.view.values:
        origin = shift.origins.get(value.name)
        if origin is None:
            continue
        name, known = key(shift.view, value.id), seen.get(origin.value)
        if known is not None:
            values[name] = _scaled(known, origin.exponent)
        else:
            untapped[name] = ranges.untapped.get(key(before, origin.value), "it was not measured")
    return replace(ranges, values=values, untapped=untapped)


def _scaled(known: Range, exponent: int) -> Range:
    """Return the range of a value times 2⁻ᵉ. What becomes subnormal is estimated: sizes spread evenly near zero."""
    absmax, absmin = (math.ldexp(size, -exponent) for size in (known.absmax, known.absmin))
    to = DType.FLOAT16
    return replace(
        known,
        absmax=absmax,
        absmin=absmin,
        overflow=known.overflow if absmax > to.max else 0,
        flushed=min(known.count, int(math.ldexp(known.flushed, exponent))),
        subnormal=min(known.count, int(math.ldexp(known.subnormal, exponent))),
    )


# -- findings ----------------------------------------------------------------------------------------


def _refusals(view: View, shift: Shift) -> Iterator[Finding]:
    for refused in shift.plan.refused:
        name = view.value_name(refused.value)
        yield Finding(UNSHIFTED, name, f"goes up to {refused.absmax:g}; {refused.why}: float32 as without a shift")


def _findings(view: View, shift: Shift, seen: Mapping[ValueId, Range]) -> Iterator[Finding]:
    """Yield a finding for each region, for constants that are not copied, and for numbers that float32 loses."""
    for region in shift.plan.regions:
        yield Finding(SHIFTED, view.value_name(region.largest), _words(view, shift, region))
    for constant in shift.emitted.copied:
        note = "ops read it shifted in different ways: it is stored once, and a Mul follows where needed"
        yield Finding(SHIFTED, view.value_name(constant), note)
    small = [
        view.value_name(value)
        for value, exponent in shift.plan.exponents.items()
        if (fit := seen.get(value)) is not None and fit.absmin and math.ldexp(fit.absmin, -exponent) < DType.FLOAT.tiny
    ]
    if small:
        note = f"{count(len(small), 'value')} with elements below {DType.FLOAT.tiny:g} then, {_some(small)}"
        yield Finding(SHIFTED, "float32", f"{note}: they may lose digits in float32 as well")


def _words(view: View, shift: Shift, region: Region) -> str:
    """Return the words about a region: exponent, headroom before and after, where it ends."""
    own = set(region.values)
    kept = [v for v in region.values if v not in shift.plan.exponents]
    ends = [
        view.ops[op].name
        for op, muls in shift.emitted.muls.items()
        if any(mul.value in own and not mul.exponent for mul in muls)
    ]
    to = DType.FLOAT16
    words = [f"{count(len(own) - len(kept), 'value')} times 2^-{region.exponent}"]
    if region.absmax:
        after = math.ldexp(region.absmax, -region.exponent)
        rooms = f"headroom {to.max / region.absmax:.2g}, then {to.max / after:.2g}"
        words.append(f"the largest goes from {region.absmax:g} to {after:g} ({rooms})")
    if kept:
        words.append(f"{count(len(kept), 'value')} too small for it, {_some([view.value_name(v) for v in kept])}")
    words.append(f"ends at {_some(ends)}" if ends else "no op needs it undone")
    return "; ".join(words)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
