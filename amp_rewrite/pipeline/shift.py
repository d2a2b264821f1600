"""Range shifting of a draft: regions that overflow are computed times 2⁻ᵏ before the guard looks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.evidence.guard import is_low, overflowing, seen_ranges
from amp_rewrite.evidence.ranges import Range, Ranges, key
from amp_rewrite.files.casting import Fit
from amp_rewrite.ir.view import ValueId, View
from amp_rewrite.pipeline.draft import Draft, is_shifted
from amp_rewrite.reports.render import count
from amp_rewrite.reports.rows import ShiftRow
from amp_rewrite.rewrite.shift.emit import Shift, refusal, shift_view, shifted_by
from amp_rewrite.rewrite.shift.equations import Equations
from amp_rewrite.rewrite.shift.plan import ShiftPlan, ShiftRequest, residual_plan
from amp_rewrite.settings.choices import Target, check_headroom


@dataclass(frozen=True)
class ShiftOutcome:
    """A draft that was shifted, or left as it is with notes about why.

    `plain`: the draft without the shift, with the notes. `ranges`: those of the shifted values, where there are ranges.
    `shift`: None if nothing is shifted.
    """

    draft: Draft
    plain: Draft
    ranges: Ranges | None = None
    shift: Shift | None = None


def shift_draft(draft: Draft, ranges: Ranges | None, headroom: float) -> ShiftOutcome:
    """Return the draft with regions that overflow shifted, and ranges of its values; both as they are without any.

    Without ranges, only an exponent shifts: residual streams. Raise what `guard` raises.
    """
    if not is_shifted(draft.request, ranges):
        return ShiftOutcome(draft, draft, ranges)
    if ranges is None:
        return shifted_residuals(draft, headroom)
    check_headroom(headroom)
    if ranges.to != draft.request.to.spelling:
        return ShiftOutcome(draft, draft, ranges)  # the guard objects
    return shifted_by_ranges(draft, ranges, headroom)


def shifted_by_ranges(draft: Draft, ranges: Ranges, headroom: float) -> ShiftOutcome:
    """Return the draft with regions shifted that overflow by ranges."""
    want = _want(draft, headroom)
    beyond = overflowing(draft.view, draft.paint(), ranges, want.to, headroom, draft.hazards.saturate)
    if not beyond or refusal(draft.view):
        plain = _refused(draft, beyond)
        return ShiftOutcome(plain, plain, ranges)
    wide = draft
    if draft.view.low_types:
        wide = Draft.of(draft.source, draft.request, widen=True)
        beyond = overflowing(wide.view, wide.paint(), ranges, want.to, headroom, wide.hazards.saturate)
    seen, coloring = seen_ranges(wide.view, ranges), wide.paint()
    low = {value: known for value, known in seen.items() if is_low(wide.view, coloring, value)}
    shift = shift_view(wide.view, beyond, low, want)
    tried = _tried(draft, wide, shift, seen, DATA)
    if tried.shift is None:
        return replace(tried, ranges=ranges)
    return replace(tried, ranges=_ranges(wide.view, shift, ranges, seen))


def shifted_residuals(draft: Draft, headroom: float) -> ShiftOutcome:
    """Return the draft with its residual streams shifted by the requested exponent, without any data."""
    if refusal(draft.view):
        return ShiftOutcome(draft, draft)
    want = _want(draft, headroom)
    equations = Equations.of(draft.view)
    shift = shifted_by(equations, residual_plan(equations, want), {}, want)
    return _tried(draft, draft, shift, {}, ASKED)


def _want(draft: Draft, headroom: float) -> ShiftRequest:
    request = draft.request
    asked = request.shift if isinstance(request.shift, int) else None
    return ShiftRequest(request.to, headroom, asked, flush=request.target is Target.ONNX)


def _refused(draft: Draft, beyond: Mapping[ValueId, Fit]) -> Draft:
    why = refusal(draft.view) if beyond else None
    if why is None:
        return draft
    finding = Finding(UNSHIFTED, "model", f"{why}, so what overflows stays float32")
    return replace(draft, notes=(*draft.notes, finding))


def _tried(draft: Draft, wide: Draft, shift: Shift, seen: Mapping[ValueId, Fit], evidence: str) -> ShiftOutcome:
    refused = tuple(refused_findings(wide.view, shift.plan))
    rows = tuple(refused_rows(wide.view, shift.plan, evidence))
    plain = replace(draft, notes=(*draft.notes, *refused), shifts=rows)
    if shift.view is wide.view:
        return ShiftOutcome(plain, plain)
    regions = tuple(region_rows(wide.view, shift, evidence))
    wide = replace(wide, notes=(*wide.notes, *refused), shifts=(*regions, *rows))
    findings = tuple(shift_findings(wide.view, shift, seen, regions))
    return ShiftOutcome(wide.on(shift.view, shift.results, findings), plain, shift=shift)


# -- ranges of shifted values -----------------------------------------------------------------------------


def _ranges(before: View, shift: Shift, ranges: Ranges, seen: Mapping[ValueId, Range]) -> Ranges:
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
    """Return the range of a value times 2⁻ᵉ. Subnormal numbers are estimated: sizes are spread evenly near zero."""
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


SHIFTED, UNSHIFTED = "shifted", "not_shifted"
"""Kinds of findings: a region that is shifted, and a value beyond the type that is not."""
DATA, ASKED = "data", "option"
"""Evidence for a shift: measured ranges, or a requested exponent."""
_EVIDENCE = {DATA: "by data", ASKED: "as asked for"}
_SHOWN = 3


def region_rows(view: View, shift: Shift, evidence: str) -> Iterator[ShiftRow]:
    """Yield the row of each region. `view`: as it was before the shift."""
    for region in shift.plan.regions:
        own = set(region.values)
        kept = tuple(view.value_name(v) for v in region.values if v not in shift.plan.exponents)
        ends = (
            view.ops[op].name
            for op, muls in shift.emitted.muls.items()
            if any(mul.value in own and not mul.exponent for mul in muls)
        )
        before = DType.FLOAT16.max / region.absmax if region.absmax else 0.0
        yield ShiftRow(
            view.value_name(region.largest),
            region.exponent,
            evidence,
            len(own) - len(kept),
            region.absmax,
            before,
            math.ldexp(before, region.exponent),
            kept,
            tuple(ends),
        )


def refused_rows(view: View, plan: ShiftPlan, evidence: str) -> Iterator[ShiftRow]:
    """Yield the row of each value beyond the type that is not shifted."""
    for refused in plan.refused:
        room = DType.FLOAT16.max / refused.absmax
        name = view.value_name(refused.value)
        yield ShiftRow(name, 0, evidence, 1, refused.absmax, room, room, why=refused.why)


def unshifted(rows: Sequence[ShiftRow], why: str) -> tuple[ShiftRow, ...]:
    """Return the rows of regions as those of values that are not shifted after all."""
    return tuple(
        ShiftRow(r.value, 0, r.evidence, r.values, r.absmax, r.headroom, r.headroom, why=why)
        for r in rows
        if r.exponent
    )


def refused_findings(view: View, plan: ShiftPlan) -> Iterator[Finding]:
    """Yield a finding for each value beyond the type that is not shifted."""
    for refused in plan.refused:
        yield refusing(view.value_name(refused.value), refused.absmax, refused.why)


def refusing(name: str, absmax: float, why: str) -> Finding:
    """Return the finding about a value beyond the type that is not shifted."""
    return Finding(UNSHIFTED, name, f"goes up to {absmax:g}; {why}: float32 as without a shift")


def shift_findings(
    view: View, shift: Shift, seen: Mapping[ValueId, Fit], rows: Sequence[ShiftRow]
) -> Iterator[Finding]:
    """Yield a finding for each region, for constants that are not copied, and for numbers that float32 loses."""
    for row in rows:
        yield Finding(SHIFTED, row.value, _words(row))
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


def _words(row: ShiftRow) -> str:
    words = [f"{count(row.values, 'value')} times 2^-{row.exponent}, {_EVIDENCE[row.evidence]}"]
    if row.absmax:
        after = math.ldexp(row.absmax, -row.exponent)
        rooms = f"headroom {row.headroom:.2g}, then {row.headroom_after:.2g}"
        words.append(f"the largest goes from {row.absmax:g} to {after:g} ({rooms})")
    if row.kept:
        words.append(f"{count(len(row.kept), 'value')} too small for it, {_some(row.kept)}")
    words.append(f"ends at {_some(row.ends)}" if row.ends else "no op needs it undone")
    return "; ".join(words)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
